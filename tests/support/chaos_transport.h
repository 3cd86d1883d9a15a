#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "annulus/transport.h"

namespace annulus::test {

struct ChaosOptions {
  std::uint64_t seed = 1;  // the order of events also depends on the scheduler
  std::chrono::microseconds longest_delay{100};  // of a post or a completion
  // This rank's link is cut when it would post its message number tear_at (from 0). That message
  // and all later ones fail here and reach no rank. An abort may still reach them.
  int torn_rank = -1;
  int tear_at = 0;
  bool abort_gets_out = false;
};

// The worst transport that the contract allows: it posts the messages of a batch one by one, late,
// and in any order except that of messages with the same peer and tag; completions are late, too.
// Owns the transports that it wraps.
[[nodiscard]] std::vector<std::unique_ptr<Transport>> make_chaos_ring(
    std::vector<std::unique_ptr<Transport>> inner, const ChaosOptions& options);

}  // namespace annulus::test
