#include "annulus/in_process.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"

// Rendezvous: a send and a receive of the same (source, destination, tag) meet in the channel of
// that pair of ranks. The first one queues itself; the second one takes it out, copies without
// holding a lock, and completes both.
//
// Locks. There are three kinds: Channel::mutex, Endpoint::link_mutex, Ring::abort_mutex. No thread
// ever holds two of them, so there is no order to get wrong. A memcpy is never made under a lock.

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

// now() + milliseconds::max() overflows; nobody waits longer than this.
constexpr std::chrono::milliseconds kLongestDeadline = std::chrono::hours(24 * 365);

enum class Direction { kSend, kReceive };

enum class Outcome {
  kPending,  // queued in the channel, no partner yet
  kCopying,  // matched: the partner's thread (or ours) is between the two locks and uses the buffer
  kOnLink,   // copied, but the rate-limited link is not through with it before `ready`
  kDone,     // this and all below are final
  kTimedOut,
  kSizeMismatch,
  kAborted,
  kPeerLeft,
  kBroken,  // an earlier message of the channel was lost, so order can no longer be kept
  kCancelled,
};

class InProcessTransfer;

// FIFO of queued transfers, linked through the transfers themselves: queueing allocates nothing.
struct TransferQueue {
  InProcessTransfer* first = nullptr;
  InProcessTransfer* last = nullptr;

  void push_back(InProcessTransfer& transfer);
  void remove(InProcessTransfer& transfer);
  // The oldest with this tag, or null. Linear: a rank keeps a handful of messages in flight, and
  // the oldest one is nearly always the match. A map per tag would allocate.
  [[nodiscard]] InProcessTransfer* find(std::uint32_t tag) const;
};

// Everything that goes from one rank to one other (or itself). Its own cache lines: ranks must not
// slow each other down.
struct alignas(64) Channel {
  std::mutex mutex;
  // One for both ends. With one thread per rank only the other end can be asleep when something
  // changes, so a condition variable per transfer would save no wake-up.
  std::condition_variable changed;
  TransferQueue sends;
  TransferQueue receives;
  bool source_left = false;  // that rank's Transport is gone: it will post nothing more
  bool destination_left = false;
  // Not empty after a timeout or a size mismatch. The next message would be taken for the lost one,
  // so nothing passes any more.
  std::string broken;
};

// What belongs to one rank as a sender or receiver.
struct alignas(64) Endpoint {
  std::atomic<std::uint64_t> bytes_sent{0};
  std::atomic<std::uint64_t> messages_sent{0};
  std::atomic<std::uint64_t> bytes_received{0};
  std::atomic<std::uint64_t> messages_received{0};
  std::mutex link_mutex;
  Clock::time_point link_free{};  // when the outgoing link has finished all that was given to it
};

struct Ring {
  Ring(int ranks, const InProcessOptions& ring_options)
      : size(ranks),
        options(ring_options),
        channels(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)),
        endpoints(static_cast<std::size_t>(ranks)) {}

  [[nodiscard]] Channel& channel(int source, int destination) {
    return channels[static_cast<std::size_t>(source) * static_cast<std::size_t>(size) +
                    static_cast<std::size_t>(destination)];
  }
  [[nodiscard]] Endpoint& endpoint(int rank) { return endpoints[static_cast<std::size_t>(rank)]; }

  void abort(int rank, const std::string& reason) noexcept;
  // After true, abort_rank and abort_reason never change and may be read without a lock.
  [[nodiscard]] bool aborted() const { return abort_flag.load(std::memory_order_acquire); }

  // Puts a message on the outgoing link of `source` and says when the last byte is through.
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

class InProcessTransfer final : public Transfer {
 public:
  // Exactly one of `from` (a send) and `to` (a receive) is used.
  InProcessTransfer(std::shared_ptr<Ring> ring, Direction direction, int rank, int peer,
                    std::uint32_t tag, const std::byte* from, std::byte* to, std::size_t bytes,
                    std::chrono::milliseconds deadline);
  ~InProcessTransfer() override;
  InProcessTransfer(const InProcessTransfer&) = delete;
  InProcessTransfer& operator=(const InProcessTransfer&) = delete;

