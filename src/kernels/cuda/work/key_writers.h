#pragma once

#include <cstddef>
#include <span>

#include "kernels/cuda/work/tables.h"

// Which launches begin and end the sums of dK and dV. Plain data, made on the host.
namespace annulus::cuda {

struct KeyWriters {
  // The first launch that has a row writes it instead of adding to it. Every row of the shard is in
  // some launch, so sums need not be cleared.
  bool begin = false;
  // The last launch has every row of the shard, and nothing is added after it, so it can round the
  // sums and write them to the caller's tensors.
  bool end = false;
  std::size_t last_stage = 0;  // the last with a launch
};

// Fills Tables::earlier. `stages` are the stages whose items own keys, in their order. `returned`:
// other ranks also send gradients of the shard's keys, after the first stage.
[[nodiscard]] KeyWriters find_key_writers(std::span<Tables* const> stages,
                                          const Computation& computation, bool returned);

}  // namespace annulus::cuda
