#pragma once

#include <vector>

#include "annulus/simulate.h"
#include "ring/plans.h"
#include "simulate/messages.h"

namespace annulus::simulation {

// Bytes of the own rows that leave their owner, by rank.
[[nodiscard]] std::vector<double> outbox_bytes(const Plan& plan, std::int64_t row_bytes);

// What travels in the passes of an executor; null: it does not.
struct Tables {
  const MessageTable* keys = nullptr;
  const MessageTable* queries = nullptr;
  const MessageTable* returns = nullptr;
};

// docs/operations.md, "Memory of one rank", for the rank that needs most.
[[nodiscard]] MemoryForecast memory_forecast(const RingOptions& options, const ring::Plans& plans,
                                             const Tables& tables);

}  // namespace annulus::simulation
