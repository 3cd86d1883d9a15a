#include "support/cache_story.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "annulus/error.h"
#include "annulus/half.h"
#include "annulus/in_process.h"
#include "annulus/reference.h"
#include "kv_cache/sequences.h"
#include "support/problem.h"
#include "support/ring_fixture.h"
#include "support/shards.h"

namespace annulus::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class Writer {
 public:
  Writer(std::uint64_t seed, const StoryKind& kind) : random_(seed), kind_(kind) {}

  CacheStory write() {
    choose_options();
    sequences_.emplace(story_.options, story_.ranks);
    histories_.resize(static_cast<std::size_t>(story_.options.batch));
    for (int i = 0; i < kind_.calls; ++i) add_call();
    return std::move(story_);
  }

 private:
  std::int64_t pick(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  bool chance(int percent) { return pick(1, 100) <= percent; }

  void choose_options() {
    CacheOptions& o = story_.options;
    story_.ranks = static_cast<int>(pick(1, kind_.most_ranks));
    o.batch = pick(1, 3);
    o.kv_heads = static_cast<int>(pick(1, 3));
    o.heads = o.kv_heads * static_cast<int>(pick(1, 9));
    const int dims[] = {1, 7, 16, 40, 64, 80, 128, 300};
    o.head_dim = dims[pick(0, 7)];
    o.dtype = kDTypes[pick(0, 2)];
    o.block = chance(30) ? pick(1, 3) : pick(4, 40);
    o.causal = chance(75);
    if (chance(20)) o.scale = 0.7;
    if (chance(50)) {
      o.window = {pick(0, 60), o.causal || chance(50) ? -1 : pick(0, 5)};
      o.capacity = o.window.before + kind_.most_rows + pick(0, 30);
    } else {
      o.capacity = pick(1, 400);
    }
    o.device = test_device();
    for (int h = 0; h < o.heads; ++h) {
      story_.sinks.push_back(chance(20) ? -std::numeric_limits<double>::infinity()
                                        : static_cast<double>(pick(-20, 30)) / 10.0);
    }
  }

  [[nodiscard]] std::vector<std::int64_t> all_counts(const CacheCall& call) const {
    return call.counts.empty() ? std::vector<std::int64_t>(
                                     static_cast<std::size_t>(story_.options.batch), call.rows)
                               : call.counts;
  }

  void add_call() {
    CacheCall call;
    const std::int64_t dice = pick(1, 100);
    using Kind = CacheCall::Kind;
    call.kind = dice <= 30   ? Kind::append
                : dice <= 55 ? Kind::attend
                : dice <= 85 ? Kind::step
                : dice <= 95 ? Kind::truncate
                             : Kind::copy;
    call.entry = pick(0, story_.options.batch - 1);
    if (call.kind == Kind::truncate) return add_truncate(std::move(call));
    if (call.kind == Kind::copy) {
      call.other = pick(0, story_.options.batch - 1);
      if (call.other != call.entry) {
        sequences_->copy(call.entry, call.other);
        history(call.other) = history(call.entry);
      }
      story_.calls.push_back(std::move(call));
      return;
    }
    call.rows = chance(40) ? 1 : pick(0, kind_.most_rows);
    if (chance(50)) {
      for (std::int64_t e = 0; e < story_.options.batch; ++e)
        call.counts.push_back(pick(0, call.rows));
    }
    if (call.rows > 0 && chance(40)) {
      call.placement = placement_of(kPlacementNames[pick(0, 5)], call.rows, story_.ranks,
                                    static_cast<std::uint64_t>(pick(1, 1000)));
    }
    const std::vector<std::int64_t> counts = all_counts(call);
    if (call.appends() && !sequences_->append_complaint(counts).empty()) return;
    const std::span<const std::int64_t> none;
    if (call.attends() &&
        !sequences_->attend_complaint(counts, call.appends() ? std::span(counts) : none).empty())
      return;
    if (call.appends()) append(call, counts);
    if (call.attends()) attend(call, counts);
    story_.calls.push_back(std::move(call));
  }

  void add_truncate(CacheCall call) {
    const std::int64_t length = sequences_->lengths()[static_cast<std::size_t>(call.entry)];
    call.other = chance(30) ? 0 : std::max<std::int64_t>(0, length - pick(0, 12));
    try {
      sequences_->truncate(call.entry, call.other);
    } catch (const ConfigError&) {
      return;
    }
    for (std::vector<double>* rows : {&history(call.entry).k, &history(call.entry).v})
      rows->resize(static_cast<std::size_t>(call.other * key_row()));
    story_.calls.push_back(std::move(call));
  }

  double number() {
    return rounded(std::vector<double>{normal_(random_)}, story_.options.dtype).front();
  }
  // [batch, rows, width]: numbers in rows that count.
  std::vector<double> tensor(const CacheCall& call, const std::vector<std::int64_t>& counts,
                             std::int64_t width) {
    std::vector<double> out;
    for (std::int64_t e = 0; e < story_.options.batch; ++e) {
      for (std::int64_t row = 0; row < call.rows; ++row) {
        for (std::int64_t i = 0; i < width; ++i)
          out.push_back(row < counts[static_cast<std::size_t>(e)] ? number() : kNaN);
      }
    }
    return out;
  }

  void append(CacheCall& call, const std::vector<std::int64_t>& counts) {
    call.k = tensor(call, counts, key_row());
    call.v = tensor(call, counts, key_row());
    for (std::int64_t e = 0; e < story_.options.batch; ++e) {
      const auto first = e * call.rows * key_row();
      const auto count = counts[static_cast<std::size_t>(e)] * key_row();
      History& entry = history(e);
      entry.k.insert(entry.k.end(), call.k.begin() + first, call.k.begin() + first + count);
      entry.v.insert(entry.v.end(), call.v.begin() + first, call.v.begin() + first + count);
    }
    sequences_->append(counts);
  }

  void attend(CacheCall& call, const std::vector<std::int64_t>& counts) {
    const CacheOptions& options = story_.options;
    const std::int64_t width = std::int64_t{options.heads} * options.head_dim;
    call.sinks = chance(30);
    call.q = tensor(call, counts, width);
    call.o.assign(call.q.size(), 0.0);
    call.lse.assign(static_cast<std::size_t>(options.batch * call.rows * options.heads),
                    -std::numeric_limits<double>::infinity());
    for (std::int64_t e = 0; e < options.batch; ++e) {
      const std::int64_t count = counts[static_cast<std::size_t>(e)];
      if (count == 0) continue;
      const std::int64_t length = sequences_->lengths()[static_cast<std::size_t>(e)];
      Pattern pattern = dense(options.heads, options.causal);
      pattern.window = options.window;
      pattern.documents = {{0, count, 0, length, length - count, 0}};
      const reference::Shape shape{1,     count, options.heads, options.kv_heads, options.head_dim,
                                   length};
      const auto first = call.q.begin() + e * call.rows * width;
      const std::vector<double> q(first, first + count * width);
      const reference::Output out = reference::forward(
          pattern, shape, q, history(e).k, history(e).v, options.scale,
          call.sinks ? std::span<const double>(story_.sinks) : std::span<const double>());
      std::copy(out.o.begin(), out.o.end(), call.o.begin() + e * call.rows * width);
      std::copy(out.lse.begin(), out.lse.end(), call.lse.begin() + e * call.rows * options.heads);
    }
  }

  struct History {
    std::vector<double> k, v;
  };
  History& history(std::int64_t entry) { return histories_[static_cast<std::size_t>(entry)]; }
  [[nodiscard]] std::int64_t key_row() const {
    return std::int64_t{story_.options.kv_heads} * story_.options.head_dim;
  }

  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  StoryKind kind_;
  CacheStory story_;
  std::optional<kv_cache::Sequences> sequences_;
  std::vector<History> histories_;
};

// One rank's part of a story.
class Player {
 public:
  Player(const CacheStory& story, Transport& transport)
      : story_(story),
        options_(story.options),
        transport_(transport),
        cache_(story.options, transport),
        sinks_(DType::f32, 1, 1, options_.heads, 0, Layout::dense) {
    for (int h = 0; h < options_.heads; ++h)
      sinks_.set(0, 0, h, 0, static_cast<float>(story.sinks[static_cast<std::size_t>(h)]));
    sinks_.upload();
  }

