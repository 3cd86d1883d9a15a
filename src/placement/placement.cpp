#include "annulus/placement.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

// Start of part i when `total` is cut into `parts` whose sizes differ by at most one, longer first.
std::int64_t part_begin(std::int64_t total, std::int64_t parts, std::int64_t i) {
  return i * (total / parts) + std::min(i, total % parts);
}

struct OwnedRows {
  RowSet rows;
  std::size_t rank = 0;
};

std::string describe(const OwnedRows& owned) {
  return "rank " + std::to_string(owned.rank) + "'s row set {first " +
         std::to_string(owned.rows.first) + ", count " + std::to_string(owned.rows.count) +
         ", stride " + std::to_string(owned.rows.stride) + "}";
}

[[noreturn]] void fail_explicit(const std::string& problem) {
  throw ConfigError("Placement::explicit_ranges: " + problem +
                    "; expected every position of [0, tokens) on exactly one rank");
}

void check_within(const OwnedRows& owned, std::int64_t tokens) {
  const RowSet& rows = owned.rows;
  if (rows.stride < 1) fail_explicit(describe(owned) + " has a stride below 1");
  if (rows.count < 0) fail_explicit(describe(owned) + " has a negative count");
  if (rows.count == 0) return;
  const std::string limit = ", tokens is " + std::to_string(tokens);
  if (rows.first < 0 || rows.first >= tokens) {
    fail_explicit(describe(owned) + " contains position " + std::to_string(rows.first) + limit);
  }
  // Computed from the count without a multiplication, because last() may overflow for a wrong
  // count.
  const std::int64_t steps_within = (tokens - 1 - rows.first) / rows.stride;
  if (rows.count - 1 > steps_within) {
    const std::uint64_t outside =
        static_cast<std::uint64_t>(rows[steps_within]) + static_cast<std::uint64_t>(rows.stride);
    fail_explicit(describe(owned) + " contains position " + std::to_string(outside) + limit);
  }
}

// Sweeps the row sets in order of their first position and compares each with those that have not
// ended yet. Needs no memory per token, and near linear time unless many strided sets interleave (P
// striped ranks need P^2/2 intersections).
void check_disjoint(std::vector<OwnedRows> all) {
  std::sort(all.begin(), all.end(),
            [](const OwnedRows& a, const OwnedRows& b) { return a.rows.first < b.rows.first; });
  std::vector<const OwnedRows*> active;
  for (const OwnedRows& next : all) {
    std::erase_if(active,
                  [&](const OwnedRows* earlier) { return earlier->rows.last() < next.rows.first; });
    for (const OwnedRows* earlier : active) {
      const RowSet shared = intersect(earlier->rows, next.rows);
      if (shared.count > 0) {
        fail_explicit("position " + std::to_string(shared.first) + " is held twice, by " +
                      describe(*earlier) + " and by " + describe(next));
      }
    }
    active.push_back(&next);
  }
}

// The number of held positions below `end`; the sets must be disjoint.
std::int64_t held_below(const std::vector<OwnedRows>& all, std::int64_t end) {
  std::int64_t held = 0;
  for (const OwnedRows& owned : all) held += clip(owned.rows, 0, end).count;
  return held;
}

void check_covers(const std::vector<OwnedRows>& all, std::int64_t tokens) {
  if (held_below(all, tokens) == tokens) return;
  // The number of gaps below a position never decreases: bisect for the first gap.
  std::int64_t complete = 0;     // every position below it is held
  std::int64_t broken = tokens;  // some position below it is not
  while (broken - complete > 1) {
    const std::int64_t middle = complete + (broken - complete) / 2;
    (held_below(all, middle) == middle ? complete : broken) = middle;
  }
  fail_explicit("position " + std::to_string(complete) +
                " is held by none of the ranks, tokens is " + std::to_string(tokens));
}

}  // namespace

void Placement::check_counts(const char* where, std::int64_t tokens, std::int64_t ranks) {
  if (tokens < 1) {
    throw ConfigError(std::string(where) + ": tokens is " + std::to_string(tokens) +
                      ", expected at least 1");
  }
  if (ranks < 1) {
    throw ConfigError(std::string(where) + ": ranks is " + std::to_string(ranks) +
                      ", expected at least 1");
  }
}

Placement::Placement(std::string name, std::int64_t tokens,
                     std::vector<std::vector<RowSet>> ranges) {
  auto data = std::make_shared<Data>();
  data->name = std::move(name);
  data->tokens = tokens;
  data->ranges = std::move(ranges);
  data->local_tokens.reserve(data->ranges.size());
  data->range_begins.reserve(data->ranges.size());
  for (std::vector<RowSet>& rank_ranges : data->ranges) {
    std::erase_if(rank_ranges, [](const RowSet& rows) { return rows.count == 0; });
    std::vector<std::int64_t>& begins = data->range_begins.emplace_back();
    begins.reserve(rank_ranges.size());
    std::int64_t held = 0;
    for (const RowSet& rows : rank_ranges) {
      begins.push_back(held);
      held += rows.count;
    }
    data->local_tokens.push_back(held);
  }
  data_ = std::move(data);
}

