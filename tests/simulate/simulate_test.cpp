// The simulator against times worked out by hand, and against what the executor itself says of its
// bytes and memory. simulator_bench compares times with measured ones.

#include "annulus/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "plan/pair_counts.h"
#include "simulate/step_work.h"

namespace annulus {
namespace {

constexpr std::int64_t kLocal = 1024;  // tokens of a rank

// One head of dense attention in which a pair of shards takes one second (in backward, too) and the
// rows of a shard take `message` seconds on a link, as fp32 gradients on their way back do.
RingOptions dense_ring(int ranks, Schedule schedule) {
  RingOptions options{dense(1), Placement::contiguous(kLocal * ranks, ranks)};
  options.head_dim = 8;
  options.schedule = schedule;
  options.backward_travel = BackwardTravel::keys;
  return options;
}

Cluster one_second_cluster(double message) {
  constexpr double kShardPairs = static_cast<double>(kLocal * kLocal) * 8;
  Cluster cluster;
  cluster.name = "by hand";
  cluster.forward_flops_per_second = 4 * kShardPairs;
  cluster.backward_flops_per_second = 10 * kShardPairs;
  cluster.between = {"cable", static_cast<double>(kLocal * 2 * 8 * 4) / message, 0, true};
  return cluster;
}

// --- by hand -------------------------------------------------------------------------------------

TEST(Simulate, OneRankOnlyComputes) {
  const Forecast f = simulate(dense_ring(1, Schedule::ring), one_second_cluster(0.25));
  EXPECT_DOUBLE_EQ(f.forward.seconds, 1.0);
  EXPECT_DOUBLE_EQ(f.backward->seconds, 1.0);
  EXPECT_EQ(f.forward.bytes, 0);
  EXPECT_EQ(f.forward.busiest_link, "");
  EXPECT_EQ(f.forward.overlap, 1.0);
}

TEST(Simulate, TwoRanksHideAFastLinkInForward) {
  const Forecast f = simulate(dense_ring(2, Schedule::ring), one_second_cluster(0.25));
  EXPECT_DOUBLE_EQ(f.forward.seconds, 2.0);
  EXPECT_DOUBLE_EQ(f.forward.compute_seconds, 2.0);
  EXPECT_DOUBLE_EQ(f.forward.transfer_seconds, 0.25);
  EXPECT_DOUBLE_EQ(f.forward.overlap, 1.0);
  EXPECT_DOUBLE_EQ(f.forward.waiting, 0.0);
  EXPECT_EQ(f.forward.busiest_link, "cable out of host 0, port 0");
  EXPECT_DOUBLE_EQ(f.forward.busiest_link_seconds, 0.25);
  // The last gradients have no compute to hide behind.
  EXPECT_DOUBLE_EQ(f.backward->seconds, 2.25);
  EXPECT_DOUBLE_EQ(f.backward->transfer_seconds, 0.5);
  EXPECT_DOUBLE_EQ(f.backward->overlap, 0.5);
}

TEST(Simulate, TwoRanksWaitForASlowLink) {
  const Forecast f = simulate(dense_ring(2, Schedule::ring), one_second_cluster(3));
  EXPECT_DOUBLE_EQ(f.forward.seconds, 3.0 + 1.0);
  EXPECT_DOUBLE_EQ(f.forward.waiting, 2.0 / 4.0);
  EXPECT_DOUBLE_EQ(f.backward->seconds, 3.0 + 1.0 + 3.0);
}

TEST(Simulate, BlockingTransfersAreNotHidden) {
  RingOptions options = dense_ring(3, Schedule::ring);
  options.blocking = true;
  const Forecast f = simulate(options, one_second_cluster(0.25));
  EXPECT_DOUBLE_EQ(f.forward.seconds, 3 * 1.0 + 2 * 0.25);
  EXPECT_DOUBLE_EQ(f.forward.overlap, 0.0);
  EXPECT_DOUBLE_EQ(f.backward->seconds, 3 * 1.0 + 2 * 0.25 + 2 * 0.25);
}

TEST(Simulate, LatencyIsPaidByTheMessageAndByTheAgreement) {
  Cluster cluster = one_second_cluster(3);
  cluster.between.latency_seconds = 0.5;
  const Forecast f = simulate(dense_ring(2, Schedule::ring), cluster);
  EXPECT_DOUBLE_EQ(f.forward.seconds, 0.5 + 3.5 + 1.0);
}

TEST(Simulate, GradientsQueueBehindRowsOnTheSameLink) {
  // Rows of step 2 leave first: until 2 x. Gradients of step 1 follow, 2 x to 3 x, and those of
  // step 2 once these are added.
  const Forecast slow = simulate(dense_ring(3, Schedule::ring), one_second_cluster(3));
  EXPECT_DOUBLE_EQ(slow.backward->seconds, 4 * 3.0);
  const Forecast fast = simulate(dense_ring(3, Schedule::ring), one_second_cluster(0.25));
  EXPECT_DOUBLE_EQ(fast.backward->seconds, 3 * 1.0 + 0.25);
}

TEST(Simulate, GatherSendsEverythingAtOnceAndComputesIt) {
  const Forecast f = simulate(dense_ring(4, Schedule::gather), one_second_cluster(0.5));
  // Three messages a link, in an order in which no two ranks send to the same one.
  EXPECT_DOUBLE_EQ(f.forward.seconds, 1.5 + 3.0);
  EXPECT_EQ(f.steps, 1);
  // Received two at a time by ascending sender: rank 0's are needed by everyone at first.
  EXPECT_GE(f.backward->seconds, 1.5 + 3.0 + 1.5);
  EXPECT_LE(f.backward->seconds, 1.5 + 3.0 + 3.0);
}

TEST(Simulate, RanksOfOneProcessorTakeTurns) {
  Cluster cluster = one_second_cluster(1);
  cluster.ranks_per_host = cluster.ranks_per_processor = 2;
  cluster.inside = cluster.between;
  EXPECT_DOUBLE_EQ(simulate(dense_ring(2, Schedule::ring), cluster).forward.seconds, 4.0);
  // Rows arrive after 5 s, when both have long computed their own.
  cluster.inside.bytes_per_second /= 5;
  EXPECT_DOUBLE_EQ(simulate(dense_ring(2, Schedule::ring), cluster).forward.seconds, 5.0 + 2.0);
}

TEST(Simulate, CopiesOfRanksOfOneProcessorTakeTurnsWithTiles) {
  Cluster cluster = one_second_cluster(0.25);
  cluster.ranks_per_host = cluster.ranks_per_processor = 2;
  cluster.inside = cluster.between;
  cluster.copy_bytes_per_second = static_cast<double>(kLocal * 2 * 8 * 4) * 10;
  const Forecast f = simulate(dense_ring(2, Schedule::ring), cluster);
  // Rank 1 packs behind rank 0, from 0.2 to 0.4, and four steps follow.
  EXPECT_NEAR(f.forward.seconds, 2 * 0.2 + 4.0, 1e-12);
  // Rank 0 clears from 2.4 to 2.5, behind rank 1's first step, and rank 1 behind that; the last
  // gradients go out at 4.6 and arrive at 4.85, to be added one rank after the other.
  EXPECT_NEAR(f.backward->seconds, 2 * 0.2 + 2.0 + 2 * 0.1 + 2.0 + 0.25 + 2 * 0.3, 1e-12);
  // Rows that leave late because of another rank's packing arrive late: at 0.4 + 3.
  cluster.inside.bytes_per_second /= 12;
  EXPECT_NEAR(simulate(dense_ring(2, Schedule::ring), cluster).forward.seconds, 0.4 + 3.0 + 2.0,
              1e-12);
}

TEST(Simulate, HostsAreReachedThroughTheirPorts) {
  // Four ranks on two hosts, three steps. Inside takes no time, and one rank of each host sends to
  // the other host in every step.
  Cluster cluster = one_second_cluster(2);
  cluster.ranks_per_host = 2;
  const Forecast f = simulate(dense_ring(4, Schedule::ring), cluster);
  EXPECT_DOUBLE_EQ(f.forward.transfer_seconds, 3 * 2.0);
  EXPECT_EQ(f.forward.busiest_link.rfind("cable out of host 0, port", 0), 0U)
      << f.forward.busiest_link;
  // A gather has two ranks of each host send two messages each to the other one.
  EXPECT_DOUBLE_EQ(simulate(dense_ring(4, Schedule::gather), cluster).forward.transfer_seconds,
                   4.0);
  cluster.ports_per_host = 1;
  EXPECT_DOUBLE_EQ(simulate(dense_ring(4, Schedule::gather), cluster).forward.transfer_seconds,
                   8.0);
}

TEST(Simulate, CopiesTakeTime) {
  Cluster cluster = one_second_cluster(0.25);
  const double shard = static_cast<double>(kLocal * 2 * 8 * 4);
  cluster.copy_bytes_per_second = shard * 10;  // 0.1 s for reading or writing a shard's rows
  const Forecast f = simulate(dense_ring(2, Schedule::ring), cluster);
  EXPECT_NEAR(f.forward.seconds, 0.2 + 2.0, 1e-12);
  EXPECT_NEAR(f.backward->seconds, 0.2 + 1.0 + 0.1 + 1.0 + 0.25 + 0.3, 1e-12);
}

TEST(Simulate, ReproducibleComputesAfterEverythingHasCome) {
  RingOptions options = dense_ring(2, Schedule::gather);
  options.reproducible = true;
  const Forecast f = simulate(options, one_second_cluster(0.25));
  EXPECT_DOUBLE_EQ(f.forward.seconds, 0.25 + 2.0);
  // 7 products instead of 5; statistics of 16 bytes beside rows of 64.
  EXPECT_DOUBLE_EQ(f.backward->seconds, 0.25 + 2.0 * 1.4 + 0.25 * 80 / 64);
}

TEST(Simulate, AStageTakesItsLeastTime) {
  Cluster cluster = one_second_cluster(0.25);
  cluster.stage_seconds = 4;
  EXPECT_DOUBLE_EQ(simulate(dense_ring(2, Schedule::ring), cluster).forward.seconds, 8.0);
}

// --- properties ----------------------------------------------------------------------------------

struct Case {
  std::string name;
  RingOptions options;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<std::int64_t> segments{64, 256, 1024};
  const std::vector<std::int64_t> dilations{1, 2, 4};
  for (const bool causal : {false, true}) {
    for (const char* placement : {"contiguous", "zigzag", "striped"}) {
      for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
        for (const bool is_dense : {false, true}) {
          for (const int ranks : {2, 5, 8}) {
            RingOptions options{
                is_dense ? dense(4, causal) : longnet(4, segments, dilations, causal),
                Placement::named(placement, 3000, ranks)};
            options.kv_heads = 2;
            options.head_dim = 16;
            options.schedule = schedule;
            if (ranks == 5) options.pattern.window = {150, causal ? 0 : 150};
            all.push_back({std::string(is_dense ? "dense " : "longnet ") + placement + " " +
                               name_of(schedule) + (causal ? " causal " : " full ") +
                               (ranks == 5 ? "window " : "") + std::to_string(ranks),
                           options});
          }
        }
      }
    }
  }
  return all;
}

// Compute and transfers take about as long.
Cluster balanced_cluster() {
  Cluster cluster;
  cluster.name = "balanced";
  cluster.ranks_per_host = 2;
  cluster.forward_flops_per_second = 1e9;
  cluster.backward_flops_per_second = 9e8;
  cluster.inside = {"inside", 4e7, 1e-5, true};
  cluster.between = {"between", 2e7, 1e-4, true};
  return cluster;
}

TEST(Simulate, IsNeverFasterThanComputeOrItsBusiestLink) {
  for (const auto& [name, options] : cases()) {
    const Forecast f = simulate(options, balanced_cluster());
    for (const PassForecast* pass : {&f.forward, &*f.backward}) {
      const double slack = 1e-9 * pass->seconds;
      EXPECT_GE(pass->seconds + slack, pass->compute_seconds) << name;
      EXPECT_GE(pass->seconds + slack, pass->transfer_seconds) << name;
      EXPECT_GE(pass->seconds + slack, pass->busiest_link_seconds) << name;
      EXPECT_LE(pass->seconds, pass->compute_seconds + pass->transfer_seconds + slack) << name;
      EXPECT_LE(pass->computed_flops, pass->flops) << name;
      EXPECT_TRUE(pass->overlap >= 0 && pass->overlap <= 1) << name;
      EXPECT_TRUE(pass->waiting >= 0 && pass->waiting < 1) << name;
    }
    EXPECT_GE(f.forward.seconds * options.placement.ranks() * 1e9, f.forward.computed_flops)
        << name;
  }
}

TEST(Simulate, IsNeverSlowerOnBetterMachines) {
  for (const auto& one : cases()) {
    const auto& name = one.name;
    const auto& options = one.options;
    const Cluster cluster = balanced_cluster();
    const Forecast base = simulate(options, cluster);
    const auto expect_better = [&](const char* how, const Cluster& better, double slack) {
      const Forecast f = simulate(options, better);
      EXPECT_LE(f.forward.seconds, base.forward.seconds * (1 + slack)) << name << ", " << how;
      EXPECT_LE(f.backward->seconds, base.backward->seconds * (1 + slack)) << name << ", " << how;
    };
    Cluster wide = cluster;
    wide.inside.bytes_per_second *= 2;
    wide.between.bytes_per_second *= 2;
    expect_better("twice the bandwidth", wide, 1e-9);
    Cluster fast = cluster;
    fast.forward_flops_per_second *= 2;
    fast.backward_flops_per_second *= 2;
    expect_better("twice the FLOP/s", fast, 1e-9);
    Cluster prompt = cluster;
    prompt.inside.latency_seconds = prompt.between.latency_seconds = 0;
    // Messages come in another order then, and one may be in the way of another.
    expect_better("no latency", prompt, 0.05);
  }
}

TEST(Simulate, ReceivingTakesTimeWhereItIsLimited) {
  int slower = 0;
  for (const auto& [name, options] : cases()) {
    Cluster cluster = balanced_cluster();
    const double limited = simulate(options, cluster).backward->transfer_seconds;
    cluster.inside.limits_receiving = cluster.between.limits_receiving = false;
    const double unlimited = simulate(options, cluster).backward->transfer_seconds;
    EXPECT_LE(unlimited, limited * (1 + 1e-9)) << name;
    slower += limited > 1.1 * unlimited ? 1 : 0;
  }
  EXPECT_GT(slower, 0);
}

TEST(Simulate, BytesAndBuffersAreTheExecutors) {
  for (const auto& [name, options] : cases()) {
    const int ranks = options.placement.ranks();
    std::atomic<std::int64_t> forward = 0;
    std::atomic<std::int64_t> backward = 0;
    std::vector<std::int64_t> buffers(static_cast<std::size_t>(ranks));
    std::vector<std::int64_t> states(buffers.size());
    Travel travel = Travel::keys;
    run_in_process(ranks, [&, &options = options](Transport& transport) {
      const RingAttention ring(options, transport);
      forward += ring.predicted_forward_bytes();
      backward += ring.predicted_backward_bytes();
      buffers[static_cast<std::size_t>(transport.rank())] = ring.memory_info().communication_bytes;
      states[static_cast<std::size_t>(transport.rank())] = ring.memory_info().state_bytes;
      if (transport.rank() == 0) travel = ring.backward_plan().options().travel;
    });
    const Forecast f = simulate(options, balanced_cluster());
    EXPECT_EQ(f.forward.bytes, forward) << name;
    EXPECT_EQ(f.backward->bytes, backward) << name;
    EXPECT_EQ(f.backward_travel, travel) << name;
    const auto at = static_cast<std::size_t>(f.memory.rank);
    EXPECT_EQ(f.memory.state_bytes, states[at]) << name;
    // Copies of messages that are not in one piece come on top.
    EXPECT_LE(f.memory.communication_bytes, buffers[at]) << name;
    if (options.pattern.branches.size() == 1 && options.placement.name() == "contiguous" &&
        !options.pattern.causal) {
      EXPECT_EQ(f.memory.communication_bytes, buffers[at]) << name;
    }
  }
}

// --- work ----------------------------------------------------------------------------------------

TEST(StepWork, IsWhatEveryRankWalks) {
  for (const auto& [name, options] : cases()) {
    for (const Travel travel : {Travel::keys, Travel::queries}) {
      const PlanOptions plan_options{options.pattern,  options.placement, options.placement,
                                     options.kv_heads, options.schedule,  travel};
      const std::vector<Plan> views = Plan::of_all_ranks(plan_options);
      const simulation::StepWork work(views[0], false);
      EXPECT_TRUE(work.counted());
      for (const Plan& view : views) {
        const std::vector<double> expected = pairs_by_step(view);
        for (int step = 0; step <= view.steps(); ++step) {
          EXPECT_DOUBLE_EQ(work.pairs(view.rank(), step), expected[static_cast<std::size_t>(step)])
              << name << ", rank " << view.rank() << ", step " << step;
        }
      }
    }
  }
}

TEST(StepWork, OfQueriesIsThatOfKeysWithoutAMask) {  // which simulate() makes use of
  for (const auto& [name, options] : cases()) {
    if (options.pattern.causal) continue;
    const auto work = [&, &options = options](Travel travel) {
      const Plan plan({options.pattern, options.placement, options.placement, options.pattern.heads,
                       options.schedule, travel},
                      0);
      return simulation::StepWork(plan, true);
    };
    const simulation::StepWork keys = work(Travel::keys);
    const simulation::StepWork queries = work(Travel::queries);
    const Plan plan({options.pattern, options.placement, options.placement, options.pattern.heads,
                     options.schedule, Travel::keys},
                    0);
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      for (int step = 0; step <= plan.steps(); ++step)
        EXPECT_DOUBLE_EQ(keys.pairs(rank, step), queries.pairs(rank, step)) << name;
    }
  }
}

