#include "ring/schedule.h"

#include <algorithm>

namespace annulus::ring {

double predicted_seconds(const Plan& plan, std::int64_t row_bytes, int head_dim, std::int64_t batch,
                         const Rates& rates) {
  double slowest = 0;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const double compute =
        plan.pairs(rank) * 4.0 * head_dim * static_cast<double>(batch) / rates.flops_per_second;
    const double share = compute / (plan.steps() + 1);
    double seconds = share;
    for (int step = 1; step <= plan.steps(); ++step) {
      const double transfer =
          static_cast<double>(plan.unit_rows(plan.incoming(rank, step)) * row_bytes) /
          rates.bytes_per_second;
      seconds += std::max(0.0, transfer - share) + share;
    }
    slowest = std::max(slowest, seconds);
  }
  return slowest;
}

Schedule choose_schedule(const Plan& ring, const Plan& gather, const RingOptions& options,
                         std::int64_t row_bytes) {
  if (options.placement.tokens() < options.min_tokens_for_ring) return Schedule::gather;
  for (int rank = 0; rank < gather.ranks(); ++rank) {
    if (gather.received_unit_rows(rank) * row_bytes > options.limits.communication_bytes)
      return Schedule::ring;
  }
  const double by_ring =
      predicted_seconds(ring, row_bytes, options.head_dim, options.batch, options.rates);
  const double by_gather =
      predicted_seconds(gather, row_bytes, options.head_dim, options.batch, options.rates);
  return by_gather < 0.99 * by_ring ? Schedule::gather : Schedule::ring;
}

}  // namespace annulus::ring
