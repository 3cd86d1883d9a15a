#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "annulus/ring_cache.h"

// A random life of a cache: calls with their tensors, and what the reference says of each.
namespace annulus::test {

struct CacheCall {
  enum class Kind : std::uint8_t { append, attend, step, truncate, copy };
  Kind kind = Kind::append;
  std::int64_t rows = 0;             // of the whole tensors
  std::vector<std::int64_t> counts;  // empty: all rows count
  std::optional<Placement> placement;
  std::int64_t entry = 0;  // truncate, copy
  std::int64_t other = 0;  // the length, or the entry that becomes a copy
  bool sinks = false;
  // [batch, rows, heads, head_dim]; NaN where rows do not count.
  std::vector<double> q, k, v;
  std::vector<double> o, lse;  // expected; zeros and -inf where rows do not count

  [[nodiscard]] bool appends() const { return kind == Kind::append || kind == Kind::step; }
  [[nodiscard]] bool attends() const { return kind == Kind::attend || kind == Kind::step; }
  [[nodiscard]] NewTokens tokens() const { return {counts, placement}; }
};

struct CacheStory {
  CacheOptions options;
  int ranks = 1;
  std::vector<double> sinks;  // of calls with sinks
  std::vector<CacheCall> calls;
};

struct StoryKind {
  int most_ranks = 8;
  int most_rows = 9;  // of a call
  int calls = 12;
};
[[nodiscard]] CacheStory random_cache_story(std::uint64_t seed, const StoryKind& kind = {});

// Plays it on a ring of threads, and expects of every call the reference's results, the same bits
// on all ranks where all get all results, and as many bytes as were predicted.
void play(const CacheStory& story);

}  // namespace annulus::test