TEST(StepWork, CountsSharedPairsOnce) {
  // By definition: a guest leaves out what lies in one segment of its host. Two branches, the
  // finer one having every row.
  const std::vector<std::int64_t> segments{128, 512};  // shorter ones are not worth sharing
  const std::vector<std::int64_t> dilations{1, 4};
  const std::vector<std::int64_t> boundaries{0, 5, 700};
  for (const auto& [causal, documents] :
       {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
    for (const char* placement : {"contiguous", "zigzag", "striped"}) {
      Pattern pattern = longnet(2, segments, dilations, causal);
      if (documents) pattern.documents = packed_documents(boundaries);
      const Placement where = Placement::named(placement, 900, 3);
      const std::vector<Plan> views =
          Plan::of_all_ranks({pattern, where, where, 2, Schedule::gather, Travel::keys});
      const simulation::StepWork work(views[0], true);
      for (int rank = 0; rank < 3; ++rank) {
        double pairs[2] = {0, 0};
        const std::vector<std::int64_t> queries = where.positions(rank);
        for (int owner = 0; owner < 3; ++owner) {
          for (const std::int64_t q : queries) {
            for (const std::int64_t k : where.positions(owner)) {
              for (int head = 0; head < 2; ++head) {
                const bool fine = pattern.allows(pattern.branches[0], head, q, k);
                const bool coarse = pattern.allows(pattern.branches[1], head, q, k);
                if (fine || coarse) pairs[owner == rank ? 0 : 1] += 1;
              }
            }
          }
        }
        EXPECT_DOUBLE_EQ(work.pairs(rank, 0), pairs[0]) << placement << causal << documents;
        EXPECT_DOUBLE_EQ(work.pairs(rank, 1), pairs[1]) << placement << causal << documents;
      }
    }
  }
}

TEST(StepWork, KeepsTheSumsWhereTilesAreTooMany) {
  for (const auto& [name, options] : cases()) {
    const Plan plan({options.pattern, options.placement, options.placement, options.kv_heads,
                     options.schedule, Travel::keys},
                    options.placement.ranks() / 2);
    const simulation::StepWork exact(plan, true);
    const simulation::StepWork rough(plan, true, 0.0);
    EXPECT_FALSE(rough.counted());
    for (int rank = 0; rank < plan.ranks(); ++rank)
      EXPECT_NEAR(rough.pairs(rank), exact.pairs(rank), 1e-9 * exact.pairs(rank)) << name;
  }
}

// --- refusals ------------------------------------------------------------------------------------

std::string refusal(const Cluster& cluster, const RingOptions& options) {
  try {
    (void)simulate(options, cluster);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Simulate, RefusesWhatCannotBeInWords) {
  const RingOptions options = dense_ring(2, Schedule::ring);
  const auto refused = [&](const auto& change) {
    Cluster cluster = one_second_cluster(1);
    change(cluster);
    return refusal(cluster, options);
  };
  EXPECT_EQ(refused([](Cluster&) {}), "accepted");
  EXPECT_EQ(refused([](Cluster& c) { c.forward_flops_per_second = 0; }),
            "cluster 'by hand': forward_flops_per_second is 0, expected a number above 0");
  EXPECT_EQ(refused([](Cluster& c) { c.between.bytes_per_second = -1; }),
            "cluster 'by hand': between.bytes_per_second is -1, expected a number of 0 or more");
  EXPECT_NE(refused([](Cluster& c) { c.ranks_per_host = 0; }).find("ranks_per_host is 0"),
            std::string::npos);
  EXPECT_NE(refused([](Cluster& c) { c.ranks_per_processor = 2; }).find("a divisor of the 1 ranks"),
            std::string::npos);
  EXPECT_NE(refused([](Cluster& c) { c.ports_per_host = 2; }).find("at most the 1 ranks"),
            std::string::npos);
  RingOptions wide = options;
  wide.head_dim = 513;
  EXPECT_NE(refusal(one_second_cluster(1), wide).find("head_dim"), std::string::npos);
  EXPECT_THROW((void)cluster_preset("cray-1"), ConfigError);
}

TEST(Simulate, PresetsAreClusters) {
  for (const std::string& name : cluster_preset_names()) {
    const Cluster cluster = cluster_preset(name);
    EXPECT_EQ(cluster.name, name);
    EXPECT_NO_THROW(cluster.validate());
    EXPECT_NE(cluster.source.find("data sheets"), std::string::npos);
  }
}

}  // namespace
}  // namespace annulus
