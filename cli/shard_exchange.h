#pragma once

#include "cli/tensors.h"
#include "cli/world.h"

namespace annulus::cli {

// Of an MPI job, where rank 0 has whole tensors and every other rank its shards. Collective;
// nothing happens elsewhere.
void send_inputs(World& world, const JobTensors& tensors);      // from rank 0
void collect_results(World& world, const JobTensors& tensors);  // to rank 0

}  // namespace annulus::cli
