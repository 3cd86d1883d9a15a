#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "annulus/transport.h"

// Rings whose ranks are the processes of an MPI job. Builds without MPI have the same functions,
// which report that it is missing.
namespace annulus {

[[nodiscard]] bool mpi_built();
// Why MPI cannot be used; empty if it can.
[[nodiscard]] std::string mpi_complaint();

struct MpiOptions {
  std::chrono::milliseconds deadline{60'000};
  // A process that has not answered for this long is lost, even before the deadline. Live processes
  // also answer while they compute, read or write.
  std::chrono::milliseconds silence{60'000};
  // MPI_Comm_c2f() of the communicator whose processes are the ring, in its order. Absent:
  // MPI_COMM_WORLD.
  std::optional<int> communicator;
  double bytes_per_second =
      0;  // above 0: this rank's outgoing link is limited to this rate, to study overlap
};

// Collective over the communicator. The transport duplicates it, so messages do not mix with those
// of other users. Initialises MPI if necessary (and then finalises it when the program ends).
// Requires MPI_THREAD_MULTIPLE, because a thread of the transport moves messages while the caller
// computes: ConfigError if MPI does not provide it, DeviceError without MPI.
//
// Faults: MPI ends the whole job when one of its processes dies. If a process only stops answering,
// operations fail with a TransportError that names it, at their deadline or after its silence, and
// no memory of the caller is used afterwards. MPI itself cannot continue without that process:
// MPI_Finalize would wait for it, so save what must be saved and call MPI_Abort. If the transport
// initialised MPI, a program that ends then exits without MPI_Finalize, and mpirun ends the other
// processes.
[[nodiscard]] std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options = {});

}  // namespace annulus
