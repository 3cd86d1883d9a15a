#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "annulus/transport.h"

// Rings whose ranks are the processes of an MPI job. In builds without MPI everything is there,
// too: it says what is missing.
namespace annulus {

[[nodiscard]] bool mpi_built();
// Why there is no MPI to be used; empty: there is.
[[nodiscard]] std::string mpi_complaint();

struct MpiOptions {
  std::chrono::milliseconds deadline{60'000};
  // A process that has not answered for this long is lost, whatever the deadline. Those that live
  // answer while they compute, read or write.
  std::chrono::milliseconds silence{60'000};
  // MPI_Comm_c2f() of the communicator whose processes are the ring, in its order. Absent:
  // MPI_COMM_WORLD.
  std::optional<int> communicator;
  double bytes_per_second =
      0;  // above 0: this rank's outgoing link is limited to this rate, to study overlap
};

// Collective over the communicator, of which the transport has a copy of its own: its messages meet
// nobody else's. Initialises MPI if nobody has (and then finalises it when the program ends), and
// wants MPI_THREAD_MULTIPLE: a thread of the transport sees to it that messages move while the
// caller computes. ConfigError where that is not to be had; DeviceError without MPI.
//
// Faults: MPI ends the whole job when one of its processes dies. Where one only stops answering,
// operations fail with a TransportError that names it, at their deadline or after its silence, and
// no memory of the caller's is touched afterwards. MPI itself cannot go on without that process:
// MPI_Finalize would wait for it, so call MPI_Abort, or save what is to be saved first. Where the
// transport initialised MPI, a program that ends then leaves without MPI_Finalize, and mpirun ends
// the others.
[[nodiscard]] std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options = {});

}  // namespace annulus
