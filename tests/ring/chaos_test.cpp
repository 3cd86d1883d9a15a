#include "support/chaos_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "support/forwarding_transport.h"
#include "support/late_backend.h"
#include "support/ring_fixture.h"

// What the executor may assume of a transport is what its contract says, and no more: it runs over
// the worst one that keeps it.
namespace annulus::test {
namespace {

using std::chrono::milliseconds;

// The CPU as it is; on late queues, whose memory the transport copies itself; and on late queues
// with a transport that knows host memory only.
enum class Backend : std::uint8_t { at_once, late, late_staged };
constexpr const char* kBackendNames[] = {"at_once", "late", "late_staged"};

void PrintTo(Backend backend, std::ostream* out) {
  *out << kBackendNames[static_cast<int>(backend)];
}

using Parameters = std::tuple<RowTravel, int, Backend>;  // the second are ranks

class Chaos : public testing::TestWithParam<Parameters> {
 protected:
  Chaos()
      : problem_(make_problem("chaos", pattern(), 2, 120, 16)),
        inputs_(random_inputs(problem_, 11)),
        options_(ring_options(problem_, Placement::zigzag(120, ranks()))) {
    std::get<0>(GetParam()).apply(options_);
    expected_ = run_ring(options_, inputs_);
    if (backend() != Backend::at_once) late_.emplace();
  }

  static Pattern pattern() {
    const std::int64_t segments[] = {32, 120};
    const std::int64_t dilations[] = {1, 3};
    return longnet(4, segments, dilations, true);
  }
  static int ranks() { return std::get<1>(GetParam()); }
  static Backend backend() { return std::get<2>(GetParam()); }

  static std::vector<std::unique_ptr<Transport>> make_ring(const ChaosOptions& chaos,
                                                           milliseconds deadline) {
    auto ring = make_in_process_ring(ranks(), {.deadline = deadline});
    if (backend() == Backend::late_staged) {
      for (auto& transport : ring)
        transport = std::make_unique<HostOnlyTransport>(std::move(transport), false);
    }
    return make_chaos_ring(std::move(ring), chaos);
  }

  [[nodiscard]] std::string wrong_rows(const Shard& shard) const {
    Results results = expected_;
    shard.collect(results);  // own rows; the others are right as they are
    return first_difference(expected_, results);
  }

  Problem problem_;
  Inputs inputs_;
  RingOptions options_;
  Results expected_;
  std::optional<LateBackends> late_;
};

INSTANTIATE_TEST_SUITE_P(, Chaos,
                         testing::Combine(testing::ValuesIn(kRowTravels), testing::Values(2, 3, 5),
                                          testing::Values(Backend::at_once, Backend::late,
                                                          Backend::late_staged)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_ranks" +
                                  std::to_string(std::get<1>(info.param)) + "_" +
                                  kBackendNames[static_cast<int>(std::get<2>(info.param))];
                         });

TEST_P(Chaos, DelaysAndReorderingChangeNoBit) {
  const std::uint64_t seeds = slowness() > 1 ? 2 : backend() == Backend::at_once ? 12 : 4;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("chaos seed " + std::to_string(seed));
    const auto ring = make_ring({.seed = seed}, milliseconds(60'000));
    run_in_process(ring, [&](Transport& transport) {
      RingAttention executor(options_, transport);
      Shard shard(options_, transport.rank());
      for (int pass = 0; pass < 2; ++pass) {  // the second one finds the first one's buffers
        shard.load(inputs_);
        shard.enqueue(executor);
        executor.synchronize();
        EXPECT_EQ(wrong_rows(shard), "") << "rank " << transport.rank() << ", pass " << pass;
        EXPECT_EQ(shard.damage(), "");
      }
    });
    if (HasFailure()) return;
  }
}

// Passes go on until the link of one rank is cut, which happens anywhere from the executors'
// construction on.
TEST_P(Chaos, CutLinkEndsEveryRankWithATransportError) {
  // A rank that is slow for this long is lost, too: the others end in the same way.
  const milliseconds deadline(static_cast<int>(200 * std::min(slowness(), 5.0)));
  std::mt19937_64 random(seed_of(std::get<0>(GetParam()).name) +
                         static_cast<std::uint64_t>(ranks()));
  const std::uint64_t seeds = slowness() > 1 ? 2 : 4;  // most of the time is deadlines
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    ChaosOptions chaos{.seed = seed};
    chaos.torn_rank = static_cast<int>(random() % static_cast<std::uint64_t>(ranks()));
    chaos.tear_at = static_cast<int>(random() % 100);
    chaos.abort_gets_out = random() % 2 == 0;
    SCOPED_TRACE("chaos seed " + std::to_string(seed) + ", rank " +
                 std::to_string(chaos.torn_rank) + " cut at message " +
                 std::to_string(chaos.tear_at) + (chaos.abort_gets_out ? ", abort gets out" : ""));
    const auto ring = make_ring(chaos, deadline);
    const std::vector<RankOutcome> outcomes = run_ranks(ring, [&](Transport& transport) {
      RingAttention executor(options_, transport);
      Shard shard(options_, transport.rank());  // gone before the executor
      for (int pass = 0; pass < 200; ++pass) {
        shard.load(inputs_);
        try {
          shard.enqueue(executor);
        } catch (const TransportError&) {
          const auto now = [&] {
            return std::vector{shard.o.bytes(), shard.lse.bytes(), shard.dq.bytes(),
                               shard.dk.bytes(), shard.dv.bytes()};
          };
          const auto left = now();
          std::this_thread::sleep_for(milliseconds(3));
          EXPECT_TRUE(left == now()) << "tensors of rank " << transport.rank()
                                     << " are written to after the call has ended";
          throw;
        }
        executor.synchronize();
        ASSERT_EQ(wrong_rows(shard), "") << "rank " << transport.rank() << ", pass " << pass;
      }
    });
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
      const RankOutcome& outcome = outcomes[rank];
      EXPECT_EQ(outcome.kind, "TransportError") << "rank " << rank << ": " << outcome.message;
      EXPECT_GE(outcome.lost_rank, 0) << "rank " << rank << ": " << outcome.message;
      EXPECT_NE(outcome.message.find(" rank "), std::string::npos) << outcome.message;
      EXPECT_FALSE(ring[rank]->health().alive);
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace annulus::test
