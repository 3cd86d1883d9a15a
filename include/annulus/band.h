#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace annulus {

// Positions first..last, both included.
struct Stretch {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

// Which keys a query sees: those with least <= key - query <= most. Causal attention, windows and
// their intersections are bands. A tile carries its band: kernels ask the band, never the pattern.
// In the plan a band is in positions; in kernels it is in indices of rows within their segment (see
// `divided_by`).
struct Band {
  // Stands for no limit, with either sign. Small enough for sums with positions.
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / 4;

  std::int64_t least = -kUnlimited;
  std::int64_t most = kUnlimited;

  [[nodiscard]] static constexpr Band causal() { return {-kUnlimited, 0}; }

  [[nodiscard]] bool full() const { return least == -kUnlimited && most == kUnlimited; }
  [[nodiscard]] bool empty() const { return least > most; }
  [[nodiscard]] bool allows(std::int64_t query, std::int64_t key) const {
    return least <= key - query && key - query <= most;
  }
  // Whether no query of a stretch sees any key of another. May be false although no pair is
  // visible, because rows of a stretch have gaps.
  [[nodiscard]] bool hides_all(const Stretch& queries, const Stretch& keys) const {
    return empty() || keys.first - queries.last > most || keys.last - queries.first < least;
  }
  // Whether every query of a stretch sees every key of another.
  [[nodiscard]] bool shows_all(const Stretch& queries, const Stretch& keys) const {
    return keys.last - queries.first <= most && keys.first - queries.last >= least;
  }
  // The key positions that the band allows for any query of a stretch.
  [[nodiscard]] Stretch keys_of(const Stretch& queries) const {
    return {queries.first + least, queries.last + most};
  }
  [[nodiscard]] Stretch queries_of(const Stretch& keys) const {
    return {keys.first - most, keys.last - least};
  }
  // The same band where every key's position is larger by `distance`.
  [[nodiscard]] Band shifted_by(std::int64_t distance) const {
    return {least == -kUnlimited ? least : least + distance,
            most == kUnlimited ? most : most + distance};
  }
  // The same band for rows that are counted in steps of `dilation` positions.
  [[nodiscard]] Band divided_by(std::int64_t dilation) const {
    const auto floor_div = [&](std::int64_t a) {
      return a >= 0 ? a / dilation : -((-a + dilation - 1) / dilation);
    };
    return {least == -kUnlimited ? least : -floor_div(-least),
            most == kUnlimited ? most : floor_div(most)};
  }
  bool operator==(const Band&) const = default;
};

}  // namespace annulus
