#pragma once

#include <cstdint>

namespace annulus {

// Which rows of a tile see each other, as a function of their global positions. A value that a tile
// carries: whoever computes it asks the tile, never the pattern.
struct Mask {
  enum Kind : std::uint8_t {
    full,    // every query sees every key
    causal,  // key position <= query position + shift
  };
  Kind kind = full;
  std::int64_t shift = 0;

  [[nodiscard]] bool allows(std::int64_t query, std::int64_t key) const {
    switch (kind) {
      case full:
        return true;
      case causal:
        return key <= query + shift;
    }
    return false;
  }
  bool operator==(const Mask&) const = default;
};

}  // namespace annulus
