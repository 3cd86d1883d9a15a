#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "annulus/transport.h"

namespace annulus {

struct InProcessOptions {
  std::chrono::milliseconds deadline{60'000};
  double bytes_per_second =
      0;  // above 0: every rank's outgoing link is limited to this rate, to study overlap
};

// A ring whose ranks are threads of this process: element r is for the thread of rank r. A message
// is one copy from the sender's buffer into the receiver's, made by the side that comes second.
[[nodiscard]] std::vector<std::unique_ptr<Transport>> make_in_process_ring(
    int ranks, const InProcessOptions& options = {});

// Runs body(transport) on one thread per rank (a single rank runs on the caller's thread) and joins
// them. If a rank throws, the transport is aborted so that no other rank hangs, and the first
// failure (the root cause, not the echoes on other ranks) is rethrown here. A rank that returns has
// left the ring: ranks that still wait for it fail at once.
void run_in_process(int ranks, const std::function<void(Transport&)>& body,
                    const InProcessOptions& options = {});

// The same on an existing ring, which can be used again unless a rank threw.
void run_in_process(std::span<const std::unique_ptr<Transport>> ring,
                    const std::function<void(Transport&)>& body);

}  // namespace annulus
