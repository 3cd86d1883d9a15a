#include "annulus/pattern.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

#include "annulus/error.h"
#include "pattern/band_pairs.h"

namespace annulus {
namespace {

// Of one pattern with all offsets: plans and kernels treat each branch by itself.
constexpr std::int64_t kMostBranches = 1024;

void require_at_least_one(const std::string& where, const std::string& what, std::int64_t found) {
  if (found >= 1) return;
  throw ConfigError(where + ": " + what + " is " + std::to_string(found) + ", expected at least 1");
}

// Checks the arguments of a preset before it computes offsets with them; Pattern::validate would
// come too late for a dilation of zero.
void check_preset(const std::string& where, int heads, std::span<const std::int64_t> segments,
                  std::span<const std::int64_t> dilations) {
  require_at_least_one(where, "heads", heads);
  if (segments.size() != dilations.size()) {
    throw ConfigError(where + ": found " + std::to_string(segments.size()) + " segments and " +
                      std::to_string(dilations.size()) +
                      " dilations, expected one of each per branch");
  }
  if (segments.empty()) {
    throw ConfigError(where + ": segments and dilations are empty, expected at least one branch");
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    require_at_least_one(where, "segments" + index, segments[i]);
    require_at_least_one(where, "dilations" + index, dilations[i]);
  }
}

Branch make_branch(int heads, std::int64_t segment_length, std::int64_t dilation) {
  Branch branch;
  branch.segment_length = segment_length;
  branch.dilation = dilation;
  branch.offset.assign(static_cast<std::size_t>(heads), -1);
  return branch;
}

// Pairs inside one segment of `length` tokens, whose selected positions are offset,
// offset + dilation, ...
double pairs_in_segment(std::int64_t length, std::int64_t dilation, std::int64_t offset,
                        const Band& band) {
  if (offset >= length) return 0.0;
  return band_pairs(band.divided_by(dilation), (length - 1 - offset) / dilation + 1);
}

}  // namespace

double band_pairs(const Band& band, std::int64_t rows) {
  const auto n = static_cast<double>(rows);
  // Pairs with key - query <= difference.
  const auto up_to = [&](std::int64_t difference) {
    // Of the diagonals 1..d beside the main one.
    const auto beside = [&](std::int64_t d) {
      const auto m = static_cast<double>(std::clamp<std::int64_t>(d, 0, rows - 1));
      return m * n - m * (m + 1.0) / 2.0;
    };
    if (difference < 0) return beside(rows - 1) - beside(-difference - 1);
    if (difference >= rows - 1) return n * n;
    return n * (n + 1.0) / 2.0 + beside(difference);
  };
  if (rows == 0 || band.empty()) return 0.0;
  return band.least == -Band::kUnlimited ? up_to(band.most)
                                         : up_to(band.most) - up_to(band.least - 1);
}

void Pattern::validate() const {
  const std::string where = "Pattern '" + name + "'";
  require_at_least_one(where, "heads", heads);
  if (branches.empty()) throw ConfigError(where + ": no branches, expected at least one");
  if (!std::isfinite(static_cast<float>(output_scale))) {
    throw ConfigError(where + ": output_scale is " + std::to_string(output_scale) +
                      ", expected a number that fp32 can hold");
  }
  const auto check_window = [&](const char* side, std::int64_t found) {
    if (found >= -1) return;
    throw ConfigError(where + ": window." + side + " is " + std::to_string(found) +
                      ", expected a number of tokens, or -1 for no limit");
  };
  check_window("before", window.before);
  check_window("after", window.after);
  if (causal && window.after > 0) {
    throw ConfigError(where + ": window.after is " + std::to_string(window.after) +
                      " in a causal pattern, expected 0 (or -1)");
  }
  for (std::size_t i = 0; i < branches.size(); ++i) {
    const Branch& branch = branches[i];
    const std::string here = where + ", branch " + std::to_string(i);
    require_at_least_one(here, "segment_length", branch.segment_length);
    require_at_least_one(here, "dilation", branch.dilation);
    if (branch.offset.size() != static_cast<std::size_t>(heads)) {
      throw ConfigError(here + ": found " + std::to_string(branch.offset.size()) +
                        " offsets, expected one per head: " + std::to_string(heads));
    }
    for (std::size_t h = 0; h < branch.offset.size(); ++h) {
      const std::int64_t offset = branch.offset[h];
      if (offset >= -1 && offset < branch.dilation) continue;
      throw ConfigError(here + ": offset of head " + std::to_string(h) + " is " +
                        std::to_string(offset) + ", expected 0.." +
                        std::to_string(branch.dilation - 1) +
                        " (dilation - 1) or -1 (not in branch)");
    }
  }
}

Pattern dense(int heads, bool causal) {
  require_at_least_one("dense", "heads", heads);
  Pattern pattern;
  pattern.name = "dense";
  pattern.heads = heads;
  pattern.causal = causal;
  pattern.branches.push_back(make_branch(heads, kWholeSequence, 1));
  for (std::int64_t& offset : pattern.branches[0].offset) offset = 0;
  return pattern;
}

Pattern head_groups(int heads, std::span<const std::int64_t> segments,
                    std::span<const std::int64_t> dilations, bool causal, bool group_scale) {
  check_preset("head_groups", heads, segments, dilations);
  const auto head_count = static_cast<std::size_t>(heads);
  const std::size_t groups = segments.size();
  if (groups > head_count) {
    throw ConfigError("head_groups: found " + std::to_string(groups) + " branches for " +
                      std::to_string(heads) +
                      " heads, expected at most one branch per head: the last would have none");
  }
  Pattern pattern;
  pattern.name = "head_groups";
  pattern.heads = heads;
  pattern.causal = causal;
  if (group_scale) pattern.output_scale = 1.0 / static_cast<double>(groups);
  std::size_t head = 0;
  for (std::size_t i = 0; i < groups; ++i) {
    Branch branch = make_branch(heads, segments[i], dilations[i]);
    const std::size_t end = head + head_count / groups + (i < head_count % groups ? 1 : 0);
    for (; head < end; ++head) branch.offset[head] = static_cast<std::int64_t>(i) % dilations[i];
    pattern.branches.push_back(std::move(branch));
  }
  return pattern;
}

Pattern longnet(int heads, std::span<const std::int64_t> segments,
                std::span<const std::int64_t> dilations, bool causal, Offsets offsets,
                bool group_scale) {
  check_preset("longnet", heads, segments, dilations);
  Pattern pattern;
  pattern.name = "longnet";
  pattern.heads = heads;
  pattern.causal = causal;
  if (group_scale) pattern.output_scale = 1.0 / static_cast<double>(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    Branch branch = make_branch(heads, segments[i], dilations[i]);
    if (offsets == Offsets::all) {
      // Offsets behind the end of a segment select nothing.
      const std::int64_t count = std::min(segments[i], dilations[i]);
      if (count > kMostBranches - static_cast<std::int64_t>(pattern.branches.size())) {
        throw ConfigError("longnet: dilation " + std::to_string(dilations[i]) +
                          " with offsets 'all' makes a branch for each of " +
                          std::to_string(count) + " offsets, expected at most " +
                          std::to_string(kMostBranches) + " branches in all");
      }
      for (std::int64_t offset = 0; offset < count; ++offset) {
        std::fill(branch.offset.begin(), branch.offset.end(), offset);
        pattern.branches.push_back(branch);
      }
      continue;
    }
    // ceil(heads / dilation) without the overflow of heads + dilation - 1. The blocked offset is
    // below the dilation because head < heads <= dilation * heads_per_offset.
    const std::int64_t heads_per_offset = (heads - 1) / dilations[i] + 1;
    for (std::int64_t head = 0; head < heads; ++head) {
      branch.offset[static_cast<std::size_t>(head)] =
          offsets == Offsets::blocked ? head / heads_per_offset : head % dilations[i];
    }
    pattern.branches.push_back(std::move(branch));
  }
  return pattern;
}

double allowed_pairs(const Pattern& pattern, std::int64_t tokens) {
  pattern.validate();
  if (tokens < 0) {
    throw ConfigError("allowed_pairs: tokens is " + std::to_string(tokens) +
                      ", expected at least 0");
  }
  double pairs = 0.0;
  for (const Branch& branch : pattern.branches) {
    const std::int64_t whole_segments = tokens / branch.segment_length;
    const std::int64_t last_length = tokens % branch.segment_length;  // ragged; 0: there is none
    for (const std::int64_t offset : branch.offset) {
      if (offset < 0) continue;
      const auto count = [&](std::int64_t length) {
        return pairs_in_segment(length, branch.dilation, offset, pattern.band());
      };
      pairs += static_cast<double>(whole_segments) * count(branch.segment_length);
      pairs += count(last_length);
    }
  }
  return pairs;
}

}  // namespace annulus
