#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/tables.h"

// What the host knows of a launch before it goes to the device: kernels are chosen by it.
namespace annulus::cuda {

// How often pairs of a launch count.
enum class PairWeights : std::uint8_t {
  none,      // once
  // By the query's index and the key's place in the list modulo 16 only: strides of repeats divide
  // 16, and a key's place and its index agree modulo 16.
  periodic,
  general,
};

struct LaunchTraits {
  bool causal = false;  // some group is
  PairWeights weights = PairWeights::none;
  // Of most rows in the shard, from one row of a run to the next: these can go by bulk copies.
  std::int32_t query_stride = 1;
  std::int32_t key_stride = 1;
};

[[nodiscard]] LaunchTraits launch_traits(const Tables& tables, const Launch& launch);

// The items of a launch in an order in which block b of `blocks` takes items b, b + blocks, ..., so
// that all blocks end at about the same time and items next to each other, which read the same
// keys, still run at about the same time. Items without rows may be added: blocks pass them over.
[[nodiscard]] std::vector<Item> arrange_items(const Tables& tables, const Launch& launch,
                                              int blocks, int tile);

}  // namespace annulus::cuda
