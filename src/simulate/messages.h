#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "annulus/plan.h"

namespace annulus::simulation {

// The messages of one courier, for all ranks and steps. The rows that a rank sends to another rank
// in one step form one message.
class MessageTable {
 public:
  struct Message {
    int from = 0;
    int to = 0;
    double bytes = 0;
  };
  // there: rows travel to the ranks that need them. back: their gradients return to the owner.
  enum class Way : std::uint8_t { there, back };

  MessageTable(const Plan& plan, Way way, std::int64_t row_bytes);

  [[nodiscard]] const std::vector<Message>& all() const { return messages_; }
  [[nodiscard]] int steps() const { return steps_; }
  // Steps count from 1. Outgoing messages are a range, in the cyclic order of their receivers after
  // the sender: real messages of a batch share a link, so they must not all start at rank 0's port.
  // Incoming messages are a list by ascending sender.
  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };
  [[nodiscard]] Range outgoing(int rank, int step) const {
    const std::size_t at = index(rank, step);
    return {out_begin_[at], out_begin_[at + 1]};
  }
  [[nodiscard]] std::span<const std::uint32_t> incoming(int rank, int step) const {
    const std::size_t at = index(rank, step);
    return std::span(in_).subspan(in_begin_[at], in_begin_[at + 1] - in_begin_[at]);
  }

  [[nodiscard]] double sent(int rank, int step) const;  // bytes
  [[nodiscard]] double received(int rank, int step) const;
  [[nodiscard]] double total_bytes() const;

 private:
  [[nodiscard]] std::size_t index(int rank, int step) const {
    return static_cast<std::size_t>(step - 1) * static_cast<std::size_t>(ranks_) +
           static_cast<std::size_t>(rank);
  }

  int ranks_ = 0;
  int steps_ = 0;
  std::vector<Message> messages_;         // by step, sender, receiver
  std::vector<std::uint32_t> out_begin_;  // by step and sender
  std::vector<std::uint32_t> in_;         // messages by step, receiver, sender
  std::vector<std::uint32_t> in_begin_;
};

}  // namespace annulus::simulation
