#pragma once

#include <string>

#include "annulus/ring_attention.h"

namespace annulus::ring {

// Everything that makes two executors differ, byte by byte: equal keys mean equal executors.
[[nodiscard]] std::string options_key(const RingOptions& options);

}  // namespace annulus::ring
