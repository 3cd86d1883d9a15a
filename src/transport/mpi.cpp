#include "annulus/mpi.h"

#include <mpi.h>

#include <utility>
#include <vector>

#include "annulus/error.h"
#include "transport/message_check.h"
#include "transport/mpi_endpoint.h"
#include "transport/mpi_ring.h"
#include "transport/mpi_session.h"
#include "transport/rank_prefix.h"

namespace annulus {
namespace {

using mpi::Endpoint;
using mpi::Transfer;

class MpiTicket final : public Ticket {
 public:
  MpiTicket(std::shared_ptr<Endpoint> endpoint, std::span<const Message> messages,
            std::chrono::milliseconds deadline)
      : endpoint_(std::move(endpoint)) {
    transfers_.reserve(messages.size());
    for (const Message& message : messages) transfers_.emplace_back(message, deadline);
    endpoint_->post(transfers_);
  }
  ~MpiTicket() override {
    for (Transfer& transfer : transfers_) endpoint_->call_off(transfer);
  }
  MpiTicket(const MpiTicket&) = delete;
  MpiTicket& operator=(const MpiTicket&) = delete;

  using Ticket::wait;
  void wait() override {
    for (Transfer& transfer : transfers_) endpoint_->wait(transfer);
  }

 private:
  const std::shared_ptr<Endpoint> endpoint_;
  std::vector<Transfer> transfers_;  // the endpoint holds pointers to them: add none later
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::shared_ptr<Endpoint> endpoint, std::chrono::milliseconds deadline)
      : endpoint_(std::move(endpoint)), deadline_(deadline) {}
  ~MpiTransport() override { endpoint_->leave(); }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int rank() const override { return endpoint_->rank(); }
  int size() const override { return endpoint_->size(); }
  std::string name() const override { return "mpi"; }

  std::unique_ptr<Ticket> post(std::span<const Message> messages, const Event& after) override {
    for (const Message& message : messages) check_message(message, rank(), size());
    after.wait();
    return std::make_unique<MpiTicket>(endpoint_, messages, deadline_);
  }

  void abort(const std::string& reason) noexcept override { endpoint_->abort(reason); }
  Health health() const override { return endpoint_->health(); }

  void set_deadline(std::chrono::milliseconds deadline) override {
    check_deadline(deadline, rank_prefix(rank(), size()) + "Transport::set_deadline");
    deadline_ = deadline;
  }
  std::chrono::milliseconds deadline() const override { return deadline_; }
  TransportCounters counters() const override { return endpoint_->counters(); }
  void count(const TransportCounters& moved) override { endpoint_->count(moved); }

 private:
  const std::shared_ptr<Endpoint> endpoint_;
  std::chrono::milliseconds deadline_;
};

}  // namespace

bool mpi_built() { return true; }
std::string mpi_complaint() { return ""; }

std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options) {
  check_deadline(options.deadline, "MPI transport");
  check_deadline(options.silence, "MPI transport");
  check_rate(options.bytes_per_second, "MPI transport");
  mpi::begin();
  const MPI_Comm parent =
      options.communicator ? MPI_Comm_f2c(*options.communicator) : MPI_COMM_WORLD;
  if (parent == MPI_COMM_NULL) {
    throw ConfigError("MPI transport: the communicator is MPI_COMM_NULL: this process has no rank");
  }
  const auto communicator = mpi::Communicator::copy_of(parent);
  return std::make_unique<MpiTransport>(Endpoint::make(communicator, communicator->rank(), options),
                                        options.deadline);
}

std::vector<std::unique_ptr<Transport>> mpi::make_loopback_ring(int ranks,
                                                                const MpiOptions& options) {
  begin();
  const auto communicator = Communicator::loopback(ranks);
  std::vector<std::unique_ptr<Transport>> ring;
  for (int rank = 0; rank < ranks; ++rank) {
    ring.push_back(std::make_unique<MpiTransport>(Endpoint::make(communicator, rank, options),
                                                  options.deadline));
  }
  return ring;
}

}  // namespace annulus
