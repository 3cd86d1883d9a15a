#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "annulus/plan.h"
#include "core/function_ref.h"
#include "plan/rank_sets.h"

namespace annulus {

// Parcels of one owner, of all classes, that the same ranks need.
struct Flow {
  int owner = 0;
  int rank_set = 0;  // the ranks that need the rows, and the owner
  std::int64_t unit_rows = 0;
};

// How much every rank receives and sends in each step. Decisions that all ranks must make alike use
// it. It stores counts, not rows, so it is small: a few flows per rank.
class Traffic {
 public:
  // `parcels`: their number on all ranks.
  Traffic(RankSetList sets, std::vector<Flow> flows, std::int64_t parcels);

  [[nodiscard]] const RankSetList& rank_sets() const { return sets_; }
  [[nodiscard]] const std::vector<Flow>& flows() const { return flows_; }
  [[nodiscard]] std::int64_t parcels() const { return parcels_; }
  // Sum over flows of rows x units x visits.
  [[nodiscard]] std::int64_t total_unit_rows() const;
  [[nodiscard]] int steps(Schedule schedule) const;
  // A ring visits ranks in cyclic order from the owner: upwards unless downwards is better. With a
  // causal mask, some rows are needed by ranks below their owner (late keys of zigzag shards, all
  // queries). Upwards, they would all go to rank 0 first: 8 shards in one step of a zigzag ring of
  // 16, instead of one.
  [[nodiscard]] bool downwards() const { return downwards_; }

  // What a rank receives and sends over all steps of a schedule, and receives in its largest step.
  struct RankSum {
    std::int64_t received = 0;
    std::int64_t sent = 0;
    std::int64_t largest_step = 0;
  };
  [[nodiscard]] std::vector<RankSum> rank_sums(Schedule schedule) const;

  // One flow on its way in one step.
  struct FlowHop {
    int from = 0;
    int to = 0;
    int owner = 0;
    std::int64_t unit_rows = 0;
  };
  // visit(hops) for steps 1, 2, ...: all hops of that step, in no particular order.
  using VisitHops = FunctionRef<void(std::span<const FlowHop>)>;
  void for_each_hop_list(Schedule schedule, VisitHops visit) const;

  // visit(received, sent) for steps 1, 2, ...: rows x units of every rank in that step.
  using Visit = FunctionRef<void(std::span<const std::int64_t>, std::span<const std::int64_t>)>;
  void for_each_step(Schedule schedule, Visit visit) const;

 private:
  void for_each_ring_hop_list(bool downwards, VisitHops visit) const;
  void for_each_ring_step(bool downwards, Visit visit) const;
  // Sums of a ring that runs in one direction. `lockstep_rows` adds up, over the steps, the largest
  // amount that a rank receives.
  struct RingSums {
    std::vector<RankSum> ranks;
    std::int64_t lockstep_rows = 0;
  };
  [[nodiscard]] RingSums ring_sums(bool downwards) const;

  RankSetList sets_;
  std::vector<Flow> flows_;
  std::int64_t parcels_;
  int longest_ = 0;  // visits of a flow
  bool downwards_ = false;
  std::vector<RankSum> ring_ranks_;  // of the chosen direction
};

[[nodiscard]] const Traffic& traffic_of(const Plan& plan);

}  // namespace annulus