  void wait() override;
  bool done() override;

  // Transfers come and go with every message. Each thread keeps a few for reuse, so that a steady
  // exchange allocates nothing.
  static void* operator new(std::size_t bytes) {
    std::vector<void*>& kept = reusable().memory;
    if (kept.empty()) return ::operator new(bytes);
    void* memory = kept.back();
    kept.pop_back();
    return memory;
  }
  static void operator delete(void* memory) {
    std::vector<void*>& kept = reusable().memory;
    if (kept.size() == kept.capacity()) {
      ::operator delete(memory);
    } else {
      kept.push_back(memory);
    }
  }

  // Called once, right after construction: queues the transfer or completes it together with its
  // partner. Throws when the ring was aborted or the channel is broken.
  void start();

 private:
  friend struct TransferQueue;

  struct Reusable {
    static constexpr std::size_t kMost = 256;
    std::vector<void*> memory;
    Reusable() { memory.reserve(kMost); }
    ~Reusable() {
      for (void* m : memory) ::operator delete(m);
    }
  };
  static Reusable& reusable() {
    static thread_local Reusable list;
    return list;
  }

  // These want channel_.mutex held.
  [[nodiscard]] bool settle(Clock::time_point now);
  void leave_queue(Outcome outcome);
  [[nodiscard]] bool peer_left() const;
  TransferQueue& own_queue() {
    return direction_ == Direction::kSend ? channel_.sends : channel_.receives;
  }
  TransferQueue& partner_queue() {
    return direction_ == Direction::kSend ? channel_.receives : channel_.sends;
  }

  [[nodiscard]] std::string describe() const;
  [[nodiscard]] std::string describe_timeout() const;
  [[nodiscard]] TransportError error()
      const;  // wants channel_.mutex held if the outcome is kBroken

  const std::shared_ptr<Ring> ring_;  // a transfer may outlive its Transport
  Channel& channel_;
  const Direction direction_;
  const int rank_;
  const int peer_;
  const std::uint32_t tag_;
  const std::byte* const from_;
  std::byte* const to_;
  const std::size_t bytes_;
  const std::chrono::milliseconds deadline_length_;
  const Clock::time_point deadline_;

  bool settled_ = false;  // the owner has seen a final outcome: nobody else knows this object any
                          // more, no lock needed

  // Guarded by channel_.mutex.
  Outcome outcome_ = Outcome::kPending;
  Clock::time_point ready_{};      // with kOnLink
  std::size_t partner_bytes_ = 0;  // with kSizeMismatch
  InProcessTransfer* previous_ = nullptr;
  InProcessTransfer* next_ = nullptr;
};

void TransferQueue::push_back(InProcessTransfer& transfer) {
  transfer.previous_ = last;
  (last != nullptr ? last->next_ : first) = &transfer;
  last = &transfer;
}

void TransferQueue::remove(InProcessTransfer& transfer) {
  (transfer.previous_ != nullptr ? transfer.previous_->next_ : first) = transfer.next_;
  (transfer.next_ != nullptr ? transfer.next_->previous_ : last) = transfer.previous_;
  transfer.previous_ = transfer.next_ = nullptr;
}

InProcessTransfer* TransferQueue::find(std::uint32_t tag) const {
  InProcessTransfer* transfer = first;
  while (transfer != nullptr && transfer->tag_ != tag) transfer = transfer->next_;
  return transfer;
}

void Ring::abort(int rank, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(abort_mutex);
    if (aborted()) return;  // the first reason is the one worth knowing
    abort_rank = rank;
    try {
      abort_reason = reason;
    } catch (...) {
      // Out of memory: an abort without its reason is still an abort.
    }
    abort_flag.store(true, std::memory_order_release);
  }
  for (Channel& channel : channels) {
    // A waiter that read the flag before it was set is asleep once we get the mutex, so the wake-up
    // cannot be lost.
    const std::lock_guard lock(channel.mutex);
    channel.changed.notify_all();
  }
}

