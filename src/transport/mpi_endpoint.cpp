#include "transport/mpi_endpoint.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "transport/message_check.h"
#include "transport/rank_prefix.h"

namespace annulus::mpi {
namespace {

using std::chrono::microseconds;

constexpr microseconds kShortestNap{20};
constexpr microseconds kLongestNap{1000};  // poll interval of the thread while transfers are open
constexpr microseconds kLongestWaiterNap{200};  // poll interval of a waiting caller
constexpr std::chrono::milliseconds kIdleNap{20};
constexpr std::chrono::seconds kPatienceWithBroken{3};
constexpr std::chrono::milliseconds kOverslept{50};
constexpr std::chrono::milliseconds kTimeToReadMail{20};
// A short message between two processes of one machine takes a few microseconds, and so does a
// poll.
constexpr int kPollsBeforeNaps = 50;

}  // namespace

Transfer::Transfer(const Message& message, std::chrono::milliseconds length)
    : sends(message.way == Way::send),
      peer(message.peer),
      tag(message.tag),
      data(message.data()),
      bytes(static_cast<std::size_t>(message.bytes)),
      deadline_length(std::min(length, kLongestDeadline)),
      deadline(Clock::now() + deadline_length),
      packets(std::max<std::size_t>(1, (bytes + kPacketBytes - 1) / kPacketBytes)) {}

Endpoint::Endpoint(std::shared_ptr<Communicator> communicator, int rank, const MpiOptions& options)
    : rank_(rank),
      size_(communicator->size()),
      bytes_per_second_(options.bytes_per_second),
      silence_(std::min(options.silence, kLongestDeadline)),
      mail_(std::move(communicator), rank),
      channels_(static_cast<std::size_t>(size_)) {}

std::shared_ptr<Endpoint> Endpoint::make(std::shared_ptr<Communicator> communicator, int rank,
                                         const MpiOptions& options) {
  std::shared_ptr<Endpoint> endpoint(new Endpoint(std::move(communicator), rank, options));
  attend_to(endpoint);
  try {
    std::thread([endpoint] { endpoint->run(); }).detach();
  } catch (const std::exception& failure) {
    throw DeviceError(rank_prefix(rank, endpoint->size_) +
                      "MPI transport: cannot start its thread: " + failure.what());
  }
  return endpoint;
}

// ---- progress

void Endpoint::run() {
  std::unique_lock lock(mutex_);
  microseconds nap = kShortestNap;
  while (!stopping_) {
    if (leaving_ && !said_goodbye_ && open_ == 0) {
      said_goodbye_ = true;
      try {
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) continue;
          mail_.send_note(peer, {.kind = Kind::leave, .value = channel(peer).packets_sent});
        }
      } catch (...) {
        end_by_exception();
      }
    }
    const bool moved = waiting_ == 0 && poll();
    if (said_goodbye_ && everybody_left() && mail_.idle()) break;
    if (moved) {
      nap = kShortestNap;
      lock.unlock();  // wakes callers
      std::this_thread::yield();
      lock.lock();
    } else if (waiting_ == 0 && (open_ > 0 || leaving_ || !mail_.idle())) {
      changed_.wait_for(lock, nap);
      nap = std::min(2 * nap, kLongestNap);
    } else {
      changed_.wait_for(lock, kIdleNap);
      nap = kShortestNap;
    }
  }
  if (!ended_) end(-1, "MPI has been finalised");
  mail_.close();
  finished_ = true;
  changed_.notify_all();
}

bool Endpoint::poll() noexcept {
  if (finished_) return false;
  try {
    const bool moved = mail_.poll(*this);
    return send_packets() || moved;
  } catch (...) {
    end_by_exception();
  }
  return false;
}

// A packet of each send in turn, so that batches progress independently.
bool Endpoint::send_packets() {
  bool any = false;
  std::size_t passed_over = 0;
  while (passed_over < sending_.size()) {
    Transfer* send = sending_.front();
    sending_.pop_front();
    const std::size_t offset = send->packets_begun * kPacketBytes;
    const std::size_t bytes = std::min(kPacketBytes, send->bytes - offset);
    if (!mail_.has_room(send->peer) || !link_is_through(*send, bytes)) {
      sending_.push_back(send);
      ++passed_over;
      continue;
    }
    mail_.send_data(send->peer, {.kind = Kind::data, .id = send->id, .value = offset},
                    {send->data + offset, bytes}, send);
    ++channel(send->peer).packets_sent;
    if (++send->packets_begun < send->packets) sending_.push_back(send);
    any = true;
  }
  return any;
}

// A packet of a rate-limited link leaves at the time its last byte would have passed, so late polls
// do not reduce the rate.
bool Endpoint::link_is_through(const Transfer& send, std::size_t bytes) {
  if (bytes_per_second_ == 0 || send.peer == rank_) return true;
  const auto through =
      link_free_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                       static_cast<double>(bytes) / bytes_per_second_));
  if (Clock::now() < through) return false;
  link_free_ = through;
  return true;
}

