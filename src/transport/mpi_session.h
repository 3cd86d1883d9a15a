#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <string>

namespace annulus::mpi {

class Endpoint;

// Initialises MPI if necessary and checks that several threads can use it. Throws ConfigError.
void begin();

// Lets this endpoint say goodbye at the start of MPI_Finalize.
void attend_to(const std::shared_ptr<Endpoint>& endpoint);

// A separate communicator, which returns errors and keeps its messages apart from the caller's.
class Communicator {
 public:
  // Collective over `parent`. loopback: a ring of `ranks` ranks that are all in this process, for
  // tests.
  static std::shared_ptr<Communicator> copy_of(MPI_Comm parent);
  static std::shared_ptr<Communicator> loopback(int ranks);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] MPI_Comm handle() const { return handle_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  // The rank and tag for a kind of message (0 or 1) to a rank of the ring.
  [[nodiscard]] int process(int rank) const { return loopback_ ? 0 : rank; }
  [[nodiscard]] int tag(int rank, int kind) const { return loopback_ ? 2 * rank + kind : kind; }
  // Marks that MPI still holds messages of it, so that it is not freed.
  void abandon() { abandoned_ = true; }

 private:
  Communicator(MPI_Comm parent, int loopback_ranks);

  MPI_Comm handle_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  bool loopback_ = false;
  std::atomic<bool> abandoned_{false};  // set by any of the ranks that share a loopback
};

[[nodiscard]] std::string error_text(int code);

}  // namespace annulus::mpi
