#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "pattern/band_pairs.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"

namespace annulus {
namespace {

// Allowed pairs of the queries [bounds[i], bounds[i + 1]), for every i.
std::vector<double> pairs_between(const Pattern& pattern, std::int64_t tokens,
                                  const std::vector<std::int64_t>& bounds) {
  std::vector<double> pairs(bounds.size() - 1, 0.0);
  for (const Branch& branch : pattern.branches) {
    std::map<std::int64_t, double> heads_of;  // by offset
    for (const std::int64_t offset : branch.offset) {
      if (offset >= 0) heads_of[offset] += 1.0;
    }
    const Band band = pattern.band().divided_by(branch.dilation);
    for (const EntryGroup& group : entry_groups(pattern)) {
      const auto entries = static_cast<double>(group.entries.times());
      const Segments segments(group.documents, branch, tokens, tokens);
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        const std::int64_t last = segments.at_or_before(Side::queries, bounds[i + 1] - 1);
        for (std::int64_t s = segments.at_or_after(Side::queries, bounds[i]); s <= last; ++s) {
          Segments::Part queries = segments.part(Side::queries, s);
          queries.begin = std::max(queries.begin, bounds[i]);
          queries.end = std::min(queries.end, bounds[i + 1]);
          const Segments::Part keys = segments.part(Side::keys, s);
          for (const auto& [offset, heads] : heads_of) {
            pairs[i] += entries * heads *
                        band_pairs(band, selected_indices(queries, branch.dilation, offset),
                                   selected_indices(keys, branch.dilation, offset));
          }
        }
      }
    }
  }
  return pairs;
}

// Which rank has which chunk: the heaviest first, to the rank that has least so far and room for
// one more. Every rank gets equally many.
std::vector<std::size_t> deal(const std::vector<double>& pairs, std::size_t ranks) {
  std::vector<std::size_t> order(pairs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (pairs.size() == ranks) return order;  // contiguous
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return pairs[a] > pairs[b]; });
  std::vector<std::size_t> rank_of(pairs.size());
  std::vector<std::pair<double, std::size_t>> load(ranks);  // pairs, chunks
  for (const std::size_t chunk : order) {
    std::size_t best = ranks;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (load[rank].second == pairs.size() / ranks) continue;
      if (best == ranks || load[rank].first < load[best].first) best = rank;
    }
    rank_of[chunk] = best;
    load[best].first += pairs[chunk];
    ++load[best].second;
  }
  return rank_of;
}

double balance_of(const std::vector<double>& pairs, const std::vector<std::size_t>& rank_of,
                  std::size_t ranks) {
  std::vector<double> load(ranks, 0.0);
  for (std::size_t i = 0; i < pairs.size(); ++i) load[rank_of[i]] += pairs[i];
  const double most = *std::max_element(load.begin(), load.end());
  const double all = std::accumulate(load.begin(), load.end(), 0.0);
  return most == 0 ? 1.0 : all / static_cast<double>(ranks) / most;
}

}  // namespace

Placement Placement::balanced(const Pattern& pattern, std::int64_t tokens, int ranks) {
  check_counts("Placement::balanced", tokens, ranks);
  pattern.validate();
  check_documents(pattern, tokens, tokens);
  constexpr std::int64_t kMostChunks = 16;  // of a rank: more of them cut more segments and windows
  constexpr double kEnough = 0.95;
  const auto count = static_cast<std::size_t>(ranks);
  std::vector<std::int64_t> best_bounds;
  std::vector<std::size_t> best_ranks;
  double best = -1.0;
  for (std::int64_t chunks = 1; chunks <= kMostChunks && best < kEnough; chunks *= 2) {
    if (chunks > 1 && chunks * ranks > tokens) break;
    std::vector<std::int64_t> bounds;
    for (std::int64_t i = 0; i <= chunks * ranks; ++i)
      bounds.push_back(tokens / (chunks * ranks) * i + std::min(i, tokens % (chunks * ranks)));
    const std::vector<double> pairs = pairs_between(pattern, tokens, bounds);
    std::vector<std::size_t> rank_of = deal(pairs, count);
    const double balance = balance_of(pairs, rank_of, count);
    if (balance <= best) continue;
    best = balance;
    best_bounds = std::move(bounds);
    best_ranks = std::move(rank_of);
  }
  std::vector<std::vector<RowSet>> ranges(count);
  for (std::size_t i = 0; i < best_ranks.size(); ++i) {
    const RowSet chunk{best_bounds[i], best_bounds[i + 1] - best_bounds[i], 1};
    if (chunk.count == 0) continue;
    std::vector<RowSet>& of_rank = ranges[best_ranks[i]];
    if (!of_rank.empty() && of_rank.back().last() + 1 == chunk.first) {
      of_rank.back().count += chunk.count;
    } else {
      of_rank.push_back(chunk);
    }
  }
  return explicit_ranges(tokens, std::move(ranges), "balanced");
}

}  // namespace annulus
