#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/work_groups.h"

namespace annulus::cpu {

struct Phase;

// Bytes of so many packed rows (Kernels::packed_bytes); null where nothing is packed.
using PackedBytes = std::function<std::int64_t(std::int64_t rows)>;

// Keys of one K/V head that several items of a forward phase want: they are packed once, ahead of
// the first of these items, as part of the same list of work. Memory for them is bounded: lists are
// taken in waves of at most kWaveBytes (or one list), and a wave takes the memory of the last but
// one.
inline constexpr std::int64_t kWaveBytes = std::int64_t{32} << 20;
inline constexpr std::int64_t kPackRows = 256;  // of one piece: two blocks

struct KeyList {
  int group = 0;  // of an item that wants it
  int member = 0;
  std::int32_t batch = 0;
  std::int32_t wave = 0;
  std::int64_t rows = 0;    // places
  std::int64_t offset = 0;  // of its memory

  bool operator==(const KeyList&) const = default;
};

// A piece of a list from row `begin` on, or an item.
struct PackStep {
  std::int32_t list = -1;  // of the piece, or what the item wants; -1: nothing
  std::int32_t item = -1;
  std::int64_t begin = 0;

  bool operator==(const PackStep&) const = default;
};

// Finds the lists of a phase and orders its steps; leaves all empty where nothing is to be packed.
// `canonical`: places are indices.
void assign_packs(Phase& phase, const WorkGroups& groups, int head_ratio, bool canonical,
                  const PackedBytes& packed_bytes);

// What steps wait for, of one engine: phases run one at a time. Whatever a step waits for comes
// before it in the list.
class PackCounters {
 public:
  void reserve(const Phase& phase);
  void begin(const Phase& phase);

  // A step's time, from the constructor, which waits for what it needs, to the destructor, which
  // lets others go on however the step ends.
  class Step {
   public:
    Step(PackCounters& counters, const Phase& phase, const PackStep& step);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    std::atomic<std::int32_t>* done_ = nullptr;
  };

 private:
  std::size_t size_ = 0;
  std::unique_ptr<std::atomic<std::int32_t>[]> pieces_;  // per list, to be packed
  std::unique_ptr<std::atomic<std::int32_t>[]> items_;   // per wave, to be computed
};

}  // namespace annulus::cpu