  // What came out, for comparison with the other ranks.
  std::vector<float> play(std::size_t number) {
    const CacheCall& call = story_.calls[number];
    SCOPED_TRACE("call " + std::to_string(number) + ", rank " + std::to_string(transport_.rank()));
    if (call.kind == CacheCall::Kind::truncate) {
      cache_.truncate(call.entry, call.other);
      return {};
    }
    if (call.kind == CacheCall::Kind::copy) {
      cache_.copy_entry(call.entry, call.other);
      return {};
    }
    tokens_.clear();
    for (std::int64_t i = 0; i < call.rows; ++i) tokens_.push_back(i);
    if (call.placement) tokens_ = call.placement->positions(transport_.rank());
    const auto layout = static_cast<Layout>(number % 3);
    ShardTensor q = shard(call, call.q, options_.heads, layout);
    ShardTensor k = shard(call, call.k, options_.kv_heads, layout);
    ShardTensor v = shard(call, call.v, options_.kv_heads, layout);
    const auto rows = std::ssize(tokens_);
    ShardTensor o(options_.dtype, options_.batch, rows, options_.heads, options_.head_dim, layout);
    ShardTensor lse(DType::f32, options_.batch, rows, options_.heads, 0, layout);
    for (ShardTensor* result : {&o, &lse}) {
      result->fill(NAN);
      result->upload();
    }
    OptionalInputs more;
    if (call.sinks) more.sinks = sinks_.head_view();

    const std::uint64_t before = transport_.counters().bytes_sent;
    std::int64_t predicted = 0;
    if (call.appends()) predicted += cache_.predicted_append_bytes(call.rows, call.tokens());
    if (call.kind == CacheCall::Kind::append) {
      cache_.append(k.view(), v.view(), call.tokens());
    } else if (call.kind == CacheCall::Kind::attend) {
      cache_.attend(q.view(), o.view(), lse.view(), call.tokens(), more);
    } else {
      cache_.step(q.view(), k.view(), v.view(), o.view(), lse.view(), call.tokens(), more);
    }
    cache_.synchronize();
    if (call.attends()) predicted += cache_.predicted_attend_bytes(call.rows, call.tokens());
    if (call.kind == CacheCall::Kind::step) {  // one agreement, not two
      const std::vector<std::int64_t> nothing(static_cast<std::size_t>(options_.batch));
      predicted -= cache_.predicted_append_bytes(0, {nothing, {}});
    }
    EXPECT_EQ(static_cast<std::int64_t>(transport_.counters().bytes_sent - before), predicted);
    if (!call.attends()) return {};
    return check(call, o, lse);
  }

