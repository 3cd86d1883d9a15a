#include "transport/shared_device_ring.h"

#include <algorithm>
#include <utility>

#include "transport/rank_prefix.h"

namespace annulus::shared_device {
namespace {

using std::chrono::milliseconds;

constexpr auto kLookEvery = milliseconds(20);  // at processes, while waiting
constexpr auto kAskEvery = milliseconds(200);  // the control, which may have to ask others
constexpr int kNobody = -2;                    // is told

// Spins at first: the other side is mostly there, or about to be.
class Patience {
 public:
  void pause() {
    if (++rounds_ < 200) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(20 + rounds_ / 10, 500)));
    }
  }

 private:
  int rounds_ = 0;
};

}  // namespace

Ring::Ring(Transport& control, std::shared_ptr<DeviceSharing> sharing)
    : control_(control),
      sharing_(std::move(sharing)),
      rank_(control.rank()),
      size_(control.size()),
      boards_(static_cast<std::size_t>(size_)),
      words_(static_cast<std::size_t>(size_)),
      sent_(static_cast<std::size_t>(size_)) {}

Ring::~Ring() {
  // Queues write to boards, which end here.
  try {
    if (signals_ != nullptr) signals_->record().wait();
    for (const auto& [queue, last] : copied_) last.wait();
  } catch (const std::exception&) {  // the device failed: it touches nothing any more
  }
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (watchman_.joinable()) watchman_.join();
  if (boards_[static_cast<std::size_t>(rank_)] != nullptr) board(rank_).leave();
}

std::string Ring::describe(const Transfer& transfer) const {
  return rank_prefix(rank_, size_) + (transfer.sends ? "send of " : "receive of ") +
         std::to_string(transfer.bytes) + " bytes of device memory " +
         (transfer.sends ? "to" : "from") + " rank " + std::to_string(transfer.peer) + " (tag " +
         std::to_string(transfer.tag) + ")";
}

void Ring::fail(Transfer& transfer, int rank, const std::string& text) {
  std::erase(receiving_, &transfer);
  control_.abort(text);
  transfer.over = true;
  transfer.error = text;
  transfer.error_rank = rank;
  throw TransportError(text, rank);
}

void Ring::end(const Failure& why, int culprit) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
    try {
      failure_ = why;
    } catch (...) {  // without its reason it is still the end
    }
  }
  if (culprit != kNobody) board(rank_).abort(culprit, why.text);
  board(rank_).release_words();
}

bool Ring::ended(Failure& why, bool thorough) {
  {
    const std::lock_guard lock(mutex_);
    if (over_) {
      why = failure_;
      return true;
    }
  }
  for (int peer = 0; peer < size_; ++peer) {
    const BoardState state = board(peer).state();
    if (state == BoardState::aborted) {
      const Board::Abort abort = board(peer).why();
      why = {abort.culprit,
             "rank " + std::to_string(abort.culprit) + " aborted the transport: " + abort.reason};
      end(why, kNobody);
      return true;
    }
    if (thorough && state == BoardState::open && !board(peer).owner_runs()) {
      why = {peer, "the process of rank " + std::to_string(peer) + " has ended"};
      end(why, peer);
      return true;
    }
  }
  return false;
}

bool Ring::reached(std::size_t word, std::uint32_t value) const {
  const std::uint32_t now = board(rank_).word(word).load(std::memory_order_acquire);
  return static_cast<std::int32_t>(now - value) >= 0;
}

void Ring::wait_until(Transfer& transfer, const std::function<bool()>& happened) {
  Patience patience;
  auto look = Clock::now() + kLookEvery;
  auto ask = Clock::now() + kAskEvery;
  for (;;) {
    if (happened()) return;
    const auto now = Clock::now();
    Failure why;
    const bool thorough = now >= look;
    if (ended(why, thorough)) fail(transfer, why.rank, describe(transfer) + " failed: " + why.text);
    if (thorough) {
      look = now + kLookEvery;
      if (board(transfer.peer).state() == BoardState::left && !happened()) {
        const std::string text =
            describe(transfer) + " failed: rank " + std::to_string(transfer.peer) +
            " has left (its executor was destroyed): is it making the same calls?";
        end({transfer.peer, text}, rank_);
        fail(transfer, transfer.peer, text);
      }
    }
    if (now >= ask) {
      ask = now + kAskEvery;
      const Health health = control_.health();
      if (!health.alive) {
        end({health.lost_rank, health.reason}, kNobody);
        fail(transfer, health.lost_rank, describe(transfer) + " failed: " + health.reason);
      }
    }
    if (now >= transfer.deadline) {
      const std::string text = describe(transfer) + " timed out after " +
                               std::to_string(transfer.deadline_length.count()) + " ms: is rank " +
                               std::to_string(transfer.peer) +
                               " still running and making the same calls?";
      end({transfer.peer, text}, rank_);
      fail(transfer, transfer.peer, text);
    }
    patience.pause();
  }
}

