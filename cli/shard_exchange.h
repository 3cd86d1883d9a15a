#pragma once

#include "cli/tensors.h"
#include "cli/world.h"

namespace annulus::cli {

// In an MPI job, rank 0 has whole tensors and every other rank its shards. Collective; does nothing
// without MPI.
void send_inputs(World& world, const JobTensors& tensors);      // from rank 0
void collect_results(World& world, const JobTensors& tensors);  // to rank 0

}  // namespace annulus::cli
