#include <algorithm>
#include <system_error>
#include <utility>

#include "transport/rank_prefix.h"
#include "transport/shared_device_ring.h"

// The ends of a wait in a ring of processes: what was waited for has happened, or the ring has
// ended because a process died, aborted, left or took too long.
namespace annulus::shared_device {
namespace {

using std::chrono::milliseconds;

constexpr auto kLookEvery = milliseconds(20);  // the processes, while waiting
constexpr auto kAskEvery = milliseconds(200);  // the control; it may have to ask other ranks
constexpr int kNobody = -2;                    // blames no rank and tells none

// Spins at first, because the other side is usually there or about to be.
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

void Ring::end(const Failure& why, int culprit) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
    try {
      failure_ = why;
    } catch (...) {  // ends without a reason
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
    try {
      if (!watchman_.joinable()) watchman_ = std::thread([this] { look_after(); });
    } catch (const std::system_error& error) {
      throw DeviceError(rank_prefix(rank_, size_) +
                        "shared device memory: cannot start its thread: " + error.what());
    }
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