std::size_t Ring::free_slot(Transfer& transfer) {
  const Sent& sent = sent_[static_cast<std::size_t>(transfer.peer)];
  const Inbox& inbox = board(transfer.peer).from(rank_);
  const auto is_free = [&](std::size_t slot) {
    if (sent.sequence[slot] == 0) return true;
    const NoteState state = state_of(inbox.marks[slot].load(std::memory_order_acquire));
    if (state == NoteState::taken)
      return reached(Board::done_word(transfer.peer, slot), sent.sequence[slot]);
    return state != NoteState::posted;
  };
  std::size_t slot = 0;
  wait_until(transfer, [&] {
    for (slot = 0; slot < kSlots; ++slot) {
      if (is_free(slot)) return true;
    }
    progress();  // the other side may be waiting for the same here
    return false;
  });
  return slot;
}

void Ring::send(Transfer& transfer, const SharedHandle& handle, std::byte* data,
                const Event& after) {
  Failure why;
  if (ended(why, false)) fail(transfer, why.rank, describe(transfer) + " failed: " + why.text);
  transfer.slot = free_slot(transfer);
  Sent& sent = sent_[static_cast<std::size_t>(transfer.peer)];
  transfer.sequence = sent.next++;
  if (sent.next == 0) sent.next = 1;
  sent.sequence[transfer.slot] = transfer.sequence;
  Inbox& inbox = board(transfer.peer).from(rank_);
  inbox.notes[transfer.slot].store({transfer.tag, transfer.sequence, transfer.bytes,
                                    reinterpret_cast<std::uint64_t>(data), handle});
  // Before the note: a receiver's queue is to wait for what has been enqueued.
  signals_->wait(after);
  words(transfer.peer).write(*signals_, Board::ready_word(rank_, transfer.slot), transfer.sequence);
  inbox.marks[transfer.slot].store(mark(NoteState::posted, transfer.sequence),
                                   std::memory_order_release);
}

void Ring::receive(Transfer& transfer) {
  Failure why;
  if (ended(why, false)) fail(transfer, why.rank, describe(transfer) + " failed: " + why.text);
  receiving_.push_back(&transfer);
  progress();
}

