#pragma once

#include <cstdint>

#include "annulus/mask.h"

// What is asked of a mask about whole stretches of rows. Every place that tells masks apart is a
// switch over the kinds without a default, so that the compiler names it when there is a new kind,
// and ends in refuse_mask(), so that a build which only warns refuses it in words.
namespace annulus {

// ConfigError: `where` knows neither what a full mask nor what an unshifted causal one lets
// through.
[[noreturn]] void refuse_mask(const char* where, const Mask& mask);

// Positions first..last, both included.
struct Stretch {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

// No query of a stretch sees any key of another. May say false where it is true (stretches have
// gaps).
[[nodiscard]] inline bool hides_all(const Mask& mask, const Stretch& queries, const Stretch& keys) {
  switch (mask.kind) {
    case Mask::full:
      return false;
    case Mask::causal:
      return keys.first > queries.last + mask.shift;
  }
  refuse_mask("hides_all", mask);
}

// Every query of a stretch sees every key of another.
[[nodiscard]] inline bool shows_all(const Mask& mask, const Stretch& queries, const Stretch& keys) {
  switch (mask.kind) {
    case Mask::full:
      return true;
    case Mask::causal:
      return keys.last <= queries.first + mask.shift;
  }
  refuse_mask("shows_all", mask);
}

}  // namespace annulus
