#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <string>

namespace annulus::mpi {

class Endpoint;

// Initialises MPI if nobody has, and checks that it can be used from several threads. ConfigError.
void begin();

// From now on, MPI_Finalize first lets this endpoint say goodbye.
void attend_to(const std::shared_ptr<Endpoint>& endpoint);

// A communicator of our own: errors are returned, messages meet nobody else's.
class Communicator {
 public:
  // Collective over `parent`. loopback: a ring of `ranks` that are all in this process, for tests.
  static std::shared_ptr<Communicator> copy_of(MPI_Comm parent);
  static std::shared_ptr<Communicator> loopback(int ranks);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] MPI_Comm handle() const { return handle_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  // Where and how a rank of the ring gets a kind of message (0 or 1).
  [[nodiscard]] int process(int rank) const { return loopback_ ? 0 : rank; }
  [[nodiscard]] int tag(int rank, int kind) const { return loopback_ ? 2 * rank + kind : kind; }
  // MPI still holds some of its messages: it is not freed.
  void abandon() { abandoned_ = true; }

 private:
  Communicator(MPI_Comm parent, int loopback_ranks);

  MPI_Comm handle_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  bool loopback_ = false;
  std::atomic<bool> abandoned_{false};  // by any of the ranks that share a loopback
};

[[nodiscard]] std::string error_text(int code);

}  // namespace annulus::mpi