 private:
  ShardTensor shard(const CacheCall& call, const std::vector<double>& whole, int heads,
                    Layout layout) {
    ShardTensor out(options_.dtype, options_.batch, std::ssize(tokens_), heads, options_.head_dim,
                    layout);
    if (!whole.empty()) {
      for_each(heads, [&](std::int64_t e, std::int64_t t, std::int64_t h, std::int64_t d) {
        out.set(e, t, h, d, static_cast<float>(whole[at(call, e, t, h, d, heads)]));
      });
    }
    out.upload();
    return out;
  }

  std::vector<float> check(const CacheCall& call, const ShardTensor& o, const ShardTensor& lse) {
    o.download();
    lse.download();
    EXPECT_TRUE(o.gaps_untouched() && lse.gaps_untouched());
    std::vector<float> found;
    std::vector<double> expected;
    for_each(options_.heads, [&](std::int64_t e, std::int64_t t, std::int64_t h, std::int64_t d) {
      found.push_back(o.get(e, t, h, d));
      expected.push_back(call.o[at(call, e, t, h, d, options_.heads)]);
    });
    std::vector<float> found_lse;
    std::vector<double> expected_lse;
    for (std::int64_t e = 0; e < options_.batch; ++e) {
      for (std::int64_t t = 0; t < std::ssize(tokens_); ++t) {
        for (int h = 0; h < options_.heads; ++h) {
          found_lse.push_back(lse.get(e, t, h, 0));
          expected_lse.push_back(call.lse[at(call, e, t, h, 0, options_.heads) /
                                          static_cast<std::size_t>(options_.head_dim)]);
        }
      }
    }
    if (!found.empty()) {
      const double size = rms(expected);
      const double error = relative_rms(found, expected, 1e-30);
      if (options_.dtype == DType::f32) {
        EXPECT_LT(error, 2e-6);
        note_worst("cache fp32", error);
      } else {
        // Of rounding the exact results; of few numbers it may happen to be small.
        const double unit = options_.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
        const double one_piece =
            std::max(relative_rms(rounded(expected, options_.dtype), expected, 1e-30), unit / 4);
        EXPECT_LT(error, 2 * one_piece) << size;
        note_worst("cache 16 bit, error / one-piece error", error / one_piece);
      }
      EXPECT_LT(relative_rms(found_lse, expected_lse, 1.0), 2e-6);
    }
    found.insert(found.end(), found_lse.begin(), found_lse.end());
    return found;
  }

