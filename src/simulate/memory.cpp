#include "simulate/memory.h"

#include <algorithm>
#include <cstddef>

#include "kernels/backend.h"
#include "plan/traffic.h"

namespace annulus::simulation {
namespace {

// Steps alternate between two slots, for messages that leave the rank (gradients) or arrive at it.
double slot_bytes(const MessageTable& table, int rank, bool leaving) {
  double slots[2] = {0, 0};
  for (int step = 1; step <= table.steps(); ++step) {
    const double bytes = leaving ? table.sent(rank, step) : table.received(rank, step);
    slots[step % 2] = std::max(slots[step % 2], bytes);
  }
  return slots[0] + slots[1];
}

// A ring receives all gradients of a step together, a gather two messages at a time.
double inbox_bytes(const MessageTable& table, int rank, Schedule schedule) {
  double most = 0;
  for (int step = 1; step <= table.steps(); ++step) {
    if (schedule == Schedule::ring) {
      most = std::max(most, table.received(rank, step));
      continue;
    }
    for (const std::uint32_t i : table.incoming(rank, step))
      most = std::max(most, 2 * table.all()[i].bytes);
  }
  return most;
}

// Of one rank.
struct Tokens {
  double queries;
  double keys;
};

double state_bytes(const RingOptions& options, const Tokens& tokens) {
  Computation computation;
  computation.pattern = &options.pattern;
  computation.mix_gradient = options.mix_gradient;
  const auto batch = static_cast<double>(options.batch);
  const double query_rows = batch * tokens.queries * options.pattern.heads;
  const double key_rows = batch * tokens.keys * 2.0 * options.kv_heads;
  const double sums = query_rows + (options.backward ? key_rows : 0.0);
  double bytes = options.dtype == DType::f32 ? 0.0 : sums * options.head_dim * 4;
  if (options.backward) bytes += query_rows * 4 * computation.statistics_width();
  return bytes;
}

double tensor_bytes(const RingOptions& options, const Tokens& tokens) {
  const auto batch = static_cast<double>(options.batch);
  const double query_rows = batch * tokens.queries * options.pattern.heads;
  const double key_rows = batch * tokens.keys * options.kv_heads;
  const double passes = options.backward ? 2.0 : 1.0;
  return 2.0 * (query_rows + key_rows) * options.head_dim *
             static_cast<double>(size_of(options.dtype)) * passes +
         query_rows * 4;
}

}  // namespace

std::vector<double> outbox_bytes(const Plan& plan, std::int64_t row_bytes) {
  std::vector<double> bytes(static_cast<std::size_t>(plan.ranks()), 0.0);
  for (const Flow& flow : traffic_of(plan).flows()) {
    bytes[static_cast<std::size_t>(flow.owner)] +=
        static_cast<double>(flow.unit_rows) * static_cast<double>(row_bytes);
  }
  return bytes;
}

MemoryForecast memory_forecast(const RingOptions& options, const ring::Plans& plans,
                               const Tables& tables) {
  const auto outbox = [&](const Plan& plan, Travel travel) {
    return outbox_bytes(plan, ring::row_bytes(options, travel, false).there);
  };
  const std::vector<double> keys = outbox(*plans.keys, Travel::keys);
  const std::vector<double> queries =
      tables.queries != nullptr ? outbox(*plans.queries, Travel::queries) : std::vector<double>();
  MemoryForecast most;
  for (int rank = 0; rank < options.placement.ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const Tokens tokens{static_cast<double>(options.placement.local_tokens(rank)),
                        static_cast<double>(options.keys().local_tokens(rank))};
    double communication = keys[at] + slot_bytes(*tables.keys, rank, false);
    if (tables.queries != nullptr)
      communication += queries[at] + slot_bytes(*tables.queries, rank, false);
    if (tables.returns != nullptr) {
      communication += slot_bytes(*tables.returns, rank, true) +
                       inbox_bytes(*tables.returns, rank, plans.schedule);
    }
    const MemoryForecast mine{rank, static_cast<std::int64_t>(tensor_bytes(options, tokens)),
                              static_cast<std::int64_t>(state_bytes(options, tokens)),
                              static_cast<std::int64_t>(communication)};
    if (rank == 0 || mine.total() > most.total()) most = mine;
  }
  return most;
}

}  // namespace annulus::simulation
