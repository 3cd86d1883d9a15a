#include "annulus/simulate.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "annulus/error.h"
#include "kernels/backend.h"
#include "ring/agreement.h"
#include "ring/option_check.h"
#include "ring/plans.h"
#include "simulate/memory.h"
#include "simulate/messages.h"
#include "simulate/replay.h"
#include "simulate/step_work.h"

namespace annulus {
namespace {

using simulation::Journey;
using simulation::MessageTable;
using simulation::Replay;
using simulation::StepWork;

// Floating-point operations per pair and head element: 2 for each product.
constexpr double kForward = 4;
constexpr double kBackward = 10;
constexpr double kQueryGradient = 6;  // reproducible: scores twice, once for dQ
constexpr double kKeyGradient = 8;    // and once for dK and dV

// Bytes read and written per byte of rows.
constexpr double kPacking = 2;
constexpr double kClearing = 1;
constexpr double kAdding = 3;

// Ranks agree before every call: one message each way per doubling of the number of ranks.
double agreement_seconds(const Cluster& cluster, int ranks) {
  const Wire& wire = ranks > cluster.ranks_per_host ? cluster.between : cluster.inside;
  double seconds = 0;
  for (int reached = 1; reached < ranks; reached *= 2) seconds += wire.latency_seconds;
  return seconds;
}

// How often the pairs of the pattern are computed.
std::int64_t times(const RingOptions& options) { return options.pattern.times_in(options.batch); }

struct Work {
  const StepWork* pairs = nullptr;
  double operations = 0;  // per pair and element of a head
  double flops_per_second = 0;
};

class Simulator {
 public:
  Simulator(const RingOptions& options, const Cluster& cluster)
      : options_(options), cluster_(cluster), ranks_(options.placement.ranks()) {}

  [[nodiscard]] Journey journey(const Plan& plan, const MessageTable& rows, Travel travel,
                                const Work& work) const {
    Journey journey;
    journey.rows = &rows;
    journey.compute_last = options_.reproducible;
    journey.blocking = options_.blocking;
    const double copy =
        cluster_.copy_bytes_per_second > 0 ? 1.0 / cluster_.copy_bytes_per_second : 0.0;
    journey.pack = simulation::outbox_bytes(plan, ring::row_bytes(options_, travel, false).there);
    for (double& rank : journey.pack) rank *= kPacking * copy;
    journey.clear_per_byte = kClearing * copy;
    journey.add_per_byte = kAdding * copy;
    const double seconds_per_pair = work.operations * options_.head_dim *
                                    static_cast<double>(times(options_)) / work.flops_per_second;
    const auto stage = [&](double pairs) {
      return pairs > 0 ? std::max(cluster_.stage_seconds, pairs * seconds_per_pair) : 0.0;
    };
    for (int rank = 0; rank < ranks_; ++rank) {
      if (journey.compute_last) {
        journey.compute.push_back(stage(work.pairs->pairs(rank)));
        continue;
      }
      for (int step = 0; step <= plan.steps(); ++step)
        journey.compute.push_back(stage(work.pairs->pairs(rank, step)));
    }
    return journey;
  }

  [[nodiscard]] PassForecast pass(std::vector<Journey> journeys) const {
    const auto run_on = [&](const Cluster& cluster) {
      Replay replay(cluster, ranks_, agreement_seconds(cluster, ranks_));
      for (const Journey& journey : journeys) replay.run(journey);
      return replay;
    };
    PassForecast out;
    const Replay whole = run_on(cluster_);
    out.seconds = whole.seconds();
    out.waiting = out.seconds > 0 ? whole.waiting() / (out.seconds * ranks_) : 0.0;
    const Replay::Busy busiest = whole.busiest_link();
    out.busiest_link = busiest.what;
    out.busiest_link_seconds = busiest.seconds;
    double bytes = static_cast<double>(ranks_) * static_cast<double>(ring::agreement_bytes(ranks_));
    for (const Journey& journey : journeys) {
      bytes += journey.rows->total_bytes();
      if (journey.returns != nullptr) bytes += journey.returns->total_bytes();
    }
    constexpr double kMostBytes = 0x1p62;
    if (bytes > kMostBytes) {
      throw ConfigError(
          "simulate: more bytes would travel than can be counted: choose fewer tokens, heads or "
          "sequences");
    }
    out.bytes = static_cast<std::int64_t>(bytes);

    Cluster no_links = cluster_;
    for (Wire* wire : {&no_links.inside, &no_links.between})
      wire->bytes_per_second = wire->latency_seconds = 0;
    out.compute_seconds = run_on(no_links).seconds();
    for (Journey& journey : journeys) {
      for (std::vector<double>* part : {&journey.pack, &journey.compute})
        std::fill(part->begin(), part->end(), 0.0);
      journey.clear_per_byte = journey.add_per_byte = 0;
    }
    out.transfer_seconds = run_on(cluster_).seconds();
    const double shorter = std::min(out.compute_seconds, out.transfer_seconds);
    const double hidden = out.compute_seconds + out.transfer_seconds - out.seconds;
    out.overlap = shorter > 0 ? std::clamp(hidden / shorter, 0.0, 1.0) : 1.0;
    return out;
  }

