#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "annulus/in_process.h"
#include "support/chaos_transport.h"
#include "support/forwarding_transport.h"
#include "support/transport_contract_errors.h"
#include "support/transport_contract_messages.h"

namespace annulus::test {
namespace {

Ring in_process(int ranks, milliseconds deadline) {
  return make_in_process_ring(ranks, {.deadline = deadline});
}

// As a transport without queues of its own: whoever posts waits for the device.
Ring host_only(int ranks, milliseconds deadline) {
  Ring ring = in_process(ranks, deadline);
  for (auto& transport : ring)
    transport = std::make_unique<HostOnlyTransport>(std::move(transport), true);
  return ring;
}

INSTANTIATE_TEST_SUITE_P(, TransportContract,
                         testing::Values(TransportMaker{"in_process", in_process, true},
                                         TransportMaker{"host_only", host_only, false},
                                         TransportMaker{"chaos",
                                                        [](int ranks, milliseconds deadline) {
                                                          return make_chaos_ring(
                                                              in_process(ranks, deadline),
                                                              {.seed = 2});
                                                        },
                                                        true},
                                         TransportMaker{"chaos_host_only",
                                                        [](int ranks, milliseconds deadline) {
                                                          return make_chaos_ring(
                                                              host_only(ranks, deadline),
                                                              {.seed = 3});
                                                        },
                                                        false}),
                         name_of_maker);

}  // namespace
}  // namespace annulus::test