Placement Placement::contiguous(std::int64_t tokens, int ranks, std::int64_t align) {
  check_counts("Placement::contiguous", tokens, ranks);
  if (align < 1) {
    throw ConfigError("Placement::contiguous: align is " + std::to_string(align) +
                      ", expected at least 1");
  }
  align = std::min(align, tokens);  // so that no product overflows
  const std::int64_t blocks = (tokens - 1) / align + 1;
  // The ragged last block belongs to the last rank. If that rank had one of the shorter shards, it
  // would hold fewer tokens than the longer ones by more than `align`. So one of the longer shards
  // moves to the end.
  const bool ragged = tokens % align != 0;
  const bool longer_last = ragged && blocks > ranks && blocks % ranks != 0;

  std::vector<std::vector<RowSet>> ranges(static_cast<std::size_t>(ranks));
  std::int64_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::int64_t end_block = rank + 1 == ranks ? blocks
                                   : longer_last     ? part_begin(blocks - 1, ranks, rank + 1)
                                                     : part_begin(blocks, ranks, rank + 1);
    const std::int64_t end = end_block == blocks ? tokens : end_block * align;
    ranges[static_cast<std::size_t>(rank)].push_back({begin, end - begin, 1});
    begin = end;
  }
  return {"contiguous", tokens, std::move(ranges)};
}

Placement Placement::zigzag(std::int64_t tokens, int ranks) {
  check_counts("Placement::zigzag", tokens, ranks);
  const std::int64_t chunks = 2 * static_cast<std::int64_t>(ranks);
  std::vector<std::vector<RowSet>> ranges(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<RowSet>& mine = ranges[static_cast<std::size_t>(rank)];
    for (const std::int64_t chunk : {static_cast<std::int64_t>(rank), chunks - 1 - rank}) {
      const std::int64_t begin = part_begin(tokens, chunks, chunk);
      const std::int64_t end = part_begin(tokens, chunks, chunk + 1);
      // The two chunks of the last rank are neighbours: one range, hence one tile instead of two.
      if (!mine.empty() && mine.back().last() + 1 == begin) {
        mine.back().count += end - begin;
      } else {
        mine.push_back({begin, end - begin, 1});
      }
    }
  }
  return {"zigzag", tokens, std::move(ranges)};
}

Placement Placement::striped(std::int64_t tokens, int ranks) {
  check_counts("Placement::striped", tokens, ranks);
  std::vector<std::vector<RowSet>> ranges(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks && rank < tokens; ++rank) {
    ranges[static_cast<std::size_t>(rank)].push_back(
        {rank, (tokens - 1 - rank) / ranks + 1, ranks});
  }
  return {"striped", tokens, std::move(ranges)};
}

Placement Placement::explicit_ranges(std::int64_t tokens, std::vector<std::vector<RowSet>> ranges,
                                     std::string name) {
  check_counts("Placement::explicit_ranges", tokens, static_cast<std::int64_t>(ranges.size()));
  std::vector<OwnedRows> all;
  for (std::size_t rank = 0; rank < ranges.size(); ++rank) {
    for (RowSet& rows : ranges[rank]) {
      check_within({rows, rank}, tokens);
      // The stride of a single row has no meaning and may be any number. Normalise it, because it
      // could overflow later.
      if (rows.count == 1) rows.stride = 1;
      if (rows.count > 0) all.push_back({rows, rank});
    }
  }
  check_disjoint(all);
  check_covers(all, tokens);
  return {std::move(name), tokens, std::move(ranges)};
}

Placement Placement::named(const std::string& name, std::int64_t tokens, int ranks) {
  if (name == "contiguous") return contiguous(tokens, ranks);
  if (name == "zigzag") return zigzag(tokens, ranks);
  if (name == "striped") return striped(tokens, ranks);
  if (name == "hilbert") return hilbert(tokens, ranks);
  throw ConfigError("Placement::named: placement is '" + name +
                    "', expected 'contiguous', 'zigzag', 'striped' or 'hilbert'");
}

std::int64_t Placement::position(int rank, std::int64_t local) const {
  if (rank < 0 || rank >= ranks() || local < 0 || local >= local_tokens(rank)) {
    const std::string expected =
        rank < 0 || rank >= ranks()
            ? "a rank in [0, " + std::to_string(ranks()) + ")"
            : "a local token in [0, " + std::to_string(local_tokens(rank)) + ")";
    throw ConfigError("Placement::position: found rank " + std::to_string(rank) + ", local token " +
                      std::to_string(local) + ", expected " + expected + ": placement '" + name() +
                      "' of " + std::to_string(tokens()) + " tokens");
  }
  const std::vector<std::int64_t>& begins = data_->range_begins[static_cast<std::size_t>(rank)];
  const auto after = std::upper_bound(begins.begin(), begins.end(), local);
  const auto range = static_cast<std::size_t>(after - begins.begin()) - 1;
  return ranges(rank)[range][local - begins[range]];
}

std::vector<std::int64_t> Placement::positions(int rank) const {
  std::vector<std::int64_t> all;
  all.reserve(static_cast<std::size_t>(local_tokens(rank)));
  for (const RowSet& rows : ranges(rank)) {
    for (std::int64_t i = 0; i < rows.count; ++i) all.push_back(rows[i]);
  }
  return all;
}

}  // namespace annulus
