#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/work/tables.h"

// What the host knows of a launch before it goes to the device: kernels are chosen by it.
namespace annulus::cuda {

// How often pairs of a launch count.
enum class PairWeights : std::uint8_t {
  none,  // once
  // By the query's index and the key's place in the list modulo 16 only: strides of repeats divide
  // 16, and a key's place and its index agree modulo 16.
  periodic,
  general,
};

// Which limits of bands hide pairs of a launch. Kernels for causal attention know no lower one.
enum class Limits : std::uint8_t { none, most, both };

// What the steps of a map for bulk copies, and where it begins, are multiples of, in bytes.
inline constexpr int kMapStep = 16;

// Rows that lie one after the other, of one width. None: rows are looked up one by one.
struct RowGrid {
  std::byte* base = nullptr;
  std::int64_t rows = 0;
  std::int64_t step = kMapStep;  // where rows may begin: at multiples of so many bytes
};

struct LaunchTraits {
  Limits limits = Limits::none;
  PairWeights weights = PairWeights::none;
  // Of most rows of a side: whether they are in received parcels and not in the shard, and from one
  // row of a run to the next. These can go by bulk copies.
  bool queries_received = false;
  bool keys_received = false;
  std::int32_t query_stride = 1;
  std::int32_t key_stride = 1;
  // Where they are received, all parcels of the launch in one: known when there is memory.
  RowGrid queries;  // Q and dO
  RowGrid keys;     // K and V
  RowGrid query_gradients;
};

[[nodiscard]] LaunchTraits launch_traits(const Tables& tables, const Launch& launch);

// The parcels that the rows of a launch's side are in, ascending.
[[nodiscard]] std::vector<std::int32_t> parcels_of(const Tables& tables, const Launch& launch,
                                                   Side side);

// Received parcels as one grid of rows of `row_bytes`, from the lowest to the end of the highest:
// whatever lies between is not looked at. Sections and parcels begin at multiples of `step` from
// the grid's base, or the grid is empty.
[[nodiscard]] RowGrid grid_of(const ParcelRows& parcels, std::span<const std::int32_t> used,
                              std::int64_t row_bytes, std::int64_t step);

// The items of a launch in an order in which block b of `blocks` takes items b, b + blocks, ..., so
// that all blocks end at about the same time and items next to each other, which read the same
// keys, still run at about the same time. Items without rows may be added: blocks pass them over.
[[nodiscard]] std::vector<Item> arrange_items(const Tables& tables, const Launch& launch,
                                              int blocks, int tile);

}  // namespace annulus::cuda
