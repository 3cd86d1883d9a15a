// The contract of transports on MPI, all ranks in this process: tests that look at both ends. What
// other processes do is in mpi_ring_test.

#include <gtest/gtest.h>

#include <thread>
#include <vector>

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

// Rank 0 waits for rank 1, rank 1 for rank 2, rank 2 for rank 3, which does not come.
TEST(MpiTransport, NamesTheRankThatDoesNotComeAndNotTheOneThatWaitsForIt) {
  const Ring ring = loopback(4, milliseconds(8000));  // half of it is time to tell the others
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&ring, rank] {
      Bytes in(8);
      const TransportError error =
          transport_error([&] { ring[rank]->receive(static_cast<int>(rank) + 1, 0, in)->wait(); });
      EXPECT_EQ(error.rank(), 3) << error.what();
      if (rank < 2) expect_mentions(error.what(), {"waits for others, in the end for rank 3"});
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(MpiTransport, WhoGoesOnAfterALongWaitIsNotSaidToWait) {
  const Ring ring = loopback(3, milliseconds(2000));
  ring[1]->set_deadline(milliseconds(10'000));
  Bytes in(8), out(8);
  std::thread first([&] {
    Bytes mine(8);
    ring[1]->receive(2, 0, mine)->wait();  // after more than half its deadline
  });
  std::this_thread::sleep_for(milliseconds(5100));
  const auto send = ring[2]->send(1, 0, out);
  first.join();
  const TransportError error = transport_error([&] { ring[0]->receive(1, 0, in)->wait(); });
  EXPECT_EQ(error.rank(), 1) << error.what();
}

TEST(MpiTransport, AnAbortAfterATimeoutNamesWhoDidNotCome) {
  const Ring ring = loopback(3, milliseconds(60'000));
  ring[1]->set_deadline(milliseconds(200));
  std::thread gives_up([&] {
    Bytes in(8);
    EXPECT_EQ(transport_error([&] { ring[1]->receive(2, 0, in)->wait(); }).rank(), 2);
    ring[1]->abort("nobody comes");
  });
  Bytes in(8);
  const TransportError error = transport_error([&] { ring[0]->receive(1, 0, in)->wait(); });
  EXPECT_EQ(error.rank(), 2);
  expect_mentions(error.what(), {"rank 1 aborted the transport: nobody comes"});
  gives_up.join();
}

}  // namespace
}  // namespace annulus::test
