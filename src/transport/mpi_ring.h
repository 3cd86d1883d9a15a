#pragma once

#include <memory>
#include <vector>

#include "annulus/mpi.h"
#include "annulus/transport.h"

namespace annulus::mpi {

// A ring over MPI whose ranks are all in this process, for tests that look at both ends.
[[nodiscard]] std::vector<std::unique_ptr<Transport>> make_loopback_ring(int ranks,
                                                                         const MpiOptions& options);

}  // namespace annulus::mpi
