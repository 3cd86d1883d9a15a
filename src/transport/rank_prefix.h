#pragma once

#include <string>

namespace annulus {

// "[rank 3/8] ", the start of messages about one rank of a ring.
[[nodiscard]] inline std::string rank_prefix(int rank, int size) {
  return "[rank " + std::to_string(rank) + "/" + std::to_string(size) + "] ";
}

}  // namespace annulus
