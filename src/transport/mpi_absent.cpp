// For builds without MPI: reports that it is missing.
#include "annulus/error.h"
#include "annulus/mpi.h"
#include "transport/mpi_ring.h"

namespace annulus {

bool mpi_built() { return false; }
std::string mpi_complaint() {
  return "this build has no MPI: it was not found when it was configured (Debian, Ubuntu: "
         "libopenmpi-dev, openmpi-bin), or ANNULUS_MPI was OFF";
}
std::unique_ptr<Transport> make_mpi_transport(const MpiOptions&) {
  throw DeviceError("MPI transport: " + mpi_complaint());
}
std::vector<std::unique_ptr<Transport>> mpi::make_loopback_ring(int, const MpiOptions&) {
  throw DeviceError("MPI transport: " + mpi_complaint());
}

}  // namespace annulus
