#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/work/tables.h"

// Facts about a launch, found on the host, by which kernels are chosen.
namespace annulus::cuda {

// How often pairs of a launch count.
enum class PairWeights : std::uint8_t {
  none,  // once
  // The weight depends only on the query's index and the key's place in the list, modulo 16:
  // strides of repeats divide 16, and a key's place and its index are equal modulo 16.
  periodic,
  general,
};

// Which limits of bands hide pairs of a launch. Kernels for causal attention have no lower limit.
enum class Limits : std::uint8_t { none, most, both };

// Strides and base address of a map for bulk copies are multiples of this many bytes.
inline constexpr int kMapStep = 16;

// Consecutive rows of equal width. 0 rows: rows are looked up one by one.
struct RowGrid {
  std::byte* base = nullptr;
  std::int64_t rows = 0;
  std::int64_t step = kMapStep;  // rows begin at multiples of this many bytes
};

struct LaunchTraits {
  Limits limits = Limits::none;
  PairWeights weights = PairWeights::none;
  // Whether most rows of a side are in received parcels instead of the shard, and their stride in a
  // run. These rows can be loaded by bulk copies.
  bool queries_received = false;
  bool keys_received = false;
  std::int32_t query_stride = 1;
  std::int32_t key_stride = 1;
  // If they are received: all parcels of the launch as one grid. Known once memory is allocated.
  RowGrid queries;  // Q and dO
  RowGrid keys;     // K and V
  RowGrid query_gradients;
};

[[nodiscard]] LaunchTraits launch_traits(const Tables& tables, const Launch& launch);

// The parcels with rows of a side of a launch, ascending.
[[nodiscard]] std::vector<std::int32_t> parcels_of(const Tables& tables, const Launch& launch,
                                                   Side side);

// Received parcels as one grid of rows of `row_bytes`, from the lowest address to the end of the
// highest; bytes between parcels are ignored. Sections and parcels begin at multiples of `step`
// from the grid's base, otherwise the grid is empty.
[[nodiscard]] RowGrid grid_of(const ParcelRows& parcels, std::span<const std::int32_t> used,
                              std::int64_t row_bytes, std::int64_t step);

// Orders the items of a launch for blocks that take items b, b + blocks, ...: all blocks end at
// about the same time, and neighbouring items, which read the same keys, run at about the same
// time. May add items without rows, which blocks skip.
[[nodiscard]] std::vector<Item> arrange_items(const Tables& tables, const Launch& launch,
                                              int blocks, int tile);

}  // namespace annulus::cuda
