// The contract of transports on MPI, all ranks in this process: tests that look at both ends. What
// other processes do is in mpi_ring_test.

#include <gtest/gtest.h>

#include "annulus/mpi.h"
#include "support/chaos_transport.h"
#include "support/transport_contract_errors.h"
#include "support/transport_contract_messages.h"
#include "transport/mpi_ring.h"

namespace annulus::test {
namespace {

Ring loopback(int ranks, milliseconds deadline) {
  return mpi::make_loopback_ring(ranks, {.deadline = deadline});
}

INSTANTIATE_TEST_SUITE_P(, TransportContract,
                         testing::Values(TransportMaker{"mpi", loopback, false},
                                         TransportMaker{"chaos_mpi",
                                                        [](int ranks, milliseconds deadline) {
                                                          return make_chaos_ring(
                                                              loopback(ranks, deadline),
                                                              {.seed = 4});
                                                        },
                                                        false}),
                         name_of_maker);

}  // namespace
}  // namespace annulus::test
