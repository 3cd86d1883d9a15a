#pragma once

#include <cstddef>
#include <string>

#include "annulus/transport.h"

namespace annulus {

// This rank's result: `forward` is the link from the previous rank to this one, `backward` the one
// from the next.
struct RingCheck {
  bool forward_ok = false;
  bool backward_ok = false;
  std::string detail;  // one line per direction
};

// Collective. Passes a block stamped with the sender's rank once around the ring in each direction
// and verifies every byte of the neighbour's block. A TransportError is not thrown but makes a
// direction not ok, with the message in `detail`. The transport is dead then, as after any
// TransportError. ConfigError if the transport is in use.
[[nodiscard]] RingCheck check_ring(Transport& transport, std::size_t bytes = 4096);

}  // namespace annulus
