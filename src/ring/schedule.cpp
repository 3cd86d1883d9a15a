#include "ring/schedule.h"

#include <algorithm>
#include <span>
#include <vector>

#include "plan/pair_counts.h"
#include "plan/traffic.h"

namespace annulus::ring {
namespace {

// Seconds that each rank computes in one forward.
std::vector<double> compute_seconds(const Plan& plan, const RingOptions& options) {
  const auto times = static_cast<double>(options.pattern.times_in(options.batch));
  std::vector<double> seconds;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const double pairs = shard_pairs(plan.pattern(), plan.query_placement(), plan.key_placement(),
                                     rank, Travel::keys);
    seconds.push_back(pairs * 4.0 * options.head_dim * times / options.rates.flops_per_second);
  }
  return seconds;
}

// Seconds of one forward on the slowest rank. Compute is spread evenly over the steps, and each
// step overlaps with the transfer of the next one.
double predicted_seconds(const Plan& plan, Schedule schedule, std::int64_t row_bytes,
                         std::vector<double> share, const Rates& rates) {
  const int steps = traffic_of(plan).steps(schedule);
  for (double& of_rank : share) of_rank /= steps + 1;
  std::vector<double> seconds = share;
  traffic_of(plan).for_each_step(schedule, [&](std::span<const std::int64_t> received, auto) {
    for (std::size_t i = 0; i < seconds.size(); ++i) {
      const double transfer = static_cast<double>(received[i]) * static_cast<double>(row_bytes) /
                              rates.bytes_per_second;
      seconds[i] += std::max(0.0, transfer - share[i]) + share[i];
    }
  });
  return *std::max_element(seconds.begin(), seconds.end());
}

// Upper bound of the message buffers of a gather, on the rank that needs most: received rows, own
// rows that other ranks need (with a staging copy for every rank that needs a different subset)
// and, if gradients of keys come back, fp32 gradients of received rows and two messages with
// gradients of own rows.
double gather_bytes(const Plan& plan, const RingOptions& options, std::int64_t row_bytes) {
  const Traffic& traffic = traffic_of(plan);
  const auto row = static_cast<double>(row_bytes);
  const bool returns = options.backward && options.backward_travel != BackwardTravel::queries;
  const std::int64_t times = options.pattern.times_in(options.batch);
  const double sums = returns ? 8.0 * options.head_dim * static_cast<double>(times) : 0.0;
  const std::vector<Traffic::RankSum> ranks = traffic.rank_sums(Schedule::gather);
  std::vector<int> flows(ranks.size());
  for (const Flow& flow : traffic.flows()) ++flows[static_cast<std::size_t>(flow.owner)];
  double most = 0.0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::int64_t held = plan.key_placement().local_tokens(static_cast<int>(rank)) *
                              options.kv_heads * options.pattern.counted_entries();
    const auto received = static_cast<double>(ranks[rank].received);
    const auto own = static_cast<double>(std::min(ranks[rank].sent, held));
    const double copied = flows[rank] > 1 ? static_cast<double>(ranks[rank].sent) : 0.0;
    most = std::max(most, row * (received + own + copied) + sums * (received + 2.0 * own));
  }
  return most;
}

}  // namespace

Schedule choose_schedule(const Plan& plan, const RingOptions& options, std::int64_t row_bytes) {
  if (gather_bytes(plan, options, row_bytes) >
      static_cast<double>(options.limits.communication_bytes))
    return Schedule::ring;
  if (std::max(options.placement.tokens(), options.keys().tokens()) < options.min_tokens_for_ring)
    return Schedule::gather;
  const std::vector<double> compute = compute_seconds(plan, options);
  const auto predicted = [&](Schedule schedule) {
    return predicted_seconds(plan, schedule, row_bytes, compute, options.rates);
  };
  return predicted(Schedule::gather) < 0.99 * predicted(Schedule::ring) ? Schedule::gather
                                                                        : Schedule::ring;
}

}  // namespace annulus::ring
