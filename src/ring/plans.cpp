#include "ring/plans.h"

#include "kernels/backend.h"
#include "ring/schedule.h"

namespace annulus::ring {

RowBytes row_bytes(const RingOptions& options, Travel travel, bool gradients) {
  const std::int64_t times = options.pattern.times_in(options.batch);
  const auto row = times * parcel_row_bytes(options.head_dim *
                                            static_cast<std::int64_t>(size_of(options.dtype)));
  const std::int64_t wide = times * parcel_row_bytes(options.head_dim * 4);
  if (travel == Travel::keys) return {2 * row, gradients ? 2 * wide : 0};
  Computation computation;
  computation.pattern = &options.pattern;
  computation.mix_gradient = options.mix_gradient;
  return {2 * row + times * 4 * computation.statistics_width(), wide};
}

Plans make_plans(const RingOptions& options, int rank) {
  const auto plan = [&](Schedule schedule, Travel travel) {
    return std::make_unique<Plan>(PlanOptions{options.pattern, options.placement, options.keys(),
                                              options.kv_heads, schedule, travel},
                                  rank);
  };
  Plans plans;
  plans.schedule = options.reproducible ? Schedule::gather : options.schedule;
  if (plans.schedule != Schedule::automatic) {
    plans.keys = plan(plans.schedule, Travel::keys);
  } else {
    plans.keys = plan(Schedule::ring, Travel::keys);
    plans.schedule =
        choose_schedule(*plans.keys, options, row_bytes(options, Travel::keys, false).there);
    if (plans.schedule == Schedule::gather)
      plans.keys = std::make_unique<Plan>(plans.keys->with_schedule(plans.schedule));
  }
  if (!options.backward) return plans;
  if (options.reproducible) {
    plans.queries = plan(plans.schedule, Travel::queries);
    return plans;
  }
  if (options.backward_travel == BackwardTravel::keys || options.placement.ranks() == 1)
    return plans;
  plans.queries = plan(plans.schedule, Travel::queries);
  const auto bytes = [&](const Plan& side, Travel travel) {
    const RowBytes row = row_bytes(options, travel, true);
    return static_cast<double>(side.total_unit_rows()) * static_cast<double>(row.there + row.back);
  };
  if (options.backward_travel == BackwardTravel::queries ||
      bytes(*plans.queries, Travel::queries) < bytes(*plans.keys, Travel::keys)) {
    plans.travel = Travel::queries;
  } else {
    plans.queries.reset();
  }
  return plans;
}

}  // namespace annulus::ring