Clock::time_point Ring::occupy_link(int source, std::size_t bytes) {
  // Clamped: the cast of an absurdly long time would overflow.
  const std::chrono::duration<double> exact(static_cast<double>(bytes) / options.bytes_per_second);
  const auto duration = std::chrono::duration_cast<Clock::duration>(
      std::min<std::chrono::duration<double>>(exact, kLongestDeadline));
  Endpoint& end = endpoint(source);
  const std::lock_guard lock(end.link_mutex);
  end.link_free = std::max(end.link_free, Clock::now()) + duration;
  return end.link_free;
}

InProcessTransfer::InProcessTransfer(std::shared_ptr<Ring> ring, Direction direction, int rank,
                                     int peer, std::uint32_t tag, const std::byte* from,
                                     std::byte* to, std::size_t bytes,
                                     std::chrono::milliseconds deadline)
    : ring_(std::move(ring)),
      channel_(direction == Direction::kSend ? ring_->channel(rank, peer)
                                             : ring_->channel(peer, rank)),
      direction_(direction),
      rank_(rank),
      peer_(peer),
      tag_(tag),
      from_(from),
      to_(to),
      bytes_(bytes),
      deadline_length_(deadline),
      deadline_(Clock::now() + deadline) {}

InProcessTransfer::~InProcessTransfer() {
  if (settled_) return;
  std::unique_lock lock(channel_.mutex);
  if (outcome_ == Outcome::kPending) leave_queue(Outcome::kCancelled);
  // The partner is inside the copy: the owner frees the buffer after us, so it has to be over.
  while (outcome_ == Outcome::kCopying) channel_.changed.wait(lock);
}

void InProcessTransfer::start() {
  InProcessTransfer* partner = nullptr;
  {
    const std::lock_guard lock(channel_.mutex);
    if (ring_->aborted() || !channel_.broken.empty()) {
      outcome_ = ring_->aborted() ? Outcome::kAborted : Outcome::kBroken;
      throw error();
    }
    partner = partner_queue().find(tag_);
    if (partner == nullptr) {
      own_queue().push_back(*this);
      return;
    }
    partner_queue().remove(*partner);
    if (partner->bytes_ != bytes_) {
      outcome_ = partner->outcome_ = Outcome::kSizeMismatch;
      partner_bytes_ = partner->bytes_;
      partner->partner_bytes_ = bytes_;
      channel_.changed.notify_all();
      channel_.broken =
          describe() + " met a transfer of " + std::to_string(partner_bytes_) + " bytes";
      return;
    }
    outcome_ = partner->outcome_ = Outcome::kCopying;
  }

  const InProcessTransfer& sender = direction_ == Direction::kSend ? *this : *partner;
  const InProcessTransfer& receiver = direction_ == Direction::kSend ? *partner : *this;
  // memmove: a rank may send a buffer to itself. Empty spans may be null, which neither function
  // allows.
  if (bytes_ > 0) std::memmove(receiver.to_, sender.from_, bytes_);

  Endpoint& source = ring_->endpoint(sender.rank_);
  source.bytes_sent.fetch_add(bytes_, std::memory_order_relaxed);
  source.messages_sent.fetch_add(1, std::memory_order_relaxed);
  Endpoint& destination = ring_->endpoint(receiver.rank_);
  destination.bytes_received.fetch_add(bytes_, std::memory_order_relaxed);
  destination.messages_received.fetch_add(1, std::memory_order_relaxed);

  // A message to oneself does not leave the rank.
  const bool limited = ring_->options.bytes_per_second > 0 && rank_ != peer_;
  const Clock::time_point ready =
      limited ? ring_->occupy_link(sender.rank_, bytes_) : Clock::time_point{};

  const std::lock_guard lock(channel_.mutex);
  ready_ = partner->ready_ = ready;
  outcome_ = partner->outcome_ = limited ? Outcome::kOnLink : Outcome::kDone;
  channel_.changed.notify_all();
}

