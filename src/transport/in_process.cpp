#include "annulus/in_process.h"

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "transport/in_process_ring.h"
#include "transport/message_check.h"
#include "transport/rank_prefix.h"

namespace annulus {
namespace {

using in_process::Endpoint;
using in_process::Ring;
using in_process::Transfer;

class InProcessTicket final : public Ticket, public Pooled<InProcessTicket> {
 public:
  void add(std::unique_ptr<Transfer> transfer) {
    std::unique_ptr<Transfer>& end = last_ != nullptr ? last_->next_of_ticket : transfers_;
    end = std::move(transfer);
    last_ = end.get();
  }
  ~InProcessTicket() override {
    while (transfers_ != nullptr) transfers_ = std::move(transfers_->next_of_ticket);
  }
  InProcessTicket() = default;
  InProcessTicket(const InProcessTicket&) = delete;
  InProcessTicket& operator=(const InProcessTicket&) = delete;

  void wait() override {
    for (Transfer* t = transfers_.get(); t != nullptr; t = t->next_of_ticket.get())
      t->matched().wait();
  }
  void wait(Queue& queue) override {
    for (Transfer* t = transfers_.get(); t != nullptr; t = t->next_of_ticket.get()) {
      queue.wait(t->matched());
      t->let_go();
    }
  }

 private:
  std::unique_ptr<Transfer> transfers_;  // a list
  Transfer* last_ = nullptr;
};

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Ring> ring, int rank)
      : ring_(std::move(ring)), rank_(rank), deadline_(ring_->options.deadline) {}

  // Peers that wait for this rank would otherwise wait until their deadline. Finished exchanges are
  // not affected, so a rank that simply finishes first does no harm.
  ~InProcessTransport() override { ring_->leave(rank_); }
  InProcessTransport(const InProcessTransport&) = delete;
  InProcessTransport& operator=(const InProcessTransport&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return ring_->size; }
  std::string name() const override { return "in_process"; }
  // Copied by the queues of the memory itself.
  bool reaches(const Device&) const override { return true; }

  std::unique_ptr<Ticket> post(std::span<const Message> messages, const Event& after) override {
    for (const Message& message : messages) check_message(message, rank_, ring_->size);
    auto ticket = std::make_unique<InProcessTicket>();
    for (const Message& message : messages) {
      auto transfer = std::make_unique<Transfer>(ring_, rank_, message, after, deadline_);
      Transfer& started = *transfer;
      ticket->add(std::move(transfer));
      started.start();
    }
    return ticket;
  }

  void abort(const std::string& reason) noexcept override { ring_->abort(rank_, reason); }
  Health health() const override { return ring_->health(rank_); }

  void set_deadline(std::chrono::milliseconds deadline) override {
    check_deadline(deadline, rank_prefix(rank_, ring_->size) + "Transport::set_deadline");
    deadline_ = deadline;
  }

  std::chrono::milliseconds deadline() const override { return deadline_; }

  void count(const TransportCounters& moved) override {
    Endpoint& end = ring_->endpoint(rank_);
    end.bytes_sent.fetch_add(moved.bytes_sent, std::memory_order_relaxed);
    end.messages_sent.fetch_add(moved.messages_sent, std::memory_order_relaxed);
    end.bytes_received.fetch_add(moved.bytes_received, std::memory_order_relaxed);
    end.messages_received.fetch_add(moved.messages_received, std::memory_order_relaxed);
  }
  TransportCounters counters() const override {
    const Endpoint& end = ring_->endpoint(rank_);
    return {.bytes_sent = end.bytes_sent.load(std::memory_order_relaxed),
            .messages_sent = end.messages_sent.load(std::memory_order_relaxed),
            .bytes_received = end.bytes_received.load(std::memory_order_relaxed),
            .messages_received = end.messages_received.load(std::memory_order_relaxed)};
  }

 private:
  const std::shared_ptr<Ring> ring_;
  const int rank_;
  std::chrono::milliseconds deadline_;
};

std::shared_ptr<Ring> make_ring(int ranks, const InProcessOptions& options) {
  if (ranks < 1) {
    throw ConfigError("in-process ring: " + std::to_string(ranks) + " ranks, expected at least 1");
  }
  check_deadline(options.deadline, "in-process ring");
  check_rate(options.bytes_per_second, "in-process ring");
  return std::make_shared<Ring>(ranks, options);
}

}  // namespace

std::vector<std::unique_ptr<Transport>> make_in_process_ring(int ranks,
                                                             const InProcessOptions& options) {
  const std::shared_ptr<Ring> ring = make_ring(ranks, options);
  std::vector<std::unique_ptr<Transport>> transports;
  transports.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    transports.push_back(std::make_unique<InProcessTransport>(ring, rank));
  }
  return transports;
}

}  // namespace annulus
