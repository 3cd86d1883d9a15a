#pragma once

#include <cstdint>
#include <vector>

#include "annulus/pattern.h"

namespace annulus {

// Rows of a coarser branch, in indices of a finer one: those whose index within the segment is
// `phase` modulo `stride`.
struct Repeat {
  std::int32_t stride = 1;
  std::int32_t phase = 0;

  [[nodiscard]] bool contains(std::int32_t index) const {
    const bool power_of_two = (stride & (stride - 1)) == 0;  // avoids a division, which is slow
    return (power_of_two ? index & (stride - 1) : index % stride) == phase;
  }
  bool operator==(const Repeat&) const = default;
};

// A key that a query sees in several branches counts once per branch, but its score is the same in
// all of them. So the finest of these branches, the host, computes the pair once and multiplies its
// weight by their number; the others, its guests, skip it. LongNet's branches overlap enough to
// save a fifth of all products (segments 2,048 to 32,768, dilations 1 to 16, 8 heads).
struct PairSharing {
  int host = -1;  // the branch that computes this one's pairs inside each of its own segments
  // Rows of this branch per segment of the host: the host computes pairs whose indices, divided by
  // it, are equal. 0: no host.
  std::int64_t host_rows = 0;
  // The guests of this branch, directly or through other guests, as rows of this branch. A pair
  // counts once more for each that contains both rows.
  std::vector<Repeat> repeats;

  bool operator==(const PairSharing&) const = default;
};

// Kernels keep a row of weights for every subset of repeats.
inline constexpr std::size_t kMaxRepeats = 4;

// What sharing depends on besides the pattern's branches.
struct PairSpace {
  std::int64_t tokens = 0;  // of either side
  bool same_sides = true;   // queries and keys are the same tokens in the same placement
};

// Which branch computes which pairs, for one query head; one entry per branch. A pure function of
// its arguments, so the ranks of a ring need not agree on it. Valid for every band, because all
// branches have the same one. Shares nothing if the sides differ.
[[nodiscard]] std::vector<PairSharing> share_pairs(const Pattern& pattern, const PairSpace& space,
                                                   int head);

}  // namespace annulus
