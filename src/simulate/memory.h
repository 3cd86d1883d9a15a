#pragma once

#include <vector>

#include "annulus/simulate.h"
#include "ring/plans.h"
#include "simulate/messages.h"

namespace annulus::simulation {

// Bytes of each rank's own rows that other ranks need, by rank.
[[nodiscard]] std::vector<double> outbox_bytes(const Plan& plan, std::int64_t row_bytes);

// The messages of an executor's passes; null if there are none of that kind.
struct Tables {
  const MessageTable* keys = nullptr;
  const MessageTable* queries = nullptr;
  const MessageTable* returns = nullptr;
};

// The memory of the rank that needs most, as in "Memory of one rank" in docs/operations.md.
[[nodiscard]] MemoryForecast memory_forecast(const RingOptions& options, const ring::Plans& plans,
                                             const Tables& tables);

}  // namespace annulus::simulation
