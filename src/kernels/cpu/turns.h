#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cpu/work.h"

namespace annulus::cpu {

// Finds which items of a backward phase add to the same rows, orders the items so that neighbours
// in the list rarely do, and numbers their turns. The stage's kind is gradients or key_gradient.
void assign_turns(Phase& phase, const WorkGroups& groups, const Stage& stage, int kv_heads,
                  int threads);

// The counters that items wait for. One per engine, whose phases run one at a time.
class Turns {
 public:
  explicit Turns(std::size_t counters)
      : counters_(std::make_unique<std::atomic<std::int32_t>[]>(counters)) {}

  void begin(const Phase& phase) {
    for (std::size_t i = 0; i < phase.turn_counters; ++i)
      counters_[i].store(0, std::memory_order_relaxed);
  }

  // An item's turn. The constructor waits for it; the destructor passes it on, even if the item
  // throws.
  class Turn {
   public:
    Turn(Turns& turns, const WorkItem& item);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
    const WorkItem& item_;
  };

 private:
  std::unique_ptr<std::atomic<std::int32_t>[]> counters_;
};

}  // namespace annulus::cpu
