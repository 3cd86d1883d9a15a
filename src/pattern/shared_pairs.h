#pragma once

#include <cstdint>
#include <vector>

#include "annulus/pattern.h"

namespace annulus {

// Rows of a coarser branch, counted as rows of a finer one: those whose index within the segment is
// `phase` modulo `stride`.
struct Repeat {
  std::int32_t stride = 1;
  std::int32_t phase = 0;

  [[nodiscard]] bool contains(std::int32_t index) const {
    const bool power_of_two = (stride & (stride - 1)) == 0;  // a division costs as much as a row
    return (power_of_two ? index & (stride - 1) : index % stride) == phase;
  }
  bool operator==(const Repeat&) const = default;
};

// A key that several branches let a query see counts that often, but its score is the same every
// time. So the finest of these branches, the host, computes the pair once for all of them and
// weighs it by their number; the others leave it out. LongNet's branches overlap enough to save a
// fifth of all products (segments 2,048 to 32,768, dilations 1 to 16, 8 heads).
struct PairSharing {
  int host = -1;  // the branch that computes this one's pairs inside each of its own segments
  // Rows of this branch per segment of the host: pairs whose indices agree when divided by it are
  // the host's. 0: no host.
  std::int64_t host_rows = 0;
  // Branches that this one is host to, directly or through other guests, as rows of this one: a
  // pair counts once more for each that contains both rows.
  std::vector<Repeat> repeats;

  bool operator==(const PairSharing&) const = default;
};

// Kernels keep a row of weights for every subset of repeats.
inline constexpr std::size_t kMaxRepeats = 4;

// What the rules of sharing depend on besides the pattern's branches.
struct PairSpace {
  std::int64_t tokens = 0;  // of either side
  bool same_sides = true;   // queries and keys are the same tokens, placed alike
};

// Which branch computes what, for one query head; one entry per branch. A pure function of its
// arguments: the ranks of a ring need not agree on it. Holds for every band, since all branches
// have the same one. Shares nothing if the sides differ.
[[nodiscard]] std::vector<PairSharing> share_pairs(const Pattern& pattern, const PairSpace& space,
                                                   int head);

}  // namespace annulus
