#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "annulus/transport.h"
#include "core/device_sharing.h"
#include "transport/board.h"

// How a message in device memory goes from one process to another:
//
//   sender                                           receiver
//   writes a note into a free slot on the
//   receiver's board: tag, bytes, handle
//   queue: after `after`, ready[slot] = sequence     finds the note when it posts or waits: taken
//   host: waits until the note is taken              queue: waits for ready[slot], copies,
//   queue: waits for done[slot]                      done[slot] = sequence on the sender's board
//
// Hosts wait for notes only, so that they can enqueue a pass while devices work on an earlier one.
// A queue waits only for work that another process has already enqueued. All ranks post and wait in
// the same order, and the copies of a ticket are enqueued before it waits for those of others. So
// there is no deadlock, even if a device executes all its queues in the order of enqueuing.
//
// If a process dies, nothing writes its words any more. A thread watches all words that device
// queues wait for. On a failure it releases the queues and ends the ring. It never calls the
// control, which may be implemented in Python: the thread that destroys the ring holds the GIL and
// waits for this thread.
namespace annulus::shared_device {

using Clock = std::chrono::steady_clock;

class Ring;

// One message of this rank.
struct Transfer {
  bool sends = false;
  int peer = 0;
  std::uint32_t tag = 0;
  std::int64_t bytes = 0;
  std::chrono::milliseconds deadline_length{};
  Clock::time_point deadline;
  std::byte* data = nullptr;      // receive only
  std::shared_ptr<Queue> copies;  // receive only
  Event after;                    // receive only
  bool under_way = false;         // receive: `copies` copies it; send: the receiver has taken it
  std::size_t slot = 0;           // from here on: valid for a send, or for a receive under way
  std::uint32_t sequence = 0;
  Event moved;  // receive only
  bool over = false;
  std::string error;
  int error_rank = -1;
};

// One rank's side of the ring. For one thread, except abort and health.
class Ring {
 public:
  Ring(Transport& control, std::shared_ptr<DeviceSharing> sharing);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Collective. Returns why memory cannot be shared; empty if it can.
  [[nodiscard]] std::string connect();

  void send(Transfer& transfer, const SharedHandle& handle, std::byte* data, const Event& after);
  void receive(Transfer& transfer);
  // Blocks until the other side has posted the message. A device then carries it without the hosts.
  void meet(Transfer& transfer);
  // Blocks until the message has arrived. Only after meet().
  void arrive(Transfer& transfer);
  // Makes `queue` wait for the message. Only after meet().
  void arrive(Transfer& transfer, Queue& queue);
  // On return, its memory is no longer used.
  void call_off(Transfer& transfer) noexcept;

  void check();
  void abort(const std::string& reason) noexcept;
  [[nodiscard]] Health health();
  [[nodiscard]] Transport& control() const { return control_; }
  [[nodiscard]] DeviceSharing& sharing() const { return *sharing_; }

 private:
  struct Failure {
    int rank = -1;
    std::string text;
  };
  // A change on the device that another process will make.
  struct Watched {
    std::size_t word;  // on this rank's board
    std::uint32_t value;
    int peer;
    std::chrono::milliseconds deadline_length;
    Clock::time_point deadline;
  };

  // A message on this rank's board.
  struct Posted {
    std::size_t slot;
    std::uint32_t mark;
    Note note;
  };

  void progress();
  [[nodiscard]] static std::optional<Posted> find_posted(const Inbox& inbox, std::uint32_t tag);
  [[nodiscard]] bool match(Transfer& receive);
  void start_copy(Transfer& receive, const Note& note);
  [[nodiscard]] std::size_t free_slot(Transfer& send);
  void wait_until(Transfer& transfer, const std::function<bool()>& happened);
  [[nodiscard]] bool reached(std::size_t word, std::uint32_t value) const;
  [[nodiscard]] std::string describe(const Transfer& transfer) const;
  [[noreturn]] void fail(Transfer& transfer, int rank, const std::string& text);
  // Ends the ring once: releases the queues. Tells the other ranks if `culprit` is a rank.
  void end(const Failure& why, int culprit) noexcept;
  // Whether the ring has ended, and why. `thorough`: also checks the other processes.
  [[nodiscard]] bool ended(Failure& why, bool thorough);
  void watch(const Transfer& transfer, std::size_t word);
  void look_after();
  [[nodiscard]] Board& board(int rank) const { return *boards_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] SharedWords& words(int rank) const {
    return *words_[static_cast<std::size_t>(rank)];
  }

  Transport& control_;
  const std::shared_ptr<DeviceSharing> sharing_;
  const int rank_;
  const int size_;
  std::shared_ptr<Queue> signals_;  // signals that memory is ready; never waits for another process
  std::vector<std::unique_ptr<Board>> boards_;
  std::vector<std::unique_ptr<SharedWords>> words_;
  // Mapped memory of other ranks, by rank and handle.
  std::map<std::pair<int, std::array<std::byte, 64>>, std::shared_ptr<std::byte>> opened_;
  std::map<std::shared_ptr<Queue>, Event> copied_;  // the last copy of each queue
  struct Sent {
    std::array<std::uint32_t, kSlots> sequence{};  // the last message's; 0: none
    std::uint32_t next = 1;
  };
  std::vector<Sent> sent_;            // one for each rank
  std::vector<Transfer*> receiving_;  // posted and not yet under way, in order

  std::mutex mutex_;  // guards all members below
  std::condition_variable changed_;
  bool over_ = false;
  Failure failure_;
  std::vector<Watched> watched_;
  bool leaving_ = false;
  std::thread watchman_;  // started for the first entry of watched_
};

}  // namespace annulus::shared_device