void Endpoint::on_note(const Header& header, std::string_view text) {
  if (header.source < 0 || header.source >= size_) return;
  Channel& from = channel(header.source);
  from.asked.reset();
  const auto receive = receives_.find(header.id);
  switch (header.kind) {
    case Kind::ready: {
      const Ready ready{header.tag, header.id, static_cast<std::size_t>(header.value)};
      const auto send = std::find_if(from.sends.begin(), from.sends.end(),
                                     [&](const Transfer* one) { return one->tag == ready.tag; });
      if (send == from.sends.end()) {
        from.receives.push_back(ready);
      } else {
        Transfer& found = **send;
        from.sends.erase(send);
        match(found, ready);
      }
      break;
    }
    case Kind::retract:  // already met: its bytes will come and be discarded
      std::erase_if(from.receives, [&](const Ready& one) { return one.id == header.id; });
      break;
    case Kind::mismatch:
      if (receive == receives_.end()) break;
      receive->second->partner_bytes = static_cast<std::size_t>(header.value);
      from.broken =
          describe(*receive->second) + " met a send of " + std::to_string(header.value) + " bytes";
      conclude(*receive->second, Outcome::size_mismatch);
      break;
    case Kind::broken:
      if (!from.broken.empty()) break;
      from.broken = text;
      // The rank that is blamed only learns that the other one has given up.
      blame(header.source, header.value == static_cast<std::uint64_t>(rank_)
                               ? header.source
                               : rank_or(header.value, header.source));
      break;
    case Kind::waits:
      from.waits_for = rank_or(header.value, -1);
      break;
    case Kind::goes_on:
      from.waits_for = -1;
      break;
    case Kind::abort:
      end(rank_or(header.value, header.source),
          "rank " + std::to_string(header.source) + " aborted the transport: " + std::string(text));
      break;
    case Kind::leave:
      from.leaves_after = header.value;
      break;
    case Kind::asks:
      mail_.send_note(header.source, {.kind = Kind::answers});
      break;
    case Kind::answers:  // all notes prove that the sender is alive
    case Kind::data:
      break;
  }
}

void Endpoint::on_data(const Header& header, std::span<const std::byte> bytes) {
  if (header.source < 0 || header.source >= size_) return;
  ++channel(header.source).packets_received;
  channel(header.source).asked.reset();
  const auto found = receives_.find(header.id);
  if (found == receives_.end()) return;  // called off
  Transfer& receive = *found->second;
  if (header.value > receive.bytes || bytes.size() > receive.bytes - header.value) {
    break_channel(header.source, header.source, describe(receive) + " got bytes beyond its end");
    return;
  }
  if (!bytes.empty()) std::memcpy(receive.data + header.value, bytes.data(), bytes.size());
  receive.outcome = Outcome::moving;
  if (++receive.packets_moved < receive.packets) return;
  count({.bytes_received = receive.bytes, .messages_received = 1});
  conclude(receive, Outcome::done);
}

void Endpoint::on_sent(void* owner) {
  Transfer& send = *static_cast<Transfer*>(owner);
  if (++send.packets_moved < send.packets) return;
  count({.bytes_sent = send.bytes, .messages_sent = 1});
  conclude(send, Outcome::done);
}

void Endpoint::match(Transfer& send, const Ready& receive) {
  if (send.bytes != receive.bytes) {
    send.partner_bytes = receive.bytes;
    channel(send.peer).broken =
        describe(send) + " met a receive of " + std::to_string(receive.bytes) + " bytes";
    conclude(send, Outcome::size_mismatch);
    mail_.send_note(send.peer, {.kind = Kind::mismatch, .id = receive.id, .value = send.bytes});
    return;
  }
  send.id = receive.id;
  send.outcome = Outcome::moving;
  if (sending_.empty()) link_free_ = std::max(link_free_, Clock::now());
  sending_.push_back(&send);
}

// ---- transfers

void Endpoint::post(std::span<Transfer> batch) {
  const std::lock_guard lock(mutex_);
  poll();  // handle what has arrived since the last poll
  for (Transfer& transfer : batch) {
    if (!ended_ && channel(transfer.peer).broken.empty()) continue;
    transfer.outcome = ended_ ? Outcome::ended : Outcome::broken;
    throw error(transfer);
  }
  try {
    for (Transfer& transfer : batch) {
      transfer.outcome = Outcome::pending;
      ++open_;
      Channel& with = channel(transfer.peer);
      if (!transfer.sends) {
        transfer.id = ++last_id_;
        receives_.emplace(transfer.id, &transfer);
        mail_.send_note(
            transfer.peer,
            {.kind = Kind::ready, .id = transfer.id, .value = transfer.bytes, .tag = transfer.tag});
        continue;
      }
      const auto ready = std::find_if(with.receives.begin(), with.receives.end(),
                                      [&](const Ready& one) { return one.tag == transfer.tag; });
      if (ready == with.receives.end()) {
        with.sends.push_back(&transfer);
      } else {
        const Ready found = *ready;
        with.receives.erase(ready);
        match(transfer, found);
      }
    }
  } catch (...) {  // must not fail for lack of memory: the endpoint already knows the transfers
    end_by_exception();  // waiting callers get the error
    for (Transfer& transfer : batch) {
      if (!transfer.open()) transfer.outcome = Outcome::ended;  // it was never posted
    }
  }
  poll();
  if (open_ > 0) changed_.notify_all();
}

