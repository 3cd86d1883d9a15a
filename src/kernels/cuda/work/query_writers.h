#pragma once

#include "kernels/cuda/work/tables.h"

// Which launch of a forward stage is the last to have a row: plain data, known before anything
// runs.
namespace annulus::cuda {

// Fills Tables::later, for launches in their order. False, and nothing is filled: of some item, not
// every 32nd row is alike, or it has rows of others.
[[nodiscard]] bool find_later_launches(Tables& tables, const Computation& computation);

}  // namespace annulus::cuda
