// What happens to transfers when a rank is lost, leaves or aborts, and which rank is blamed.

#include <algorithm>
#include <new>
#include <utility>

#include "transport/mpi_endpoint.h"
#include "transport/rank_prefix.h"

namespace annulus::mpi {

// Decides the outcome if that is possible now. False: the caller has to wait.
bool Endpoint::settle(Transfer& transfer, Clock::time_point now) {
  if (!transfer.open()) return true;
  const Channel& with = channel(transfer.peer);
  if (ended_) {
    withdraw(transfer, Outcome::ended);
  } else if (!with.broken.empty()) {
    withdraw(transfer, Outcome::broken);
  } else if (with.left() && transfer.outcome == Outcome::pending) {
    withdraw(transfer, Outcome::peer_left);
  } else if (now >= transfer.deadline) {
    break_channel(transfer.peer, awaited(transfer.peer), describe_timeout(transfer));
    withdraw(transfer, Outcome::timed_out);
  } else if (is_silent(transfer.peer, now)) {
    break_channel(transfer.peer, transfer.peer,
                  describe(transfer) + " failed: " + describe_silence(transfer.peer));
    withdraw(transfer, Outcome::silent);
  } else {
    return false;
  }
  return true;
}

// Follows the ranks that wait for each other, from `peer` on, to the one that does not wait.
int Endpoint::awaited(int peer) const {
  for (int hops = 0; hops < size_; ++hops) {
    const int next = channels_[static_cast<std::size_t>(peer)].waits_for;
    if (next < 0 || next == peer || next == rank_) break;
    peer = next;
  }
  return peer;
}

// Whether a rank that this one waits for has not answered a question in time. Sends the question.
bool Endpoint::is_silent(int peer, Clock::time_point now) {
  Channel& with = channel(peer);
  if (peer == rank_ || now == Clock::time_point::min()) return false;  // just woken up
  if (with.asked) return now - *with.asked >= silence_;
  if (now >= with.next_question) {
    const bool ask = with.next_question != Clock::time_point{};  // not in the first wait
    with.next_question = now + silence_ / 4;
    if (ask) {
      with.asked = now;
      try {
        mail_.send_note(peer, {.kind = Kind::asks});
      } catch (...) {
        end_by_exception();
      }
    }
  }
  return false;
}

// Sends a note to every other rank. A rank that cannot be reached runs into its deadline.
void Endpoint::tell_all(const Header& header, std::string_view text) noexcept {
  try {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) mail_.send_note(peer, header, text);
    }
  } catch (...) {
    end_by_exception();
  }
}

void Endpoint::blame(int peer, int culprit) {
  channel(peer).culprit = culprit;
  if (lost_ < 0) lost_ = culprit;
}

void Endpoint::break_channel(int peer, int culprit, const std::string& text) {
  channel(peer).broken = text;
  blame(peer, culprit);
  const Header header{.kind = Kind::broken, .value = static_cast<std::uint64_t>(culprit)};
  try {
    if (peer != rank_) mail_.send_note(peer, header, text);
  } catch (...) {
    end_by_exception();
  }
}

void Endpoint::end(int rank, std::string_view text) noexcept {
  if (std::exchange(ended_, true)) return;  // keep only the first reason
  ended_by_ = rank;
  try {
    end_text_ = text;
  } catch (const std::bad_alloc&) {  // ends without a reason
  }
}

void Endpoint::end_by_exception() noexcept {
  try {
    throw;
  } catch (const TransportError& failure) {
    end(failure.rank(), failure.what());
  } catch (const std::exception& failure) {
    end(rank_, failure.what());
  }
}

void Endpoint::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  poll();  // another rank may have been first
  if (ended_) return;
  // A rank that aborts because it has lost another rank is not the one to blame.
  const int culprit = lost_ >= 0 ? lost_ : rank_;
  try {
    end(culprit, "rank " + std::to_string(rank_) + " aborted the transport: " + reason);
  } catch (const std::bad_alloc&) {
    end(culprit, {});
  }
  tell_all({.kind = Kind::abort, .value = static_cast<std::uint64_t>(culprit)}, reason);
  changed_.notify_all();
}

Health Endpoint::health() {
  const std::lock_guard lock(mutex_);
  if (ended_) return {false, ended_by_, end_text_};
  for (int peer = 0; peer < size_; ++peer) {
    const Channel& with = channel(peer);
    if (!with.broken.empty()) return {false, culprit_of(peer), with.broken};
    if (with.left()) return {false, peer, "rank " + std::to_string(peer) + " has left"};
  }
  return {};
}

std::string Endpoint::describe(const Transfer& transfer) const {
  return rank_prefix(rank_, size_) + (transfer.sends ? "send of " : "receive of ") +
         std::to_string(transfer.bytes) + " bytes " + (transfer.sends ? "to" : "from") + " rank " +
         std::to_string(transfer.peer) + " (tag " + std::to_string(transfer.tag) + ")";
}

std::string Endpoint::describe_timeout(const Transfer& transfer) const {
  return describe(transfer) + " timed out after " +
         std::to_string(transfer.deadline_length.count()) + " ms";
}

std::string Endpoint::describe_silence(int peer) const {
  return "rank " + std::to_string(peer) + " has not answered for " +
         std::to_string(silence_.count()) + " ms: is its process stopped?";
}

TransportError Endpoint::error(const Transfer& transfer) {
  const int peer = transfer.peer;
  const int culprit = culprit_of(peer);
  const std::string name = "rank " + std::to_string(peer);
  const std::string between =
      culprit == peer
          ? ""
          : ": " + name + " waits for others, in the end for rank " + std::to_string(culprit);
  switch (transfer.outcome) {
    case Outcome::timed_out:
      return TransportError(describe_timeout(transfer) + between + ": is rank " +
                                std::to_string(culprit) +
                                " still running and making the same calls?",
                            culprit);
    case Outcome::silent:
      return TransportError(describe(transfer) + " failed: " + describe_silence(peer), peer);
    case Outcome::size_mismatch:
      return TransportError(describe(transfer) + " met a " + (transfer.sends ? "receive" : "send") +
                                " of " + std::to_string(transfer.partner_bytes) +
                                " bytes: do both ranks use the same shapes and plan?",
                            peer);
    case Outcome::ended:
      return TransportError(describe(transfer) + " failed: " + end_text_, ended_by_);
    case Outcome::peer_left:
      return TransportError(
          describe(transfer) + " failed: " + name +
              " has left (its transport was destroyed): is it making the same calls?",
          peer);
    default:
      return TransportError(
          describe(transfer) +
              " failed: an earlier message of the two ranks was lost: " + channel(peer).broken,
          culprit);
  }
}

}  // namespace annulus::mpi
