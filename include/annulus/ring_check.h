#pragma once

#include <cstddef>
#include <string>

#include "annulus/transport.h"

namespace annulus {

// What one rank found out about its links: `forward` is from the previous rank to this one,
// `backward` from the next.
struct RingCheck {
  bool forward_ok = false;
  bool backward_ok = false;
  std::string detail;  // one line per direction, for people
};

// Collective. Passes a block stamped with the sender's rank once around the ring in each direction
// and verifies every byte of the neighbour's block. A TransportError becomes a direction that is
// not ok, with the message in `detail`: the check reports and does not throw, but the transport is
// dead then as after any TransportError. ConfigError while somebody else uses the transport.
[[nodiscard]] RingCheck check_ring(Transport& transport, std::size_t bytes = 4096);

}  // namespace annulus
