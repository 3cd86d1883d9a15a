#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/transport.h"
#include "core/pooled.h"

// Rendezvous: a send and a receive of the same (source, destination, tag) meet in the channel of
// that pair of ranks. The first one queues itself; the second one takes it out, copies without
// holding a lock, and completes both.
//
// Locks. There are three kinds: Channel::mutex, Endpoint::link_mutex, Ring::abort_mutex. No thread
// ever holds two of them, so there is no order to get wrong. A copy is never made under a lock.
namespace annulus::in_process {

using Clock = std::chrono::steady_clock;

class Transfer;

// FIFO of queued transfers, linked through the transfers themselves: queueing allocates nothing.
struct TransferQueue {
  Transfer* first = nullptr;
  Transfer* last = nullptr;

  void push_back(Transfer& transfer);
  void remove(Transfer& transfer);
  // The oldest with this tag, or null. Linear: a rank keeps a handful of messages in flight, and
  // the oldest one is nearly always the match. A map per tag would allocate.
  [[nodiscard]] Transfer* find(std::uint32_t tag) const;
};

// Everything that goes from one rank to another (or to itself). Aligned to cache lines to avoid
// false sharing between ranks.
struct alignas(64) Channel {
  std::mutex mutex;
  // One condition variable for both ends. With one thread per rank only the other end can be asleep
  // when something changes, so one for each transfer would save no wake-up.
  std::condition_variable changed;
  TransferQueue sends;
  TransferQueue receives;
  bool source_left = false;  // the source's Transport is gone: it will post nothing more
  bool destination_left = false;
  // Set after a timeout or a size mismatch. The next message would be taken for the lost one, so
  // the channel carries no more messages.
  std::string broken;
};

// The state of one rank as a sender or receiver.
struct alignas(64) Endpoint {
  std::atomic<std::uint64_t> bytes_sent{0};
  std::atomic<std::uint64_t> messages_sent{0};
  std::atomic<std::uint64_t> bytes_received{0};
  std::atomic<std::uint64_t> messages_received{0};
  std::mutex link_mutex;
  Clock::time_point link_free{};  // when the outgoing link will be free
};

struct Ring {
  Ring(int ranks, const InProcessOptions& ring_options);

  [[nodiscard]] Channel& channel(int source, int destination) {
    return channels[static_cast<std::size_t>(source) * static_cast<std::size_t>(size) +
                    static_cast<std::size_t>(destination)];
  }
  [[nodiscard]] Endpoint& endpoint(int rank) { return endpoints[static_cast<std::size_t>(rank)]; }

  void abort(int rank, const std::string& reason) noexcept;
  // Once this returns true, abort_rank and abort_reason never change and may be read without a
  // lock.
  [[nodiscard]] bool aborted() const { return abort_flag.load(std::memory_order_acquire); }
  // Ends all traffic between `rank` and its peers.
  void leave(int rank);
  [[nodiscard]] Health health(int rank);

  // Puts a message on the outgoing link of `source` and returns when its last byte will have
  // passed.
  [[nodiscard]] Clock::time_point occupy_link(int source, std::size_t bytes);

  const int size;
  const InProcessOptions options;
  std::vector<Channel> channels;
  std::vector<Endpoint> endpoints;
  std::mutex abort_mutex;
  std::atomic<bool> abort_flag{false};
  int abort_rank = -1;
  std::string abort_reason;
};

enum class Outcome : std::uint8_t {
  pending,  // queued in the channel, no partner yet
  copying,  // matched; one side is copying between the two locks
  on_link,  // copied, but the rate-limited link is busy with it until `ready`
  done,     // this and all below are final
  timed_out,
  size_mismatch,
  aborted,
  peer_left,
  broken,  // an earlier message of the channel was lost, so the order of messages is unknown
  cancelled,
};

// One side of a message.
class Transfer : public Pooled<Transfer> {
 public:
  Transfer(std::shared_ptr<Ring> ring, int rank, const Message& message, const Event& after,
           std::chrono::milliseconds deadline);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Called once, right after construction: queues the transfer or completes it together with its
  // partner. Throws when the ring was aborted or the channel is broken.
  void start();
  // Blocks until the partner has come and the copy has been made or enqueued. The event marks its
  // end.
  [[nodiscard]] const Event& matched();
  // Called if something else keeps the memory alive until the enqueued copy is done.
  void let_go() { let_go_ = true; }

  std::unique_ptr<Transfer> next_of_ticket;

 private:
  friend struct TransferQueue;

  // These require channel_.mutex.
  [[nodiscard]] bool settle(Clock::time_point now);
  void leave_queue(Outcome outcome);
  [[nodiscard]] bool peer_left() const;
  TransferQueue& own_queue() { return sends_ ? channel_.sends : channel_.receives; }
  TransferQueue& partner_queue() { return sends_ ? channel_.receives : channel_.sends; }

  // Copies the bytes from `sender` to `receiver`, at once or by one of their queues.
  [[nodiscard]] static Event copy(const Transfer& sender, const Transfer& receiver);
  void count(const Transfer& sender, const Transfer& receiver);
  [[nodiscard]] std::string describe() const;
  [[nodiscard]] std::string describe_timeout() const;
  [[nodiscard]] TransportError error() const;  // requires channel_.mutex if the outcome is broken

  const std::shared_ptr<Ring> ring_;  // a transfer may outlive its Transport
  const bool sends_;
  const int rank_;
  const int peer_;
  Channel& channel_;
  const std::uint32_t tag_;
  std::byte* const data_;
  const std::size_t bytes_;
  const std::shared_ptr<Queue> copies_;  // null: host memory
  const Event after_;
  const std::chrono::milliseconds deadline_length_;
  const Clock::time_point deadline_;

  // The owner has seen a final outcome. No other thread knows this object any more, so no lock is
  // needed.
  bool settled_ = false;
  bool let_go_ = false;

  // Guarded by channel_.mutex.
  Outcome outcome_ = Outcome::cancelled;  // not yet queued
  Event moved_;                           // set if done or on_link
  Clock::time_point ready_{};             // set if on_link
  std::size_t partner_bytes_ = 0;         // set if size_mismatch
  Transfer* previous_ = nullptr;
  Transfer* next_ = nullptr;
};

}  // namespace annulus::in_process
