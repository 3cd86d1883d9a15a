// Who is named when a rank of a ring of processes is lost, or only seems to be.

#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "annulus/error.h"
#include "support/asleep.h"
#include "support/mpi_world.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

milliseconds patience(double least) {
  return milliseconds(static_cast<int>(least * std::min(slowness(), 3.0)));
}

class MpiLostRank : public testing::Test {
 protected:
  void SetUp() override {
    if (World::size() < 3) GTEST_SKIP() << "nobody is between two ranks";
  }
};

// Rank 0 is silent. Rank 1 waits for it, and everybody else for the rank before.
TEST_F(MpiLostRank, IsTheOneForWhomTheOthersWaitInTheEnd) {
  const auto transport = World::ring(patience(8000));  // half of it is time to tell the others
  const int rank = transport->rank();
  Bytes in(16);
  if (rank > 0) {
    // Those that are behind lose patience first.
    std::this_thread::sleep_for(milliseconds(3 * (World::size() - rank)));
    const TransportError error =
        transport_error([&] { transport->receive(rank - 1, 7, in)->wait(); });
    EXPECT_EQ(error.rank(), 0) << error.what();
    EXPECT_EQ(transport->health().lost_rank, 0);
    // By what they say next nobody else is to be blamed.
    transport->abort("lost somebody");
    EXPECT_EQ(transport->health().lost_rank, 0);
  }
  World::meet();
  if (rank == 0) {
    const TransportError error = transport_error([&] { transport->receive(1, 7, in)->wait(); });
    EXPECT_EQ(error.rank(), 0) << error.what();
    expect_mentions(error.what(), {"lost somebody"});
  }
  World::meet();
}

// What has come by then is there, however late it is: everybody else was in time.
TEST_F(MpiLostRank, IsNotOneThatSentWhileTheWaitingProcessWasStopped) {
  const milliseconds deadline = patience(5000);
  const auto transport = World::ring(2, deadline);
  int process = ::getpid();
  MPI_Bcast(&process, 1, MPI_INT, 1, MPI_COMM_WORLD);
  Bytes in(16);
  if (World::rank() == 1) {
    const auto receive = transport->receive(0, 3, in);
    World::meet();  // rank 0 stops this process, sends, and lets it go on after the deadline
    EXPECT_NO_THROW(receive->wait());
    EXPECT_EQ(in, block(16, 3));
  } else {
    World::meet();
    if (World::rank() == 0) {
      std::this_thread::sleep_for(patience(50));  // so that it waits, mostly
      ::kill(process, SIGSTOP);
      EXPECT_TRUE(
          comes_true([&] { return kernel_state("/proc/" + std::to_string(process)) == 'T'; }));
      const Bytes out = block(16, 3);
      const auto send = transport->send(1, 3, out);
      EXPECT_TRUE(comes_true([&] { return transport->counters().messages_sent == 1; }));
      std::this_thread::sleep_for(deadline);
      ::kill(process, SIGCONT);
      send->wait();
    }
  }
  World::meet();
}

}  // namespace
}  // namespace annulus::test

int main(int argc, char** argv) { return annulus::test::run_mpi_tests(argc, argv); }
