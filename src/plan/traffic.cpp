#include "plan/traffic.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace annulus {

Traffic::Traffic(RankSetList sets, std::vector<Flow> flows, std::int64_t parcels)
    : sets_(std::move(sets)), flows_(std::move(flows)), parcels_(parcels) {
  for (const Flow& flow : flows_) longest_ = std::max(longest_, sets_.count(flow.rank_set) - 1);
  RingSums chosen = ring_sums(false);
  if (longest_ > 1) {  // one step has one receiver per flow either way
    RingSums down = ring_sums(true);
    downwards_ = down.lockstep_rows < chosen.lockstep_rows;
    if (downwards_) chosen = std::move(down);
  }
  ring_ranks_ = std::move(chosen.ranks);
}

std::int64_t Traffic::total_unit_rows() const {
  std::int64_t rows = 0;
  for (const Flow& flow : flows_) rows += flow.unit_rows * (sets_.count(flow.rank_set) - 1);
  return rows;
}

int Traffic::steps(Schedule schedule) const {
  return schedule == Schedule::ring ? longest_ : std::min(longest_, 1);
}

void Traffic::for_each_ring_hop_list(bool downwards, VisitHops visit) const {
  struct Traveller {
    int rank;  // where it is
    const Flow* flow;
  };
  std::vector<Traveller> travellers;
  travellers.reserve(flows_.size());
  for (const Flow& flow : flows_) travellers.push_back({flow.owner, &flow});
  std::vector<FlowHop> hops;
  hops.reserve(flows_.size());
  for (int step = 1; step <= longest_; ++step) {
    hops.clear();
    std::size_t kept = 0;
    for (const Traveller& traveller : travellers) {
      const Flow& flow = *traveller.flow;
      const int next = downwards ? sets_.previous(flow.rank_set, traveller.rank)
                                 : sets_.next(flow.rank_set, traveller.rank);
      if (next == flow.owner) continue;  // back at the owner
      hops.push_back({traveller.rank, next, flow.owner, flow.unit_rows});
      travellers[kept++] = {next, &flow};
    }
    travellers.resize(kept);
    visit(hops);
  }
}

void Traffic::for_each_ring_step(bool downwards, Visit visit) const {
  std::vector<std::int64_t> received(static_cast<std::size_t>(sets_.ranks()));
  std::vector<std::int64_t> sent(received.size());
  for_each_ring_hop_list(downwards, [&](std::span<const FlowHop> hops) {
    std::fill(received.begin(), received.end(), 0);
    std::fill(sent.begin(), sent.end(), 0);
    for (const FlowHop& hop : hops) {
      sent[static_cast<std::size_t>(hop.from)] += hop.unit_rows;
      received[static_cast<std::size_t>(hop.to)] += hop.unit_rows;
    }
    visit(received, sent);
  });
}

void Traffic::for_each_hop_list(Schedule schedule, VisitHops visit) const {
  if (schedule == Schedule::ring) {
    for_each_ring_hop_list(downwards_, visit);
    return;
  }
  if (longest_ == 0) return;
  std::vector<FlowHop> hops;
  for (const Flow& flow : flows_) {
    for (const int rank : sets_.members(flow.rank_set)) {
      if (rank != flow.owner) hops.push_back({flow.owner, rank, flow.owner, flow.unit_rows});
    }
  }
  visit(hops);
}

void Traffic::for_each_step(Schedule schedule, Visit visit) const {
  if (schedule == Schedule::ring) {
    for_each_ring_step(downwards_, visit);
    return;
  }
  if (longest_ == 0) return;
  std::vector<std::int64_t> received(static_cast<std::size_t>(sets_.ranks()), 0);
  std::vector<std::int64_t> sent(received.size(), 0);
  // Every rank in a set receives all flows of the set except its own.
  std::vector<std::int64_t> of_set(static_cast<std::size_t>(sets_.size()), 0);
  for (const Flow& flow : flows_) {
    const auto owner = static_cast<std::size_t>(flow.owner);
    of_set[static_cast<std::size_t>(flow.rank_set)] += flow.unit_rows;
    received[owner] -= flow.unit_rows;
    sent[owner] += flow.unit_rows * (sets_.count(flow.rank_set) - 1);
  }
  for (int set = 0; set < sets_.size(); ++set) {
    for (const int rank : sets_.members(set)) {
      received[static_cast<std::size_t>(rank)] += of_set[static_cast<std::size_t>(set)];
    }
  }
  visit(received, sent);
}

Traffic::RingSums Traffic::ring_sums(bool downwards) const {
  RingSums sums;
  sums.ranks.resize(static_cast<std::size_t>(sets_.ranks()));
  for_each_ring_step(
      downwards, [&](std::span<const std::int64_t> received, std::span<const std::int64_t> sent) {
        std::int64_t most = 0;
        for (std::size_t i = 0; i < received.size(); ++i) {
          RankSum& sum = sums.ranks[i];
          sum.received += received[i];
          sum.sent += sent[i];
          sum.largest_step = std::max(sum.largest_step, received[i]);
          most = std::max(most, received[i]);
        }
        sums.lockstep_rows += most;
      });
  return sums;
}

std::vector<Traffic::RankSum> Traffic::rank_sums(Schedule schedule) const {
  if (schedule == Schedule::ring) return ring_ranks_;
  std::vector<RankSum> sums(static_cast<std::size_t>(sets_.ranks()));
  for_each_step(schedule,
                [&](std::span<const std::int64_t> received, std::span<const std::int64_t> sent) {
                  for (std::size_t i = 0; i < sums.size(); ++i)
                    sums[i] = {received[i], sent[i], received[i]};
                });
  return sums;
}

}  // namespace annulus
