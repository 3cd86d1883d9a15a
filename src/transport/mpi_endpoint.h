#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "annulus/error.h"
#include "annulus/mpi.h"
#include "annulus/transport.h"
#include "transport/mpi_mail.h"

// One rank's end of a ring over MPI. MPI matches messages by itself, but it does not tell a sender
// that the receive has another size, cannot cancel messages reliably, and has short tags. So MPI
// carries packets only, and the sender matches messages here: each receive announces itself with a
// note, and the matching send answers with its bytes, which then always have a destination.
//
// Progress. MPI moves bytes only during its calls. A waiting caller polls. While callers compute, a
// thread polls instead: at intervals that grow from 20 us to 1 ms while transfers are open, and 50
// times a second otherwise, to notice an abort. The thread sleeps in between, because a spinning
// thread would take a core from the kernels.
//
// Faults. A rank that has waited for half its deadline says for whom. When a deadline passes, the
// rank at the end of this chain is reported as lost, not a rank in between that only waits itself.
// This needs deadlines that end within milliseconds of each other. If deadlines are long, a waiting
// rank also asks the other one from time to time whether it is alive. That rank's thread answers,
// unless its process is stopped.
//
// Locks: one, which is held during polls and the copies that they make. Cancelling a transfer takes
// it, so that nothing is copied afterwards.
namespace annulus::mpi {

using Clock = std::chrono::steady_clock;

enum class Outcome : std::uint8_t {
  pending,  // the other side has not posted it yet
  moving,   // packets are being sent
  done,     // this and all below are final
  timed_out,
  size_mismatch,
  ended,  // the transport was aborted, or MPI failed
  peer_left,
  silent,  // the other rank does not answer
  broken,  // an earlier message between the two ranks was lost, so the order of messages is unknown
  cancelled,
};

// This rank's side of a message.
struct Transfer {
  Transfer(const Message& message, std::chrono::milliseconds deadline_length);

  [[nodiscard]] bool open() const { return outcome <= Outcome::moving; }

  bool sends;
  int peer;
  std::uint32_t tag;
  std::byte* data;
  std::size_t bytes;
  std::chrono::milliseconds deadline_length;
  Clock::time_point deadline;
  Outcome outcome = Outcome::cancelled;  // not yet posted
  std::uint64_t id = 0;                  // of the receive; chosen by its rank
  std::size_t packets;                   // at least one; it may be empty
  std::size_t packets_begun = 0;         // of a send: packets copied out of the caller's memory
  std::size_t packets_moved = 0;
  std::size_t partner_bytes = 0;  // set if size_mismatch
};

class Endpoint final : public std::enable_shared_from_this<Endpoint>, private Mail::Reader {
 public:
  // Starts the thread, which owns the endpoint until all ranks have left.
  static std::shared_ptr<Endpoint> make(std::shared_ptr<Communicator> communicator, int rank,
                                        const MpiOptions& options);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  void post(std::span<Transfer> batch);
  void wait(Transfer& transfer);
  void call_off(Transfer& transfer) noexcept;
  void abort(const std::string& reason) noexcept;
  [[nodiscard]] Health health();
  [[nodiscard]] TransportCounters counters() const;
  void count(const TransportCounters& moved);

  // Announces that this rank posts nothing more. Returns at once.
  void leave();
  // Waits until every rank has left, then until the thread has ended. False: some rank has not
  // left.
  [[nodiscard]] bool finish(Clock::time_point until);

 private:
  struct Ready {
    std::uint32_t tag;
    std::uint64_t id;
    std::size_t bytes;
  };
  struct Channel {
    std::deque<Transfer*> sends;  // pending
    std::deque<Ready> receives;   // announced by the other side; their sends are not posted yet
    std::string broken;           // the reason; not empty: the channel carries nothing more
    int culprit = -1;             // the rank that caused it
    int waits_for = -1;  // the rank that the other side waits for; -1: none, or not for long
    std::optional<Clock::time_point> asked;  // an unanswered question
    Clock::time_point next_question{};
    std::uint64_t packets_sent = 0;
    std::uint64_t packets_received = 0;
    std::optional<std::uint64_t> leaves_after;  // number of packets
    [[nodiscard]] bool left() const { return leaves_after && packets_received >= *leaves_after; }
  };

  Endpoint(std::shared_ptr<Communicator> communicator, int rank, const MpiOptions& options);
  void run();

  // All of these require mutex_.
  void on_note(const Header& header, std::string_view text) override;
  void on_data(const Header& header, std::span<const std::byte> bytes) override;
  void on_sent(void* owner) override;
  bool poll() noexcept;
  bool send_packets();
  void match(Transfer& send, const Ready& receive);
  void conclude(Transfer& transfer, Outcome outcome);
  void withdraw(Transfer& transfer, Outcome outcome);
  void break_channel(int peer, int culprit, const std::string& text);
  void blame(int peer, int culprit);
  void tell_all(const Header& header, std::string_view text = {}) noexcept;
  [[nodiscard]] int awaited(int peer) const;
  [[nodiscard]] bool is_silent(int peer, Clock::time_point now);
  void end(int rank, std::string_view text) noexcept;
  void end_by_exception() noexcept;  // ends by the exception that is being handled
  [[nodiscard]] bool link_is_through(const Transfer& send, std::size_t bytes);
  [[nodiscard]] bool settle(Transfer& transfer, Clock::time_point now);
  [[nodiscard]] bool everybody_left() const;
  [[nodiscard]] int rank_or(std::uint64_t value, int otherwise) const {
    return value < static_cast<std::uint64_t>(size_) ? static_cast<int>(value) : otherwise;
  }
  [[nodiscard]] int culprit_of(int peer) const {
    const int culprit = channels_[static_cast<std::size_t>(peer)].culprit;
    return culprit < 0 ? peer : culprit;
  }
  [[nodiscard]] Channel& channel(int peer) { return channels_[static_cast<std::size_t>(peer)]; }
  [[nodiscard]] std::string describe(const Transfer& transfer) const;
  [[nodiscard]] std::string describe_timeout(const Transfer& transfer) const;
  [[nodiscard]] std::string describe_silence(int peer) const;
  [[nodiscard]] TransportError error(const Transfer& transfer);

  const int rank_;
  const int size_;
  const double bytes_per_second_;  // 0: no limit
  const std::chrono::milliseconds silence_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Mail mail_;
  std::vector<Channel> channels_;  // one for each rank, this one included
  std::unordered_map<std::uint64_t, Transfer*> receives_;
  std::deque<Transfer*> sending_;  // matched sends with packets left to copy
  Clock::time_point link_free_{};  // rate-limited: when everything given to the link has passed
  std::uint64_t last_id_ = 0;
  int open_ = 0;     // open transfers
  int waiting_ = 0;  // callers that poll
  bool leaving_ = false;
  bool said_goodbye_ = false;
  bool stopping_ = false;
  bool finished_ = false;  // the thread makes no more MPI calls
  int lost_ = -1;          // the first rank that failed to answer
  bool ended_ = false;
  int ended_by_ = -1;
  std::string end_text_;
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> messages_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
  std::atomic<std::uint64_t> messages_received_{0};
};

}  // namespace annulus::mpi