// Decides the outcome if it can be decided at this moment. False: the caller would have to wait.
bool InProcessTransfer::settle(Clock::time_point now) {
  switch (outcome_) {
    case Outcome::kPending:
      if (ring_->aborted()) {
        leave_queue(Outcome::kAborted);
      } else if (!channel_.broken.empty()) {
        leave_queue(Outcome::kBroken);
      } else if (peer_left()) {
        leave_queue(Outcome::kPeerLeft);
      } else if (now >= deadline_) {
        leave_queue(Outcome::kTimedOut);
        channel_.changed.notify_all();
        channel_.broken = describe_timeout();
      } else {
        return false;
      }
      break;
    case Outcome::kCopying:
      return false;  // no way back, but it takes no longer than the copy
    case Outcome::kOnLink:
      if (now >= ready_) {
        outcome_ = Outcome::kDone;
      } else if (ring_->aborted()) {
        outcome_ = Outcome::kAborted;
      } else if (now >= deadline_) {
        outcome_ = Outcome::kTimedOut;
      } else {
        return false;
      }
      break;
    default:
      break;
  }
  settled_ = true;
  return true;
}

void InProcessTransfer::leave_queue(Outcome outcome) {
  own_queue().remove(*this);
  outcome_ = outcome;
}

bool InProcessTransfer::peer_left() const {
  return direction_ == Direction::kSend ? channel_.destination_left : channel_.source_left;
}

void InProcessTransfer::wait() {
  if (settled_ && outcome_ == Outcome::kDone) return;
  std::unique_lock lock(channel_.mutex);
  while (!settle(Clock::now())) {
    if (outcome_ == Outcome::kCopying) {
      channel_.changed.wait(lock);
    } else {
      channel_.changed.wait_until(
          lock, outcome_ == Outcome::kOnLink ? std::min(ready_, deadline_) : deadline_);
    }
  }
  if (outcome_ != Outcome::kDone) throw error();
}

bool InProcessTransfer::done() {
  if (settled_) return true;
  const std::lock_guard lock(channel_.mutex);
  return settle(Clock::now());
}

std::string rank_prefix(int rank, int size) {
  return "[rank " + std::to_string(rank) + "/" + std::to_string(size) + "] ";
}

std::string InProcessTransfer::describe() const {
  return rank_prefix(rank_, ring_->size) +
         (direction_ == Direction::kSend ? "send of " : "receive of ") + std::to_string(bytes_) +
         " bytes " + (direction_ == Direction::kSend ? "to" : "from") + " rank " +
         std::to_string(peer_) + " (tag " + std::to_string(tag_) + ")";
}

std::string InProcessTransfer::describe_timeout() const {
  return describe() + " timed out after " + std::to_string(deadline_length_.count()) + " ms";
}

