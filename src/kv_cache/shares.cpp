#include "kv_cache/shares.h"

#include <algorithm>

namespace annulus::kv_cache {
namespace {

void number(std::vector<Share>& shares) {
  std::int64_t first = 0;
  for (Share& share : shares) {
    share.first = first;
    first += share.count;
  }
}

}  // namespace

std::vector<Share> placed_shares(std::span<const std::int64_t> counts, const Placement& placement) {
  std::vector<Share> shares(static_cast<std::size_t>(placement.ranks()));
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    Share& share = shares[static_cast<std::size_t>(rank)];
    for (std::int64_t entry = 0; entry < std::ssize(counts); ++entry) {
      const std::int64_t end = counts[static_cast<std::size_t>(entry)];
      std::int64_t row = 0;
      for (const RowSet& range : placement.ranges(rank)) {
        if (range.stride == 1) {
          const std::int64_t count = std::min(range.count, end - range.first);
          if (count > 0) share.add({entry, range.first, row, count});
        } else {
          for (std::int64_t i = 0; i < range.count; ++i) {
            const std::int64_t token = range.first + i * range.stride;
            if (token < end) share.add({entry, token, row + i, 1});
          }
        }
        row += range.count;
      }
    }
  }
  number(shares);
  return shares;
}

std::vector<Share> equal_shares(std::span<const std::int64_t> counts, int shares) {
  std::int64_t all = 0;
  for (const std::int64_t count : counts) all += count;
  std::vector<Share> out(static_cast<std::size_t>(shares));
  std::int64_t done = 0;
  std::int64_t number_of_share = 0;
  for (std::int64_t entry = 0; entry < std::ssize(counts); ++entry) {
    std::int64_t token = 0;
    while (token < counts[static_cast<std::size_t>(entry)]) {
      while (done >= all * (number_of_share + 1) / shares) ++number_of_share;
      const std::int64_t room = all * (number_of_share + 1) / shares - done;
      const std::int64_t count = std::min(room, counts[static_cast<std::size_t>(entry)] - token);
      out[static_cast<std::size_t>(number_of_share)].add({entry, token, token, count});
      token += count;
      done += count;
    }
  }
  number(out);
  return out;
}

}  // namespace annulus::kv_cache
