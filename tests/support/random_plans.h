#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"

namespace annulus::test {

// Random small plans: all placements, all presets and odd shapes, both schedules and directions.

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {  // both included
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool coin() { return between(0, 1) == 1; }
  template <typename T>
  T one_of(const std::vector<T>& values) {
    return values[static_cast<std::size_t>(
        between(0, static_cast<std::int64_t>(values.size()) - 1))];
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

 private:
  std::mt19937_64 engine_;
};

// Cuts the sequence into stretches, each into interleaved progressions, and deals these out to the
// ranks in random order: shards are neither contiguous nor ascending.
[[nodiscard]] inline Placement random_placement(Random& random, std::int64_t tokens, int ranks) {
  std::vector<RowSet> pieces;
  for (std::int64_t begin = 0; begin < tokens;) {
    const std::int64_t length = std::min(tokens - begin, random.between(1, tokens / 2 + 1));
    const std::int64_t stride = std::min(length, random.one_of<std::int64_t>({1, 1, 1, 2, 3, 5}));
    for (std::int64_t i = 0; i < stride; ++i) {
      pieces.push_back({begin + i, (length - i - 1) / stride + 1, stride});
    }
    begin += length;
  }
  random.shuffle(pieces);
  std::vector<std::vector<RowSet>> ranges(static_cast<std::size_t>(ranks));
  for (const RowSet& piece : pieces) {
    ranges[static_cast<std::size_t>(random.between(0, ranks - 1))].push_back(piece);
  }
  return Placement::explicit_ranges(tokens, std::move(ranges));
}

[[nodiscard]] inline Placement any_placement(Random& random, std::int64_t tokens, int ranks) {
  switch (random.between(0, 5)) {
    case 0:
      return Placement::contiguous(tokens, ranks);
    case 1:
      return Placement::contiguous(tokens, ranks, random.between(1, 20));
    case 2:
      return Placement::zigzag(tokens, ranks);
    case 3:
      return Placement::striped(tokens, ranks);
    case 4:
      return Placement::hilbert(tokens, ranks);
    default:
      return random_placement(random, tokens, ranks);
  }
}

// Segments need not divide by dilations, dilations may exceed segments, heads may be in no branch.
[[nodiscard]] inline Pattern random_branches(Random& random, std::int64_t tokens, int heads,
                                             bool causal) {
  Pattern pattern;
  pattern.name = "random";
  pattern.heads = heads;
  pattern.causal = causal;
  for (std::int64_t i = random.between(1, 4); i > 0; --i) {
    Branch branch;
    branch.segment_length =
        random.between(0, 5) == 0 ? kWholeSequence : random.between(1, tokens + 10);
    branch.dilation = random.one_of<std::int64_t>({1, 2, 3, 4, 5, 6, 7, 8, 16, 40, 1000});
    for (int h = 0; h < heads; ++h) {
      const std::int64_t highest = std::min<std::int64_t>(branch.dilation - 1, 9);
      branch.offset.push_back(random.between(-1, random.coin() ? 0 : highest));
    }
    pattern.branches.push_back(std::move(branch));
  }
  return pattern;
}

// A third has no window; some windows allow no or very few keys.
[[nodiscard]] inline Window any_window(Random& random, std::int64_t tokens, bool causal) {
  const auto limit = [&]() -> std::int64_t {
    return random.between(0, 3) == 0 ? -1 : random.between(0, random.coin() ? 4 : tokens);
  };
  Window window;
  if (random.between(0, 2) > 0) window = {limit(), limit()};
  if (causal) window.after = std::min<std::int64_t>(window.after, 0);
  return window;
}

[[nodiscard]] inline Pattern any_preset(Random& random, std::int64_t tokens, int heads) {
  const bool causal = random.coin();
  std::vector<std::int64_t> segments;
  std::vector<std::int64_t> dilations;
  std::int64_t dilation = 1;
  for (std::int64_t w = random.one_of<std::int64_t>({4, 6, 8, 16}); segments.size() < 3; w *= 2) {
    segments.push_back(w);
    dilations.push_back(dilation);
    dilation *= random.between(1, 3);
  }
  switch (random.between(0, 4)) {
    case 0:
      return dense(heads, causal);
    case 1: {
      const std::size_t groups =
          std::min<std::size_t>(segments.size(), static_cast<std::size_t>(heads));
      segments.resize(groups);
      dilations.resize(groups);
      return head_groups(heads, segments, dilations, causal);
    }
    case 2:
      return longnet(
          heads, segments, dilations, causal,
          random.one_of<Offsets>({Offsets::blocked, Offsets::interleaved, Offsets::all}));
    default:
      return random_branches(random, tokens, heads, causal);
  }
}

[[nodiscard]] inline Pattern any_pattern(Random& random, std::int64_t tokens, int heads) {
  Pattern pattern = any_preset(random, tokens, heads);
  pattern.window = any_window(random, tokens, pattern.causal);
  return pattern;
}

// Half have none; others pack up to six, some of them empty, often with gaps between them. Where
// the sides differ, so do ranges and first positions.
[[nodiscard]] inline std::vector<Document> any_documents(Random& random, std::int64_t query_tokens,
                                                         std::int64_t key_tokens) {
  std::vector<Document> documents;
  if (random.coin()) return documents;
  const auto count = static_cast<std::size_t>(random.between(1, 6));
  const bool gaps = random.coin();
  using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;
  const auto ranges_of = [&](std::int64_t tokens) {
    std::vector<std::int64_t> cuts(gaps ? 2 * count : count + 1);
    for (std::int64_t& cut : cuts) cut = random.between(0, tokens);
    std::sort(cuts.begin(), cuts.end());
    if (!gaps) {
      cuts.front() = 0;
      cuts.back() = tokens;
    }
    Ranges ranges;
    for (std::size_t i = 0; i < count; ++i)
      ranges.emplace_back(cuts[gaps ? 2 * i : i], cuts[gaps ? 2 * i + 1 : i + 1]);
    return ranges;
  };
  const Ranges queries = ranges_of(query_tokens);
  const bool same = query_tokens == key_tokens && random.between(0, 3) > 0;
  const Ranges keys = same ? queries : ranges_of(key_tokens);
  for (std::size_t i = 0; i < count; ++i) {
    Document document{queries[i].first, queries[i].second, keys[i].first, keys[i].second, 0, 0};
    if (!same && random.coin()) document.query_start = random.between(0, key_tokens);
    if (!same && random.between(0, 3) == 0) document.key_start = random.between(0, 20);
    documents.push_back(document);
  }
  return documents;
}

// The same, and as often each batch entry has its own: sometimes those of the entry before, one
// document of everything, or queries without any key.
[[nodiscard]] inline std::vector<Document> any_documents(Random& random, std::int64_t query_tokens,
                                                         std::int64_t key_tokens,
                                                         std::int64_t batch) {
  if (random.coin()) return any_documents(random, query_tokens, key_tokens);
  std::vector<std::vector<Document>> entries(static_cast<std::size_t>(batch));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    switch (random.between(0, 7)) {
      case 0:
        entries[i] = {{.query_end = query_tokens}};
        break;
      case 1:
        entries[i] = {{.query_end = query_tokens, .key_end = key_tokens}};
        break;
      case 2:
      case 3:
        if (i > 0) entries[i] = entries[i - 1];
        break;
      default:
        entries[i] = any_documents(random, query_tokens, key_tokens);
    }
  }
  return documents_of_entries(entries);
}

[[nodiscard]] inline PlanOptions any_options(Random& random) {
  // Mostly short: brute force costs tokens^2, and short sequences show the same errors.
  const std::int64_t tokens = random.between(1, random.one_of<std::int64_t>({12, 50, 50, 50, 200}));
  const int ranks = static_cast<int>(random.between(1, 8));
  const int group = random.one_of<int>({1, 1, 2, 4, 8});
  const int kv_heads = static_cast<int>(random.between(1, std::max(1, 8 / group)));
  Pattern pattern = any_pattern(random, tokens, group * kv_heads);
  pattern.documents = any_documents(random, tokens, tokens, random.between(1, 3));
  const Placement placement = any_placement(random, tokens, ranks);
  return {std::move(pattern),
          placement,
          placement,
          kv_heads,
          random.coin() ? Schedule::ring : Schedule::gather,
          random.coin() ? Travel::keys : Travel::queries};
}

// Queries and keys placed differently, often of different lengths.
[[nodiscard]] inline PlanOptions any_sides(Random& random) {
  PlanOptions options = any_options(random);
  const std::int64_t tokens = options.queries.tokens();
  const std::int64_t others = random.coin() ? tokens : random.between(1, 2 * tokens);
  (random.coin() ? options.keys : options.queries) =
      any_placement(random, others, options.queries.ranks());
  options.pattern.documents =
      any_documents(random, options.queries.tokens(), options.keys.tokens(), random.between(1, 3));
  return options;
}

[[nodiscard]] inline std::string describe(const std::vector<Document>& documents) {
  std::string text;
  for (const Document& d : documents) {
    const auto range = [](std::int64_t begin, std::int64_t end, std::int64_t start) {
      return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")" +
             (start == 0 ? "" : " from " + std::to_string(start));
    };
    text += ", document " + (d.entry < 0 ? "" : "of entry " + std::to_string(d.entry) + " ") +
            range(d.query_begin, d.query_end, d.query_start) + " x " +
            range(d.key_begin, d.key_end, d.key_start);
  }
  return text;
}

[[nodiscard]] inline std::string describe(const Plan& plan) {
  std::string text =
      plan.pattern().name + (plan.pattern().causal ? " causal" : "") + ", window (" +
      std::to_string(plan.pattern().window.before) + ", " +
      std::to_string(plan.pattern().window.after) + "), " + plan.query_placement().name() + " " +
      std::to_string(plan.query_placement().tokens()) + " tokens against " +
      plan.key_placement().name() + " " + std::to_string(plan.key_placement().tokens()) + ", " +
      std::to_string(plan.ranks()) + " ranks, heads " + std::to_string(plan.pattern().heads) + "/" +
      std::to_string(plan.options().kv_heads) + ", " + name_of(plan.options().schedule) + " of " +
      name_of(plan.options().travel);
  for (const Branch& branch : plan.pattern().branches) {
    text +=
        ", w " + std::to_string(branch.segment_length) + " r " + std::to_string(branch.dilation);
  }
  return text + describe(plan.pattern().documents);
}

[[nodiscard]] inline std::vector<std::int64_t> positions_of(const Parcel& parcel) {
  std::vector<std::int64_t> positions;
  for (const RowSet& rows : parcel.rows) {
    for (std::int64_t i = 0; i < rows.count; ++i) positions.push_back(rows[i]);
  }
  return positions;
}

constexpr int kConfigurations = 4000;

using Views = std::vector<Plan>;  // one per rank

// Calls check(views) on many random plans; stops at the first that fails. Queries and keys share a
// placement in two of three.
template <typename Check>
void for_random_plans(std::uint64_t first_seed, Check check) {
  for (std::uint64_t seed = first_seed; seed < first_seed + kConfigurations; ++seed) {
    Random random(seed);
    const Views views = Plan::of_all_ranks(seed % 3 == 0 ? any_sides(random) : any_options(random));
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + describe(views.front()));
    check(views);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace annulus::test
