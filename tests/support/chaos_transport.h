#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "annulus/transport.h"

namespace annulus::test {

struct ChaosOptions {
  std::uint64_t seed = 1;  // what happens in which order depends on the scheduler, too
  std::chrono::microseconds longest_delay{100};  // of a post or a completion
  // This rank's link is cut when it would post its tear_at-th message (from 0): that one and all
  // later ones fail here and reach nobody. Whether its abort still does is another matter.
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
