// Rings of processes for a long time. 100,000 steps take minutes:
//   ANNULUS_SOAK_STEPS=100000 tests/support/mpirun.sh 3 build/release/tests/mpi_soak_test

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "annulus/ring_check.h"
#include "support/mpi_world.h"
#include "support/resources.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

struct Held {
  std::int64_t resident = resident_bytes();
  std::int64_t descriptors = entries_of("/proc/self/fd");
  std::int64_t threads = entries_of("/proc/self/task");
};

void expect_flat(const char* what, const Held& before, const Held& after, std::int64_t most_bytes) {
  std::printf(
      "[ rank %d  ] %s: resident %.2f -> %.2f MiB, descriptors %d -> %d, threads %d -> %d\n",
      World::rank(), what, static_cast<double>(before.resident) / 0x1p20,
      static_cast<double>(after.resident) / 0x1p20, static_cast<int>(before.descriptors),
      static_cast<int>(after.descriptors), static_cast<int>(before.threads),
      static_cast<int>(after.threads));
  EXPECT_LE(after.resident - before.resident, slowness() > 1 ? 64 << 20 : most_bytes);
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_LE(after.threads, before.threads);
}

TEST(MpiSoak, StepsGiveTheSameBitsAndLeaveNoTrace) {
  const char* const wanted = std::getenv("ANNULUS_SOAK_STEPS");
  // Few by default: with more ranks than free cores, every message waits for a time slice.
  const int steps = wanted == nullptr ? 400 : std::atoi(wanted);
  const auto transport = World::ring();
  const Problem problem =
      make_problem("soak", longnet(2, List{16, 48}, List{1, 3}, true), 1, 48, 16);
  RingOptions options = ring_options(problem, placement_of("zigzag", 48, World::size()));
  options.schedule = Schedule::ring;
  options.threads = 1;
  RingAttention ring(options, *transport);
  // Several problems in turn: rows of another step would be another result.
  std::vector<Shard> shards;
  std::vector<Results> first;
  for (int i = 0; i < 3; ++i) {
    const Inputs inputs = random_inputs(problem, static_cast<std::uint64_t>(i));
    shards.emplace_back(options, transport->rank());
    shards.back().load(inputs);
    first.push_back(run_ring(options, inputs));
  }
  Held quarter;
  for (int step = 0; step < steps; ++step) {
    if (step == steps / 4) quarter = Held();
    const auto which = static_cast<std::size_t>(step % 3);
    shards[which].forward(ring);
    shards[which].backward(ring);
    Results found = first[which];
    shards[which].collect(found);
    ASSERT_EQ(first_difference(first[which], found), "") << "step " << step;
  }
  expect_flat((std::to_string(steps) + " steps").c_str(), quarter, Held(), 1 << 20);
}

TEST(MpiSoak, TransportsComeAndGoWithoutATrace) {
  const auto come_and_go = [](int times) {
    for (int i = 0; i < times; ++i) EXPECT_TRUE(check_ring(*World::ring(), 300'000).forward_ok);
    World::meet();
  };
  come_and_go(10);
  const Held before;  // with threads of transports that have not quite left
  come_and_go(50);
  (void)settled_threads(before.threads);
  // Each has 2 MiB of buffers, which the allocator gets in any order and gives back when it likes.
  expect_flat("50 transports", before, Held(), 4 << 20);
}

}  // namespace
}  // namespace annulus::test

int main(int argc, char** argv) { return annulus::test::run_mpi_tests(argc, argv); }
