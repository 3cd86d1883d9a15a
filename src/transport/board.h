#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/device_sharing.h"

// Host memory through which the processes of one host exchange notes about messages in device
// memory. Every rank has a board, which the other ranks map. No locks: each word is written by one
// side and read by the other.
namespace annulus::shared_device {

// The number of messages from one rank to another whose copies may be unfinished. An executor has
// four of them. A sender that finds no free slot waits.
constexpr std::size_t kSlots = 64;

// State of a slot's message: posted, then taken or refused by the receiver, or withdrawn by the
// sender.
enum class NoteState : std::uint32_t { none, posted, taken, refused, withdrawn };
// Combines the state with the message's number, so that a receiver cannot take a later message in
// the same slot by mistake.
[[nodiscard]] constexpr std::uint32_t mark(NoteState state, std::uint32_t sequence) {
  return sequence << 3 | static_cast<std::uint32_t>(state);
}
[[nodiscard]] constexpr NoteState state_of(std::uint32_t mark) {
  return static_cast<NoteState>(mark & 7U);
}

struct Note {
  std::uint32_t tag = 0;
  std::uint32_t sequence = 0;  // counts the sender's messages to this rank; never 0
  std::int64_t bytes = 0;
  std::uint64_t address = 0;  // address in the sender's process
  SharedHandle handle;
};

// A note that another process may read while it is overwritten. Such a reader may get a torn note,
// but then fails to take the message and discards it. So the words need no memory order.
class NotePlace {
 public:
  void store(const Note& note);
  [[nodiscard]] Note load() const;

 private:
  std::array<std::atomic<std::uint64_t>, sizeof(Note) / 8> words_{};
};

// What one rank has written to another rank's board.
struct Inbox {
  std::array<std::atomic<std::uint32_t>, kSlots> marks{};
  std::array<std::atomic<std::int64_t>, kSlots> refused{};  // the size that the receiver expected
  std::array<NotePlace, kSlots> notes{};
};

// State of the board's owner, for ranks that wait for it.
enum class BoardState : std::uint32_t { open, aborting, aborted, left };

class Board {
 public:
  // create: a new board for `ranks` ranks. open: another rank's board, by its name. Both throw
  // std::system_error.
  [[nodiscard]] static std::unique_ptr<Board> create(int ranks);
  [[nodiscard]] static std::unique_ptr<Board> open(const std::string& name, int ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  // Removes the name once every rank has opened the board. The memory is freed with the last
  // mapping.
  void forget_name();

  // Words that device queues use, by rank and slot: `ready` counts the messages that the rank can
  // copy from here; `done` counts the owner's messages that the rank has copied. They have this
  // memory to themselves.
  [[nodiscard]] std::span<std::byte> words() const;
  [[nodiscard]] static std::size_t ready_word(int rank, std::size_t slot) {
    return 2 * (static_cast<std::size_t>(rank) * kSlots + slot);
  }
  [[nodiscard]] static std::size_t done_word(int rank, std::size_t slot) {
    return ready_word(rank, slot) + 1;
  }
  [[nodiscard]] std::atomic<std::uint32_t>& word(std::size_t index) const;
  // Releases all queues that wait for these words, now or later.
  void release_words();

  [[nodiscard]] Inbox& from(int rank) const;

  // Called by the owner. Only the first reason is kept.
  void abort(int culprit, const std::string& reason);
  void leave();
  [[nodiscard]] BoardState state() const;
  struct Abort {
    int culprit = -1;
    std::string reason;
  };
  [[nodiscard]] Abort why() const;  // if the state is `aborted`
  // False once the process that made the board has ended, in any way.
  [[nodiscard]] bool owner_runs() const;

 private:
  struct Header;
  class Mapping;
  Board(std::string name, int ranks, std::shared_ptr<Mapping> mapping, bool own);
  [[nodiscard]] Header& header() const;
  [[nodiscard]] std::byte* memory() const;

  std::string name_;
  int ranks_;
  std::shared_ptr<Mapping> mapping_;
  bool named_;
};

}  // namespace annulus::shared_device