  [[nodiscard]] std::size_t at(const CacheCall& call, std::int64_t e, std::int64_t t,
                               std::int64_t h, std::int64_t d, std::int64_t heads) const {
    const std::int64_t token = tokens_[static_cast<std::size_t>(t)];
    return static_cast<std::size_t>(((e * call.rows + token) * heads + h) * options_.head_dim + d);
  }
  template <typename Body>
  void for_each(int heads, const Body& body) const {
    for (std::int64_t e = 0; e < options_.batch; ++e) {
      for (std::int64_t t = 0; t < std::ssize(tokens_); ++t) {
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < options_.head_dim; ++d) body(e, t, h, d);
        }
      }
    }
  }

  const CacheStory& story_;
  const CacheOptions& options_;
  Transport& transport_;
  RingCache cache_;
  ShardTensor sinks_;
  std::vector<std::int64_t> tokens_;  // of this rank's rows
};

}  // namespace

CacheStory random_cache_story(std::uint64_t seed, const StoryKind& kind) {
  return Writer(seed, kind).write();
}

void play(const CacheStory& story) {
  // [rank][call]
  std::vector<std::vector<std::vector<float>>> results(static_cast<std::size_t>(story.ranks));
  const std::vector<RankOutcome> outcomes = run_ranks(story.ranks, [&](Transport& transport) {
    Player player(story, transport);
    for (std::size_t i = 0; i < story.calls.size(); ++i)
      results[static_cast<std::size_t>(transport.rank())].push_back(player.play(i));
  });
  expect_everywhere(outcomes, "", {});
  for (std::size_t i = 0; i < story.calls.size(); ++i) {
    if (story.calls[i].placement || !story.calls[i].attends()) continue;
    for (const auto& rank : results) {
      if (rank.size() != story.calls.size()) return;  // it has failed, as said
      EXPECT_TRUE(std::equal(rank[i].begin(), rank[i].end(), results.front()[i].begin(),
                             results.front()[i].end(), [](float a, float b) { return a == b; }))
          << "call " << i << ": ranks have different bits";
    }
  }
}

}  // namespace annulus::test