 private:
  const RingOptions& options_;
  const Cluster& cluster_;
  int ranks_;
};

}  // namespace

Forecast simulate(const RingOptions& options, const Cluster& cluster) {
  cluster.validate();
  ring::check_values(options);
  // Rejects problems that no kernel can compute.
  (void)ring::computation_of(options, *backend_of({}, options.threads), options.placement.tokens(),
                             options.keys().tokens());
  const int ranks = options.placement.ranks();
  // A rank in the middle has a typical number of parcels, under a causal mask, too.
  const ring::Plans plans = ring::make_plans(options, ranks / 2);
  const bool share = options.mix_gradient == MixGradient::full;
  const Simulator simulator(options, cluster);

  Forecast forecast;
  forecast.schedule = plans.schedule;
  forecast.backward_travel = plans.travel;
  forecast.steps = plans.keys->steps();
  const auto table = [&](const Plan& plan, MessageTable::Way way, Travel travel) {
    const ring::RowBytes row = ring::row_bytes(options, travel, true);
    return MessageTable(plan, way, way == MessageTable::Way::there ? row.there : row.back);
  };
  const double all_pairs =
      allowed_pairs(options.pattern, options.placement.tokens(), options.keys().tokens()) *
      static_cast<double>(times(options)) * options.head_dim;
  const auto finish = [&](PassForecast pass, double operations, const StepWork& work) {
    pass.flops = operations * all_pairs;
    pass.computed_flops =
        operations * work.total() * static_cast<double>(times(options)) * options.head_dim;
    return pass;
  };

  const MessageTable keys = table(*plans.keys, MessageTable::Way::there, Travel::keys);
  const StepWork key_work(*plans.keys, share);
  forecast.counted = key_work.counted();
  const Work forward{&key_work, kForward, cluster.forward_flops_per_second};
  forecast.forward =
      finish(simulator.pass({simulator.journey(*plans.keys, keys, Travel::keys, forward)}),
             kForward, key_work);

  std::optional<MessageTable> queries;
  std::optional<MessageTable> returns;
  if (options.backward) {
    std::optional<StepWork> counted_queries;
    const StepWork* query_work = &key_work;
    if (plans.queries != nullptr) {
      queries = table(*plans.queries, MessageTable::Way::there, Travel::queries);
      // With a symmetric band a query meets the keys that its own key is met by.
      const Band band = options.pattern.band();
      if (band.least != -band.most || options.kv_heads != options.pattern.heads)
        query_work = &counted_queries.emplace(*plans.queries, share);
      forecast.counted = forecast.counted && query_work->counted();
    }
    std::vector<Journey> journeys;
    const double rate = cluster.backward_flops_per_second;
    if (options.reproducible) {
      journeys.push_back(
          simulator.journey(*plans.keys, keys, Travel::keys, {&key_work, kQueryGradient, rate}));
      journeys.push_back(simulator.journey(*plans.queries, *queries, Travel::queries,
                                           {query_work, kKeyGradient, rate}));
    } else {
      const bool by_keys = plans.travel == Travel::keys;
      const Plan& plan = by_keys ? *plans.keys : *plans.queries;
      returns = table(plan, MessageTable::Way::back, plans.travel);
      journeys.push_back(simulator.journey(plan, by_keys ? keys : *queries, plans.travel,
                                           {by_keys ? &key_work : query_work, kBackward, rate}));
      journeys.back().returns = &*returns;
      journeys.back().returns_together = plans.schedule == Schedule::ring;
    }
    forecast.backward =
        finish(simulator.pass(std::move(journeys)),
               options.reproducible ? kQueryGradient + kKeyGradient : kBackward, key_work);
  }
  forecast.memory = simulation::memory_forecast(
      options, plans, {&keys, queries ? &*queries : nullptr, returns ? &*returns : nullptr});
  return forecast;
}

}  // namespace annulus
