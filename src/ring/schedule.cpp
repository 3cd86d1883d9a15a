#include "ring/schedule.h"

#include <algorithm>
#include <span>
#include <vector>

#include "plan/pair_counts.h"
#include "plan/traffic.h"

namespace annulus::ring {

double predicted_seconds(const Plan& plan, Schedule schedule, std::int64_t row_bytes, int head_dim,
                         std::int64_t batch, const Rates& rates) {
  const int steps = traffic_of(plan).steps(schedule);
  std::vector<double> share(static_cast<std::size_t>(plan.ranks()));  // of compute, per step
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const double pairs = shard_pairs(plan.pattern(), plan.query_placement(), plan.key_placement(),
                                     rank, Travel::keys);
    const double compute =
        pairs * 4.0 * head_dim * static_cast<double>(batch) / rates.flops_per_second;
    share[static_cast<std::size_t>(rank)] = compute / (steps + 1);
  }
  std::vector<double> seconds = share;
  traffic_of(plan).for_each_step(schedule, [&](std::span<const std::int64_t> received, auto) {
    for (std::size_t i = 0; i < seconds.size(); ++i) {
      const double transfer = static_cast<double>(received[i] * row_bytes) / rates.bytes_per_second;
      seconds[i] += std::max(0.0, transfer - share[i]) + share[i];
    }
  });
  return *std::max_element(seconds.begin(), seconds.end());
}

Schedule choose_schedule(const Plan& plan, const RingOptions& options, std::int64_t row_bytes) {
  if (options.placement.tokens() < options.min_tokens_for_ring) return Schedule::gather;
  bool fits = true;
  traffic_of(plan).for_each_step(
      Schedule::gather, [&](std::span<const std::int64_t> received, auto) {
        const std::int64_t most = *std::max_element(received.begin(), received.end());
        fits = most * row_bytes <= options.limits.communication_bytes;
      });
  if (!fits) return Schedule::ring;
  const auto predicted = [&](Schedule schedule) {
    return predicted_seconds(plan, schedule, row_bytes, options.head_dim, options.batch,
                             options.rates);
  };
  return predicted(Schedule::gather) < 0.99 * predicted(Schedule::ring) ? Schedule::gather
                                                                        : Schedule::ring;
}

}  // namespace annulus::ring
