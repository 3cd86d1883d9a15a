#include "pattern/shared_pairs.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

namespace annulus {
namespace {

struct Grid {
  std::int64_t segment;  // length; the length of the sequence if there is only one segment
  std::int64_t dilation;
  std::int64_t offset;
  bool single;  // one segment holds everything
};

Grid grid_of(const Branch& branch, std::int64_t tokens, int head) {
  return {std::min(branch.segment_length, tokens), branch.dilation,
          branch.offset[static_cast<std::size_t>(head)], branch.segment_length >= tokens};
}

// Whether every row of `guest` is a row of `host`, no segment of the host crosses a boundary of the
// guest's segments, and the guest's rows have the same indices in all segments of the host.
bool contains(const Grid& host, const Grid& guest) {
  if (host.offset < 0 || guest.offset < 0 || guest.dilation > guest.segment) return false;
  if (guest.dilation % host.dilation != 0 || guest.offset % host.dilation != host.offset)
    return false;
  if (host.single) return guest.single;
  return host.segment % guest.dilation == 0 && (guest.single || guest.segment % host.segment == 0);
}

std::int64_t rows_per_segment(const Grid& grid, std::int64_t length) {
  return (length + grid.dilation - 1) / grid.dilation;
}

// Whether sharing saves time. A guest's queries are computed in blocks of one host segment. These
// blocks see fewer keys, but pack them more often, and fill vectors of queries less well. Packing a
// key costs about as much as 8 queries that use it. The sizes are those of the CPU kernels,
// repeated here because this layer cannot include them; the GPU kernels use the same decision.
bool worth_sharing(std::int64_t segment_rows, std::int64_t host_rows) {
  constexpr double kPackCost = 8;
  constexpr std::int64_t kQueryBlock = 1024;
  constexpr std::int64_t kPanel = 32;
  const auto cost_per_pair = [](std::int64_t block) {
    const std::int64_t lanes = (block + kPanel - 1) / kPanel * kPanel;
    return (static_cast<double>(lanes) + kPackCost) / static_cast<double>(block);
  };
  const double kept =
      1.0 - static_cast<double>(host_rows) / static_cast<double>(std::max(host_rows, segment_rows));
  return kept * cost_per_pair(std::min(host_rows, kQueryBlock)) <
         0.98 * cost_per_pair(std::min(segment_rows, kQueryBlock));
}

}  // namespace

std::vector<PairSharing> share_pairs(const Pattern& pattern, const PairSpace& space, int head) {
  const std::size_t count = pattern.branches.size();
  std::vector<PairSharing> sharing(count);
  const std::int64_t tokens = space.tokens;
  if (!space.same_sides || tokens > std::numeric_limits<std::int32_t>::max()) return sharing;
  std::vector<Grid> grids;
  grids.reserve(count);
  for (const Branch& branch : pattern.branches) grids.push_back(grid_of(branch, tokens, head));

  // Finest first, so that a guest's possible hosts are decided before the guest.
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto fineness = [&](std::size_t b) {
    return std::tuple(grids[b].segment, grids[b].dilation, b);
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return fineness(a) < fineness(b); });

  std::vector<std::size_t> ancestors;
  for (std::size_t g = 0; g < count; ++g) {
    const std::size_t guest = order[g];
    // The coarsest possible host computes most of the guest's pairs.
    for (std::size_t h = g; h-- > 0;) {
      ancestors.clear();  // the host, its host, ...
      for (int a = static_cast<int>(order[h]); a >= 0;
           a = sharing[static_cast<std::size_t>(a)].host)
        ancestors.push_back(static_cast<std::size_t>(a));
      const Grid& host = grids[order[h]];
      const std::int64_t host_rows = rows_per_segment(grids[guest], host.segment);
      const bool possible = std::all_of(ancestors.begin(), ancestors.end(), [&](std::size_t a) {
        return contains(grids[a], grids[guest]) && sharing[a].repeats.size() < kMaxRepeats;
      });
      if (!possible ||
          !worth_sharing(rows_per_segment(grids[guest], grids[guest].segment), host_rows)) {
        continue;
      }
      sharing[guest].host = static_cast<int>(order[h]);
      sharing[guest].host_rows = host_rows;
      for (std::size_t a : ancestors) {
        sharing[a].repeats.push_back(
            {static_cast<std::int32_t>(grids[guest].dilation / grids[a].dilation),
             static_cast<std::int32_t>((grids[guest].offset - grids[a].offset) /
                                       grids[a].dilation)});
      }
      break;
    }
  }
  return sharing;
}

}  // namespace annulus