void Endpoint::wait(Transfer& transfer) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  int polls = 0;
  bool told = false;  // the other ranks, that this one waits
  microseconds nap = kShortestNap;
  auto last = Clock::now();
  auto awake = last;
  Channel& with = channel(transfer.peer);
  if (with.asked) with.asked = last;  // restart the timer: this rank did not listen
  for (;;) {
    const bool moved = transfer.open() && poll();
    // A process that was stopped wakes up with its deadline passed. What it waited for, or the
    // reason why that does not come, is then usually in its mail.
    const auto now = Clock::now();
    if (now - std::exchange(last, now) >= kOverslept) awake = now + kTimeToReadMail;
    if (settle(transfer, now < awake ? Clock::time_point::min() : now)) break;
    if (moved) {
      polls = 0;
      nap = kShortestNap;
      continue;
    }
    if (!told && now >= transfer.deadline - transfer.deadline_length / 2) {
      told = true;
      tell_all({.kind = Kind::waits, .value = static_cast<std::uint64_t>(transfer.peer)});
    }
    lock.unlock();
    if (++polls < kPollsBeforeNaps) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestWaiterNap);
    }
    lock.lock();
  }
  if (--waiting_ == 0 && open_ > 0) changed_.notify_all();
  if (transfer.outcome != Outcome::done) throw error(transfer);
  if (told) tell_all({.kind = Kind::goes_on});
}

void Endpoint::call_off(Transfer& transfer) noexcept {
  std::unique_lock lock(mutex_);
  // The receiver expects the rest of a send that has begun. Wait until all of it is in packets, or
  // until the ring has failed.
  while (transfer.sends && transfer.outcome == Outcome::moving &&
         transfer.packets_begun < transfer.packets) {
    if (settle(transfer, Clock::now()) || poll()) continue;
    lock.unlock();
    std::this_thread::sleep_for(kShortestNap);
    lock.lock();
  }
  if (transfer.open()) withdraw(transfer, Outcome::cancelled);
}

void Endpoint::conclude(Transfer& transfer, Outcome outcome) {
  if (!transfer.sends) receives_.erase(transfer.id);
  transfer.outcome = outcome;
  --open_;
}

// Ends a transfer whose memory may be freed afterwards.
void Endpoint::withdraw(Transfer& transfer, Outcome outcome) {
  if (transfer.sends) {
    std::erase(channel(transfer.peer).sends, &transfer);
    std::erase(sending_, &transfer);
    mail_.forget(&transfer);
  } else if (outcome == Outcome::cancelled) {
    try {
      mail_.send_note(transfer.peer, {.kind = Kind::retract, .id = transfer.id});
    } catch (...) {
      end_by_exception();
    }
  }
  conclude(transfer, outcome);
}

// ---- counters

TransportCounters Endpoint::counters() const {
  return {.bytes_sent = bytes_sent_.load(std::memory_order_relaxed),
          .messages_sent = messages_sent_.load(std::memory_order_relaxed),
          .bytes_received = bytes_received_.load(std::memory_order_relaxed),
          .messages_received = messages_received_.load(std::memory_order_relaxed)};
}

void Endpoint::count(const TransportCounters& moved) {
  bytes_sent_.fetch_add(moved.bytes_sent, std::memory_order_relaxed);
  messages_sent_.fetch_add(moved.messages_sent, std::memory_order_relaxed);
  bytes_received_.fetch_add(moved.bytes_received, std::memory_order_relaxed);
  messages_received_.fetch_add(moved.messages_received, std::memory_order_relaxed);
}

// ---- shutdown

void Endpoint::leave() {
  const std::lock_guard lock(mutex_);
  leaving_ = true;
  changed_.notify_all();
}

bool Endpoint::finish(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  // If the ring is broken, the other ranks either know and leave, or never will.
  const bool broken = ended_ || std::any_of(channels_.begin(), channels_.end(),
                                            [](const Channel& one) { return !one.broken.empty(); });
  if (broken) until = std::min(until, Clock::now() + kPatienceWithBroken);
  changed_.wait_until(lock, until, [&] { return finished_; });
  const bool everybody = everybody_left();
  stopping_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return finished_; });
  return everybody;
}

bool Endpoint::everybody_left() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !channels_[static_cast<std::size_t>(peer)].left()) return false;
  }
  return true;
}

}  // namespace annulus::mpi
