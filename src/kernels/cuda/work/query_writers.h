#pragma once

#include "kernels/cuda/work/tables.h"

// Which launch of a forward stage is the last one with a row. Plain data, made on the host.
namespace annulus::cuda {

// Fills Tables::later, for launches in their order. Returns false, and fills nothing, if rows 32
// apart in some item differ, or if an item has received rows.
[[nodiscard]] bool find_later_launches(Tables& tables, const Computation& computation);

}  // namespace annulus::cuda
