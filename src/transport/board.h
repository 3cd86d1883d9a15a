#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/device_sharing.h"

// Host memory by which the processes of one host tell each other about messages in device memory.
// Every rank has a board; the others have it mapped. Nothing on it is waited for by a lock: words
// are written by one side and read by the other.
namespace annulus::shared_device {

// Messages of one rank to another whose copies are not over. An executor has four of them; whoever
// posts more waits.
constexpr std::size_t kSlots = 64;

// Of the message in a slot. posted -> taken or refused by the receiver, -> withdrawn by the sender.
enum class NoteState : std::uint32_t { none, posted, taken, refused, withdrawn };
// With the message's number: who takes it takes no later one that lies in the same slot.
[[nodiscard]] constexpr std::uint32_t mark(NoteState state, std::uint32_t sequence) {
  return sequence << 3 | static_cast<std::uint32_t>(state);
}
[[nodiscard]] constexpr NoteState state_of(std::uint32_t mark) {
  return static_cast<NoteState>(mark & 7U);
}

struct Note {
  std::uint32_t tag = 0;
  std::uint32_t sequence = 0;  // of the sender's messages to this rank; never 0
  std::int64_t bytes = 0;
  std::uint64_t address = 0;  // in the sender's process
  SharedHandle handle;
};

// A note where another process may read it while it is written anew. Such a reader's note is of no
// use, which it finds out when it takes the message: so the words of it need no order.
class NotePlace {
 public:
  void store(const Note& note);
  [[nodiscard]] Note load() const;

 private:
  std::array<std::atomic<std::uint64_t>, sizeof(Note) / 8> words_{};
};

// What one rank has written to another's board.
struct Inbox {
  std::array<std::atomic<std::uint32_t>, kSlots> marks{};
  std::array<std::atomic<std::int64_t>, kSlots> refused{};  // what the receiver expected instead
  std::array<NotePlace, kSlots> notes{};
};

// How its owner is, for whoever waits for it.
enum class BoardState : std::uint32_t { open, aborting, aborted, left };

class Board {
 public:
  // A new one, for `ranks` ranks; or that of another rank, by its name. std::system_error.
  [[nodiscard]] static std::unique_ptr<Board> create(int ranks);
  [[nodiscard]] static std::unique_ptr<Board> open(const std::string& name, int ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  // Nobody else will open it: the memory goes with those that have.
  void forget_name();

  // Words that queues use, by rank and slot: `ready` counts what that rank has to be copied from
  // here, `done` what of the owner's it has copied. The memory is the words' alone.
  [[nodiscard]] std::span<std::byte> words() const;
  [[nodiscard]] static std::size_t ready_word(int rank, std::size_t slot) {
    return 2 * (static_cast<std::size_t>(rank) * kSlots + slot);
  }
  [[nodiscard]] static std::size_t done_word(int rank, std::size_t slot) {
    return ready_word(rank, slot) + 1;
  }
  [[nodiscard]] std::atomic<std::uint32_t>& word(std::size_t index) const;
  // Queues that wait for these words go on, now and later.
  void release_words();

  [[nodiscard]] Inbox& from(int rank) const;

  // Of the owner. The first one who aborts is heard.
  void abort(int culprit, const std::string& reason);
  void leave();
  [[nodiscard]] BoardState state() const;
  struct Abort {
    int culprit = -1;
    std::string reason;
  };
  [[nodiscard]] Abort why() const;  // of an aborted one
  // False once the process that made it has ended, whatever has become of it.
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
