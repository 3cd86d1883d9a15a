#include "transport/in_process_ring.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "transport/message_check.h"
#include "transport/rank_prefix.h"

namespace annulus::in_process {
void TransferQueue::push_back(Transfer& transfer) {
  transfer.previous_ = last;
  (last != nullptr ? last->next_ : first) = &transfer;
  last = &transfer;
}

void TransferQueue::remove(Transfer& transfer) {
  (transfer.previous_ != nullptr ? transfer.previous_->next_ : first) = transfer.next_;
  (transfer.next_ != nullptr ? transfer.next_->previous_ : last) = transfer.previous_;
  transfer.previous_ = transfer.next_ = nullptr;
}

Transfer* TransferQueue::find(std::uint32_t tag) const {
  Transfer* transfer = first;
  while (transfer != nullptr && transfer->tag_ != tag) transfer = transfer->next_;
  return transfer;
}

Ring::Ring(int ranks, const InProcessOptions& ring_options)
    : size(ranks),
      options(ring_options),
      channels(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)),
      endpoints(static_cast<std::size_t>(ranks)) {}

void Ring::abort(int rank, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(abort_mutex);
    if (aborted()) return;  // keep only the first reason
    abort_rank = rank;
    try {
      abort_reason = reason;
    } catch (...) {
      // Out of memory: the abort takes effect without its reason.
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

void Ring::leave(int rank) {
  const auto mark = [](Channel& of, bool Channel::*side) {
    const std::lock_guard lock(of.mutex);
    of.*side = true;
    of.changed.notify_all();
  };
  for (int peer = 0; peer < size; ++peer) {
    mark(channel(rank, peer), &Channel::source_left);
    mark(channel(peer, rank), &Channel::destination_left);
  }
}

Health Ring::health(int rank) {
  if (aborted()) return {false, abort_rank, abort_reason};
  for (int peer = 0; peer < size; ++peer) {
    for (Channel* of : {&channel(rank, peer), &channel(peer, rank)}) {
      const std::lock_guard lock(of->mutex);
      if (!of->broken.empty()) return {false, peer, of->broken};
      if (peer != rank && (of->source_left || of->destination_left))
        return {false, peer, "rank " + std::to_string(peer) + " has left"};
    }
  }
  return {};
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

Transfer::Transfer(std::shared_ptr<Ring> ring, int rank, const Message& message, const Event& after,
                   std::chrono::milliseconds deadline)
    : ring_(std::move(ring)),
      sends_(message.way == Way::send),
      rank_(rank),
      peer_(message.peer),
      channel_(sends_ ? ring_->channel(rank, message.peer) : ring_->channel(message.peer, rank)),
      tag_(message.tag),
      data_(message.data()),
      bytes_(static_cast<std::size_t>(message.bytes)),
      copies_(message.region->copies),
      after_(after),
      deadline_length_(std::min(deadline, kLongestDeadline)),
      deadline_(Clock::now() + deadline_length_) {}

Transfer::~Transfer() {
  if (!settled_) {
    std::unique_lock lock(channel_.mutex);
    if (outcome_ == Outcome::pending) leave_queue(Outcome::cancelled);
    // The partner is copying. The owner may free the memory after this call, so wait for the copy
    // to finish.
    while (outcome_ == Outcome::copying) channel_.changed.wait(lock);
  }
  if (let_go_) return;
  try {
    moved_.wait();
  } catch (...) {
    // The device failed, so it does not touch the memory any more. Waiting callers get the error.
  }
}

Event Transfer::copy(const Transfer& sender, const Transfer& receiver) {
  const std::size_t bytes = receiver.bytes_;
  Queue* queue = receiver.copies_ != nullptr ? receiver.copies_.get() : sender.copies_.get();
  if (queue != nullptr) {
    queue->wait(sender.after_);
    queue->wait(receiver.after_);
    if (bytes > 0) queue->copy(receiver.data_, sender.data_, static_cast<std::int64_t>(bytes));
    return queue->record();
  }
  // memmove, because a rank may send a buffer to itself. Empty spans may be null, which neither
  // function permits.
  if (bytes > 0) std::memmove(receiver.data_, sender.data_, bytes);
  return {};
}

void Transfer::count(const Transfer& sender, const Transfer& receiver) {
  Endpoint& source = ring_->endpoint(sender.rank_);
  source.bytes_sent.fetch_add(bytes_, std::memory_order_relaxed);
  source.messages_sent.fetch_add(1, std::memory_order_relaxed);
  Endpoint& destination = ring_->endpoint(receiver.rank_);
  destination.bytes_received.fetch_add(bytes_, std::memory_order_relaxed);
  destination.messages_received.fetch_add(1, std::memory_order_relaxed);
}

void Transfer::start() {
  // Host memory is copied by the side that comes second. It cannot wait for another rank's device.
  if (copies_ == nullptr) after_.wait();
  Transfer* partner = nullptr;
  {
    const std::lock_guard lock(channel_.mutex);
    if (ring_->aborted() || !channel_.broken.empty()) {
      outcome_ = ring_->aborted() ? Outcome::aborted : Outcome::broken;
      settled_ = true;
      throw error();
    }
    partner = partner_queue().find(tag_);
    if (partner == nullptr) {
      outcome_ = Outcome::pending;
      own_queue().push_back(*this);
      return;
    }
    partner_queue().remove(*partner);
    if (partner->bytes_ != bytes_) {
      outcome_ = partner->outcome_ = Outcome::size_mismatch;
      partner_bytes_ = partner->bytes_;
      partner->partner_bytes_ = bytes_;
      channel_.changed.notify_all();
      channel_.broken =
          describe() + " met a transfer of " + std::to_string(partner_bytes_) + " bytes";
      return;
    }
    outcome_ = partner->outcome_ = Outcome::copying;
  }

  const Transfer& sender = sends_ ? *this : *partner;
  const Transfer& receiver = sends_ ? *partner : *this;
  Event moved;
  try {
    moved = copy(sender, receiver);
  } catch (const std::exception& failure) {
    const std::lock_guard lock(channel_.mutex);
    channel_.broken = describe() + " failed: " + failure.what();
    outcome_ = partner->outcome_ = Outcome::broken;
    channel_.changed.notify_all();
    throw;
  }
  count(sender, receiver);

  // A message to oneself does not leave the rank.
  const bool limited = ring_->options.bytes_per_second > 0 && rank_ != peer_;
  const Clock::time_point ready =
      limited ? ring_->occupy_link(sender.rank_, bytes_) : Clock::time_point{};

  const std::lock_guard lock(channel_.mutex);
  ready_ = partner->ready_ = ready;
  moved_ = partner->moved_ = moved;
  outcome_ = partner->outcome_ = limited ? Outcome::on_link : Outcome::done;
  channel_.changed.notify_all();
}

// Decides the outcome if that is possible now. False: the caller has to wait.
bool Transfer::settle(Clock::time_point now) {
  switch (outcome_) {
    case Outcome::pending:
      if (ring_->aborted()) {
        leave_queue(Outcome::aborted);
      } else if (!channel_.broken.empty()) {
        leave_queue(Outcome::broken);
      } else if (peer_left()) {
        leave_queue(Outcome::peer_left);
      } else if (now >= deadline_) {
        leave_queue(Outcome::timed_out);
        channel_.changed.notify_all();
        channel_.broken = describe_timeout();
      } else {
        return false;
      }
      break;
    case Outcome::copying:
      return false;  // past the point of no return; takes no longer than the copy
    case Outcome::on_link:
      if (now >= ready_) {
        outcome_ = Outcome::done;
      } else if (ring_->aborted()) {
        outcome_ = Outcome::aborted;
      } else if (now >= deadline_) {
        outcome_ = Outcome::timed_out;
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

void Transfer::leave_queue(Outcome outcome) {
  own_queue().remove(*this);
  outcome_ = outcome;
}

bool Transfer::peer_left() const {
  return sends_ ? channel_.destination_left : channel_.source_left;
}

const Event& Transfer::matched() {
  if (settled_ && outcome_ == Outcome::done) return moved_;
  std::unique_lock lock(channel_.mutex);
  while (!settle(Clock::now())) {
    if (outcome_ == Outcome::copying) {
      channel_.changed.wait(lock);
    } else {
      channel_.changed.wait_until(
          lock, outcome_ == Outcome::on_link ? std::min(ready_, deadline_) : deadline_);
    }
  }
  if (outcome_ != Outcome::done) throw error();
  return moved_;
}

std::string Transfer::describe() const {
  return rank_prefix(rank_, ring_->size) + (sends_ ? "send of " : "receive of ") +
         std::to_string(bytes_) + " bytes " + (sends_ ? "to" : "from") + " rank " +
         std::to_string(peer_) + " (tag " + std::to_string(tag_) + ")";
}

std::string Transfer::describe_timeout() const {
  return describe() + " timed out after " + std::to_string(deadline_length_.count()) + " ms";
}

TransportError Transfer::error() const {
  const std::string peer = "rank " + std::to_string(peer_);
  switch (outcome_) {
    case Outcome::timed_out:
      if (ready_ != Clock::time_point{}) {
        return TransportError(describe_timeout() + ": the link is limited to " +
                                  std::to_string(ring_->options.bytes_per_second) +
                                  " bytes per second; raise the limit or the deadline",
                              peer_);
      }
      return TransportError(
          describe_timeout() + ": is " + peer + " still running and making the same calls?", peer_);
    case Outcome::size_mismatch:
      return TransportError(describe() + " met a " + (sends_ ? "receive" : "send") + " of " +
                                std::to_string(partner_bytes_) +
                                " bytes: do both ranks use the same shapes and plan?",
                            peer_);
    case Outcome::aborted:
      return TransportError(describe() + " failed: rank " + std::to_string(ring_->abort_rank) +
                                " aborted the transport: " + ring_->abort_reason,
                            ring_->abort_rank);
    case Outcome::peer_left:
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

}  // namespace annulus::in_process
