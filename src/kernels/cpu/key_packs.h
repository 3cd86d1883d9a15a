#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/function_ref.h"
#include "core/thread_pool.h"
#include "kernels/cpu/kernel.h"
#include "kernels/work_groups.h"

namespace annulus::cpu {

struct Phase;
struct WorkItem;

// Bytes of `rows` packed rows (Kernels::packed_bytes); null if nothing is packed.
using PackedBytes = std::function<std::int64_t(std::int64_t rows)>;

// A KeyList is the keys of one K/V head that several items of a forward phase use. They are packed
// once, as part of the phase. To bound their memory, lists are processed in waves of at most
// kWaveBytes (or one list), and a wave reuses the memory of the wave two before it.
inline constexpr std::int64_t kWaveBytes = std::int64_t{32} << 20;
inline constexpr std::int64_t kPackRows = 2 * kPackBlock;  // of one piece

struct KeyList {
  int group = 0;  // of an item that uses it
  int member = 0;
  std::int32_t batch = 0;
  std::int32_t wave = 0;
  std::int64_t rows = 0;    // places
  std::int64_t offset = 0;  // in the memory for packed rows

  bool operator==(const KeyList&) const = default;
};

// A list and the items that use it, or one item without a list. One thread packs the list and
// computes the items, so that keys come from its own cache. Reading them from caches of other cores
// is slow: with 1,024 keys, items of 256 queries took 1.2 times as long, items of 128 queries 1.4
// times (Emerald Rapids, D 64, 16 threads). Threads without a share help the one that has most left
// to do.
struct KeyShare {
  std::int32_t list = -1;  // -1: none
  std::int32_t begin = 0;  // items
  std::int32_t end = 0;

  bool operator==(const KeyShare&) const = default;
};

// Finds the lists of a phase and orders its items by shares. Lists and shares stay empty if nothing
// is packed. `canonical`: places are indices.
void assign_packs(Phase& phase, const WorkGroups& groups, int head_ratio, bool canonical,
                  const PackedBytes& packed_bytes);

// Runs the shares of a phase. One per engine, whose phases run one at a time.
class ShareRunner {
 public:
  using Pack = FunctionRef<void(const KeyList& list, std::int64_t begin, int slot)>;
  using Attend = FunctionRef<void(const WorkItem& item, const KeyList* list, int slot)>;

  void reserve(const Phase& phase);
  [[nodiscard]] std::int64_t bytes() const {
    return static_cast<std::int64_t>(size_ * (sizeof(Counters) + sizeof(wave_items_[0])));
  }
  // Allocates nothing. Throws what pack and attend throw.
  void run(ThreadPool& pool, const Phase& phase, Pack pack, Attend attend);

 private:
  class Visit;
  struct Counters {  // of a share
    std::atomic<bool> begun;
    std::atomic<std::int32_t> pieces_taken;
    std::atomic<std::int32_t> pieces_left;  // not packed yet
    std::atomic<std::int32_t> items_taken;
  };
  [[nodiscard]] std::size_t take_share(const Phase& phase, int slot);
  [[nodiscard]] bool has_memory(const Phase& phase, std::size_t share) const;
  template <typename Wanted>
  [[nodiscard]] std::size_t most_to_do(const Phase& phase, std::size_t first,
                                       const Wanted& wanted) const;
  void work_on(const Phase& phase, std::size_t share, int slot, Pack pack, Attend attend);

  std::size_t size_ = 0;
  std::atomic<std::size_t> next_share_ = 0;  // the next share to try
  std::unique_ptr<Counters[]> shares_;
  std::unique_ptr<std::atomic<std::int32_t>[]> wave_items_;  // not computed yet, per wave
};

}  // namespace annulus::cpu
