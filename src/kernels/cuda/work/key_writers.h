#pragma once

#include <cstddef>
#include <span>

#include "kernels/cuda/work/tables.h"

// Which launches begin and end sums of dK and dV: plain data, known before anything runs.
namespace annulus::cuda {

struct KeyWriters {
  // The first launch that has a row writes it instead of adding to it, and every row of the shard
  // has one: sums need not be cleared.
  bool begin = false;
  // The last launch has every row of the shard, and nothing is added behind it: what it adds up may
  // be rounded and written to the caller's tensors.
  bool end = false;
  std::size_t last_stage = 0;  // that has a launch
};

// Fills Tables::earlier. `stages` are those of the side of the keys, in the order in which they
// run. `returned`: gradients of the shard's keys also come from other ranks, after the first stage.
[[nodiscard]] KeyWriters find_key_writers(std::span<Tables* const> stages,
                                          const Computation& computation, bool returned);

}  // namespace annulus::cuda
