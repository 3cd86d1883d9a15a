#include "plan/traffic.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace annulus {

Traffic::Traffic(RankSetList sets, std::vector<Flow> flows, std::int64_t parcels)
    : sets_(std::move(sets)), flows_(std::move(flows)), parcels_(parcels) {
  for (const Flow& flow : flows_) longest_ = std::max(longest_, sets_.count(flow.rank_set) - 1);
  // One step has one receiver per flow either way.
  downwards_ = longest_ > 1 && lockstep_rows(true) < lockstep_rows(false);
}

std::int64_t Traffic::total_unit_rows() const {
  std::int64_t rows = 0;
  for (const Flow& flow : flows_) rows += flow.unit_rows * (sets_.count(flow.rank_set) - 1);
  return rows;
}

int Traffic::steps(Schedule schedule) const {
  return schedule == Schedule::ring ? longest_ : std::min(longest_, 1);
}

void Traffic::for_each_ring_step(bool downwards, Visit visit) const {
  struct Traveller {
    int rank;  // where it is
    const Flow* flow;
  };
  std::vector<Traveller> travellers;
  travellers.reserve(flows_.size());
  for (const Flow& flow : flows_) travellers.push_back({flow.owner, &flow});
  std::vector<std::int64_t> received(static_cast<std::size_t>(sets_.ranks()));
  std::vector<std::int64_t> sent(received.size());
  for (int step = 1; step <= longest_; ++step) {
    std::fill(received.begin(), received.end(), 0);
    std::fill(sent.begin(), sent.end(), 0);
    std::size_t kept = 0;
    for (const Traveller& traveller : travellers) {
      const Flow& flow = *traveller.flow;
      const int next = downwards ? sets_.previous(flow.rank_set, traveller.rank)
                                 : sets_.next(flow.rank_set, traveller.rank);
      if (next == flow.owner) continue;  // once round
      sent[static_cast<std::size_t>(traveller.rank)] += flow.unit_rows;
      received[static_cast<std::size_t>(next)] += flow.unit_rows;
      travellers[kept++] = {next, &flow};
    }
    travellers.resize(kept);
    visit(received, sent);
  }
}

void Traffic::for_each_step(Schedule schedule, Visit visit) const {
  if (schedule == Schedule::ring) {
    for_each_ring_step(downwards_, visit);
    return;
  }
  if (longest_ == 0) return;
  std::vector<std::int64_t> received(static_cast<std::size_t>(sets_.ranks()), 0);
  std::vector<std::int64_t> sent(received.size(), 0);
  for (const Flow& flow : flows_) {
    for (int rank = sets_.next(flow.rank_set, flow.owner); rank != flow.owner;
         rank = sets_.next(flow.rank_set, rank)) {
      received[static_cast<std::size_t>(rank)] += flow.unit_rows;
      sent[static_cast<std::size_t>(flow.owner)] += flow.unit_rows;
    }
  }
  visit(received, sent);
}

// What a ring in lockstep waits for: in each step the rank that gets most.
std::int64_t Traffic::lockstep_rows(bool downwards) const {
  std::int64_t sum = 0;
  for_each_ring_step(downwards, [&](std::span<const std::int64_t> received, auto) {
    sum += *std::max_element(received.begin(), received.end());
  });
  return sum;
}

}  // namespace annulus