TransportError InProcessTransfer::error() const {
  const std::string peer = "rank " + std::to_string(peer_);
  switch (outcome_) {
    case Outcome::kTimedOut:
      if (ready_ != Clock::time_point{}) {
        return TransportError(describe_timeout() + ": the link is limited to " +
                                  std::to_string(ring_->options.bytes_per_second) +
                                  " bytes per second; raise the limit or the deadline",
                              peer_);
      }
      return TransportError(
          describe_timeout() + ": is " + peer + " still running and making the same calls?", peer_);
    case Outcome::kSizeMismatch:
      return TransportError(describe() + " met a " +
                                (direction_ == Direction::kSend ? "receive" : "send") + " of " +
                                std::to_string(partner_bytes_) +
                                " bytes: do both ranks use the same shapes and plan?",
                            peer_);
    case Outcome::kAborted:
      return TransportError(describe() + " failed: rank " + std::to_string(ring_->abort_rank) +
                                " aborted the transport: " + ring_->abort_reason,
                            ring_->abort_rank);
    case Outcome::kPeerLeft:
      return TransportError(
          describe() + " failed: " + peer +
              " has left (its transport was destroyed): is it making the same calls?",
          peer_);
    default:
      return TransportError(
          describe() + " failed: an earlier message of the two ranks was lost: " + channel_.broken,
          peer_);
  }
}

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Ring> ring, int rank)
      : ring_(std::move(ring)), rank_(rank), deadline_(ring_->options.deadline) {}

  ~InProcessTransport() override {
    // Peers that wait for this rank would do so until their deadline. What they have already
    // exchanged with it is not affected, so a rank that simply finishes first does no harm.
    for (int peer = 0; peer < ring_->size; ++peer) {
      mark_left(ring_->channel(rank_, peer), &Channel::source_left);
      mark_left(ring_->channel(peer, rank_), &Channel::destination_left);
    }
  }
  InProcessTransport(const InProcessTransport&) = delete;
  InProcessTransport& operator=(const InProcessTransport&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return ring_->size; }
  std::string name() const override { return "in_process"; }

  std::unique_ptr<Transfer> send(int peer, std::uint32_t tag,
                                 std::span<const std::byte> bytes) override {
    return post(Direction::kSend, peer, tag, bytes.data(), nullptr, bytes.size());
  }
  std::unique_ptr<Transfer> receive(int peer, std::uint32_t tag,
                                    std::span<std::byte> bytes) override {
    return post(Direction::kReceive, peer, tag, nullptr, bytes.data(), bytes.size());
  }

  void abort(const std::string& reason) noexcept override { ring_->abort(rank_, reason); }

  void set_deadline(std::chrono::milliseconds deadline) override {
    if (deadline.count() <= 0) {
      throw ConfigError(rank_prefix(rank_, ring_->size) +
                        "Transport::set_deadline: the deadline is " +
                        std::to_string(deadline.count()) + " ms, expected more than 0");
    }
    deadline_ = deadline;
  }

  TransportCounters counters() const override {
    const Endpoint& end = ring_->endpoint(rank_);
    return {.bytes_sent = end.bytes_sent.load(std::memory_order_relaxed),
            .messages_sent = end.messages_sent.load(std::memory_order_relaxed),
            .bytes_received = end.bytes_received.load(std::memory_order_relaxed),
            .messages_received = end.messages_received.load(std::memory_order_relaxed)};
  }

 private:
  static void mark_left(Channel& channel, bool Channel::*side) {
    const std::lock_guard lock(channel.mutex);
    channel.*side = true;
    channel.changed.notify_all();
  }

  std::unique_ptr<Transfer> post(Direction direction, int peer, std::uint32_t tag,
                                 const std::byte* from, std::byte* to, std::size_t bytes) {
    if (peer < 0 || peer >= ring_->size) {
      throw ConfigError(rank_prefix(rank_, ring_->size) +
                        (direction == Direction::kSend ? "Transport::send" : "Transport::receive") +
                        ": peer is " + std::to_string(peer) + ", expected 0.." +
                        std::to_string(ring_->size - 1));
    }
    auto transfer = std::make_unique<InProcessTransfer>(
        ring_, direction, rank_, peer, tag, from, to, bytes, std::min(deadline_, kLongestDeadline));
    transfer->start();
    return transfer;
  }

  const std::shared_ptr<Ring> ring_;
  const int rank_;
  std::chrono::milliseconds deadline_;
};

std::shared_ptr<Ring> make_ring(int ranks, const InProcessOptions& options) {
  if (ranks < 1) {
    throw ConfigError("in-process ring: " + std::to_string(ranks) + " ranks, expected at least 1");
  }
  if (options.deadline.count() <= 0) {
    throw ConfigError("in-process ring: the deadline is " +
                      std::to_string(options.deadline.count()) + " ms, expected more than 0");
  }
  if (!(options.bytes_per_second >= 0) || std::isinf(options.bytes_per_second)) {
    throw ConfigError("in-process ring: bytes_per_second is " +
                      std::to_string(options.bytes_per_second) + ", expected 0 (no limit) or more");
  }
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
