#include "transport/shared_device_ring.h"

#include <algorithm>
#include <utility>

#include "transport/rank_prefix.h"

namespace annulus::shared_device {
Ring::Ring(Transport& control, std::shared_ptr<DeviceSharing> sharing)
    : control_(control),
      sharing_(std::move(sharing)),
      rank_(control.rank()),
      size_(control.size()),
      boards_(static_cast<std::size_t>(size_)),
      words_(static_cast<std::size_t>(size_)),
      sent_(static_cast<std::size_t>(size_)) {}

Ring::~Ring() {
  // Queues write to the boards, which are destroyed here.
  try {
    if (signals_ != nullptr) signals_->record().wait();
    for (const auto& [queue, last] : copied_) last.wait();
  } catch (const std::exception&) {  // the device failed and touches nothing any more
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

bool Ring::reached(std::size_t word, std::uint32_t value) const {
  const std::uint32_t now = board(rank_).word(word).load(std::memory_order_acquire);
  return static_cast<std::int32_t>(now - value) >= 0;
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
  // All slots in turn: a word that is unused for 2^31 messages would compare as ahead.
  std::size_t slot = 0;
  wait_until(transfer, [&] {
    for (std::size_t i = 0; i < kSlots; ++i) {
      slot = (sent.next + i) % kSlots;
      if (is_free(slot)) return true;
    }
    progress();  // the other side may be waiting here, too
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
  // Before the note: the receiver's queue waits for what has been enqueued.
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

std::optional<Ring::Posted> Ring::find_posted(const Inbox& inbox, std::uint32_t tag) {
  std::optional<Posted> first;
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    const std::uint32_t mark = inbox.marks[slot].load(std::memory_order_acquire);
    if (state_of(mark) != NoteState::posted) continue;
    const Note note = inbox.notes[slot].load();
    if (note.tag != tag) continue;
    if (first && static_cast<std::int32_t>(note.sequence - first->note.sequence) > 0) continue;
    first = Posted{slot, mark, note};
  }
  return first;
}

bool Ring::match(Transfer& receive) {
  Inbox& inbox = board(rank_).from(receive.peer);
  for (;;) {
    // Two messages may be posted while this loop looks at the slots: the first into a slot that it
    // has passed, the second into one that it still reaches. A receiver that has seen the second
    // finds the first when it looks again.
    std::optional<Posted> found = find_posted(inbox, receive.tag);
    for (std::optional<Posted> last; found && (!last || last->mark != found->mark);) {
      last = found;
      found = find_posted(inbox, receive.tag);
    }
    if (!found) return false;
    const Note& note = found->note;
    const bool fits = note.bytes == receive.bytes;
    if (!fits) inbox.refused[found->slot].store(receive.bytes, std::memory_order_relaxed);
    // Expects the mark that was read before the note, not one with the number in the note: if the
    // message was withdrawn and another one posted meanwhile, the note may be a mix of both.
    if (!inbox.marks[found->slot].compare_exchange_strong(
            found->mark, mark(fits ? NoteState::taken : NoteState::refused, note.sequence)))
      continue;
    receive.slot = found->slot;
    receive.sequence = note.sequence;
    receive.under_way = true;
    if (!fits) {
      receive.over = true;
      receive.error_rank = receive.peer;
      receive.error = describe(receive) + " met a send of " + std::to_string(note.bytes) +
                      " bytes: do both ranks use the same shapes and plan?";
      return true;
    }
    // Reported when a caller waits for it. This call may have started it on behalf of another
    // transfer.
    try {
      start_copy(receive, note);
    } catch (const std::exception& error) {
      Failure why{rank_, error.what()};
      static_cast<void>(ended(why, true));  // its memory may have been freed with its process
      receive.error_rank = why.rank;
      receive.error = describe(receive) + " failed: " + why.text;
    }
    return true;
  }
}

void Ring::start_copy(Transfer& receive, const Note& note) {
  const std::byte* from = reinterpret_cast<const std::byte*>(note.address);
  if (receive.peer != rank_ && note.bytes > 0) {
    std::shared_ptr<std::byte>& memory = opened_[{receive.peer, note.handle.bytes}];
    if (memory == nullptr) memory = sharing_->open(note.handle);
    from = memory.get() + note.handle.offset;
  }
  Queue& copies = *receive.copies;
  const std::size_t ready = Board::ready_word(receive.peer, receive.slot);
  copies.wait(receive.after);
  // The deadline runs from now on and not from the first wait, because later messages wait in the
  // same queue.
  watch(receive, ready);
  words(rank_).wait(copies, ready, note.sequence);
  if (note.bytes > 0) copies.copy(receive.data, from, note.bytes);
  words(receive.peer).write(copies, Board::done_word(rank_, receive.slot), note.sequence);
  receive.moved = copies.record();
  copied_[receive.copies] = receive.moved;
  const TransportCounters counted{.bytes_received = static_cast<std::uint64_t>(note.bytes),
                                  .messages_received = 1};
  control_.count(counted);
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
    // The ring has ended and its queues no longer wait for other ranks, so what was enqueued soon
    // finishes.
    try {
      transfer.moved.wait();
    } catch (...) {  // the device failed and touches nothing any more
    }
  }
}

}  // namespace annulus::shared_device