void Ring::progress() {
  for (std::size_t i = 0; i < receiving_.size();) {
    const Transfer& transfer = *receiving_[i];
    const bool first = std::none_of(
        receiving_.begin(), receiving_.begin() + static_cast<std::ptrdiff_t>(i),
        [&](const Transfer* t) { return t->peer == transfer.peer && t->tag == transfer.tag; });
    if (first && match(*receiving_[i])) {
      receiving_.erase(receiving_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

bool Ring::match(Transfer& receive) {
  Inbox& inbox = board(rank_).from(receive.peer);
  for (;;) {
    std::size_t found = kSlots;
    Note note;
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      if (state_of(inbox.marks[slot].load(std::memory_order_acquire)) != NoteState::posted)
        continue;
      const Note each = inbox.notes[slot].load();
      if (each.tag != receive.tag) continue;
      if (found != kSlots && static_cast<std::int32_t>(each.sequence - note.sequence) > 0) continue;
      found = slot;
      note = each;
    }
    if (found == kSlots) return false;
    const bool fits = note.bytes == receive.bytes;
    if (!fits) inbox.refused[found].store(receive.bytes, std::memory_order_relaxed);
    std::uint32_t expected = mark(NoteState::posted, note.sequence);
    if (!inbox.marks[found].compare_exchange_strong(
            expected, mark(fits ? NoteState::taken : NoteState::refused, note.sequence)))
      continue;  // withdrawn meanwhile
    receive.slot = found;
    receive.sequence = note.sequence;
    receive.under_way = true;
    if (!fits) {
      receive.over = true;
      receive.error_rank = receive.peer;
      receive.error = describe(receive) + " met a send of " + std::to_string(note.bytes) +
                      " bytes: do both ranks use the same shapes and plan?";
      return true;
    }
    const std::byte* from = reinterpret_cast<const std::byte*>(note.address);
    if (receive.peer != rank_ && note.bytes > 0) {
      std::shared_ptr<std::byte>& memory = opened_[{receive.peer, note.handle.bytes}];
      if (memory == nullptr) memory = sharing_->open(note.handle);
      from = memory.get() + note.handle.offset;
    }
    Queue& copies = *receive.copies;
    copies.wait(receive.after);
    words(rank_).wait(copies, Board::ready_word(receive.peer, found), note.sequence);
    if (note.bytes > 0) copies.copy(receive.data, from, note.bytes);
    words(receive.peer).write(copies, Board::done_word(rank_, found), note.sequence);
    receive.moved = copies.record();
    copied_[receive.copies] = receive.moved;
    const TransportCounters counted{.bytes_received = static_cast<std::uint64_t>(note.bytes),
                                    .messages_received = 1};
    control_.count(counted);
    return true;
  }
}

void Ring::meet(Transfer& transfer) {
  if (!transfer.error.empty()) {
    const std::string text = transfer.error;
    end({transfer.error_rank, text}, rank_);
    fail(transfer, transfer.error_rank, text);
  }
  if (transfer.under_way) return;
  if (!transfer.sends) {
    wait_until(transfer, [&] {
      progress();
      return transfer.under_way;
    });
    if (!transfer.error.empty()) meet(transfer);
    return;
  }
  const Inbox& inbox = board(transfer.peer).from(rank_);
  auto state = NoteState::posted;
  wait_until(transfer, [&] {
    state = state_of(inbox.marks[transfer.slot].load(std::memory_order_acquire));
    if (state != NoteState::posted) return true;
    progress();
    return false;
  });
  if (state == NoteState::refused) {
    const std::string text = describe(transfer) + " met a receive of " +
                             std::to_string(inbox.refused[transfer.slot]) +
                             " bytes: do both ranks use the same shapes and plan?";
    end({transfer.peer, text}, rank_);
    fail(transfer, transfer.peer, text);
  }
  transfer.under_way = true;
  const TransportCounters counted{.bytes_sent = static_cast<std::uint64_t>(transfer.bytes),
                                  .messages_sent = 1};
  control_.count(counted);
}

void Ring::arrive(Transfer& transfer) {
  if (transfer.over) return;
  const std::size_t word = transfer.sends ? Board::done_word(transfer.peer, transfer.slot)
                                          : Board::ready_word(transfer.peer, transfer.slot);
  wait_until(transfer, [&] { return reached(word, transfer.sequence); });
  Failure why;
  if (ended(why, false)) fail(transfer, why.rank, describe(transfer) + " failed: " + why.text);
  transfer.moved.wait();
  transfer.over = true;
}

void Ring::arrive(Transfer& transfer, Queue& queue) {
  if (transfer.over) return;
  if (transfer.sends) {
    const std::size_t word = Board::done_word(transfer.peer, transfer.slot);
    words(rank_).wait(queue, word, transfer.sequence);
    watch(transfer, word);
  } else {
    queue.wait(transfer.moved);
    watch(transfer, Board::ready_word(transfer.peer, transfer.slot));
  }
  transfer.over = true;
}

void Ring::call_off(Transfer& transfer) noexcept {
  std::erase(receiving_, &transfer);
  if (std::exchange(transfer.over, true) && transfer.error.empty()) return;
  try {
    if (transfer.sends) {
      if (transfer.sequence == 0) return;  // it was never posted
      std::uint32_t now = mark(NoteState::posted, transfer.sequence);
      if (board(transfer.peer)
              .from(rank_)
              .marks[transfer.slot]
              .compare_exchange_strong(now, mark(NoteState::withdrawn, transfer.sequence)))
        return;
      if (now != mark(NoteState::taken, transfer.sequence)) return;
      const std::size_t word = Board::done_word(transfer.peer, transfer.slot);
      wait_until(transfer, [&] { return reached(word, transfer.sequence); });
    } else if (transfer.under_way) {
      const std::size_t word = Board::ready_word(transfer.peer, transfer.slot);
      wait_until(transfer, [&] { return reached(word, transfer.sequence); });
      transfer.moved.wait();
    }
  } catch (...) {
    // The ring has ended, and queues go on without the others; what was enqueued is soon over.
    try {
      transfer.moved.wait();
    } catch (...) {  // the device failed: it touches nothing any more
    }
  }
}

void Ring::abort(const std::string& reason) noexcept {
  try {
    Failure why;
    if (!ended(why, false)) end({rank_, reason}, rank_);
  } catch (const std::exception&) {  // out of memory for the reason
    board(rank_).release_words();
  }
  control_.abort(reason);
}

void Ring::check() {
  const std::lock_guard lock(mutex_);
  if (over_) throw TransportError(rank_prefix(rank_, size_) + failure_.text, failure_.rank);
}

Health Ring::health() {
  Failure why;
  if (ended(why, true)) return {false, why.rank, why.text};
  return control_.health();
}

void Ring::watch(const Transfer& transfer, std::size_t word) {
  {
    const std::lock_guard lock(mutex_);
    watched_.push_back({word, transfer.sequence, transfer.peer, transfer.deadline_length,
                        Clock::now() + transfer.deadline_length});
    if (!watchman_.joinable()) watchman_ = std::thread([this] { look_after(); });
  }
  changed_.notify_all();
}

void Ring::look_after() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::erase_if(watched_, [&](const Watched& w) { return reached(w.word, w.value); });
    changed_.wait(lock, [&] { return leaving_ || (!over_ && !watched_.empty()); });
    if (leaving_) return;
    const Watched oldest = watched_.front();
    lock.unlock();
    try {
      Failure why;
      if (!ended(why, true) && Clock::now() >= oldest.deadline &&
          !reached(oldest.word, oldest.value)) {
        end({oldest.peer, rank_prefix(rank_, size_) + "the device of rank " +
                              std::to_string(oldest.peer) + " did not do its part within " +
                              std::to_string(oldest.deadline_length.count()) + " ms"},
            rank_);
      }
    } catch (const std::exception& error) {
      end({-1, error.what()}, rank_);
    }
    lock.lock();
    changed_.wait_for(lock, kLookEvery, [&] { return leaving_; });
  }
}

}  // namespace annulus::shared_device
