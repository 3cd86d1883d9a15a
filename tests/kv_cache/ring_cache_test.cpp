// A cache of keys and values over a ring: whatever is appended, dropped and asked for in whichever
// pieces, results are those of the whole sequence.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/reference.h"
#include "annulus/ring_cache.h"
#include "core/memory.h"
#include "kernels/head_dim.h"
#include "ring/tags.h"
#include "support/bad_luck.h"
#include "support/cache_story.h"
#include "support/ring_fixture.h"
#include "support/shards.h"

namespace annulus::test {
namespace {

std::string describe(const CacheStory& story) {
  const CacheOptions& o = story.options;
  return std::to_string(story.ranks) + " ranks, batch " + std::to_string(o.batch) + ", heads " +
         std::to_string(o.heads) + "/" + std::to_string(o.kv_heads) + ", dim " +
         std::to_string(o.head_dim) + ", " + name_of(o.dtype) + ", capacity " +
         std::to_string(o.capacity) + ", block " + std::to_string(o.block) + ", window (" +
         std::to_string(o.window.before) + ", " + std::to_string(o.window.after) + ")" +
         (o.causal ? ", causal" : "");
}

TEST(RingCache, EveryStoryMatchesTheReference) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    const CacheStory story = random_cache_story(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + describe(story));
    play(story);
    if (HasFailure()) return;
  }
}

// Chunks whose results ranks merge in shares.
TEST(RingCache, LongChunksMatchTheReference) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    CacheStory story = random_cache_story(seed, {5, 150, 5});
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + describe(story));
    play(story);
    if (HasFailure()) return;
  }
}

CacheOptions small_cache() {
  CacheOptions options;
  options.batch = 2;
  options.capacity = 40;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 16;
  options.block = 4;
  options.device = test_device();
  return options;
}

// One rank's tensors for calls of `rows` tokens.
struct CallTensors {
  CallTensors(const CacheOptions& options, std::int64_t rows)
      : q(options.dtype, options.batch, rows, options.heads, options.head_dim, Layout::dense),
        k(options.dtype, options.batch, rows, options.kv_heads, options.head_dim, Layout::dense),
        v(options.dtype, options.batch, rows, options.kv_heads, options.head_dim, Layout::dense),
        o(options.dtype, options.batch, rows, options.heads, options.head_dim, Layout::dense),
        lse(DType::f32, options.batch, rows, options.heads, 0, Layout::dense) {
    for (ShardTensor* tensor : {&q, &k, &v}) {
      tensor->fill(0.5F);
      tensor->upload();
    }
  }
  ShardTensor q, k, v, o, lse;
};

void append_chunk(RingCache& cache, CallTensors& t) {
  cache.append(t.k.view(), t.v.view());
  cache.synchronize();  // the tensors may go
}

TEST(RingCache, BytesOfAStepDoNotDependOnTheLength) {
  for (const bool placed : {false, true}) {
    CacheOptions options = small_cache();
    options.capacity = 4000;
    const int ranks = 3;
    run_in_process(ranks, [&](Transport& transport) {
      RingCache cache(options, transport);
      NewTokens tokens;
      if (placed) tokens.placement = Placement::contiguous(1, ranks);
      std::vector<std::uint64_t> sent;
      for (const std::int64_t length : {64, 1000, 3000}) {
        const std::int64_t rows = length - 1 - cache.lengths()[0];
        CallTensors chunk(options, rows);
        append_chunk(cache, chunk);
        const std::int64_t own = placed ? tokens.placement->local_tokens(transport.rank()) : 1;
        CallTensors one(options, own);
        const std::uint64_t before = transport.counters().bytes_sent;
        cache.step(one.q.view(), one.k.view(), one.v.view(), one.o.view(), one.lse.view(), tokens);
        cache.synchronize();
        // The token's keys go to the rank that keeps them, which changes.
        sent.push_back(transport.counters().bytes_sent - before -
                       static_cast<std::uint64_t>(placed && own == 1 && (length - 1) / 4 % 3 != 0
                                                      ? 2 * 2 * 2 * 16 * 4
                                                      : 0));
      }
      EXPECT_EQ(sent[0], sent[1]);
      EXPECT_EQ(sent[0], sent[2]);
    });
  }
}

// Fills a tensor with numbers that depend on where they are.
void fill_with_waves(ShardTensor& tensor, std::int64_t rows, int heads, int dim, double phase) {
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < dim; ++d) {
        const double x = std::sin(phase + 0.37 * static_cast<double>(t) * (d + 1) + 1.3 * h);
        tensor.set(0, t, h, d, static_cast<float>(x));
      }
    }
  }
  tensor.upload();
}

std::vector<double> values_of(const ShardTensor& tensor, std::int64_t rows, int heads, int dim) {
  std::vector<double> out;
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < dim; ++d) out.push_back(tensor.get(0, t, h, d));
    }
  }
  return out;
}

// So many keys that a rank cuts them into pieces, which it merges.
TEST(RingCache, LongSequencesMatchTheReference) {
  constexpr std::int64_t kKeys = 20'000;
  CacheOptions options = small_cache();
  options.batch = 1;
  options.heads = 3;
  options.kv_heads = 1;
  options.capacity = kKeys;
  CallTensors keys(options, kKeys);
  CallTensors query(options, 1);
  fill_with_waves(keys.k, kKeys, 1, 16, 0.1);
  fill_with_waves(keys.v, kKeys, 1, 16, 0.7);
  fill_with_waves(query.q, 1, 3, 16, 0.4);
  const reference::Output expected =
      reference::forward(dense(3), {1, 1, 3, 1, 16, kKeys}, values_of(query.q, 1, 3, 16),
                         values_of(keys.k, kKeys, 1, 16), values_of(keys.v, kKeys, 1, 16));
  for (const int ranks : {1, 2}) {
    run_in_process(ranks, [&](Transport& transport) {
      RingCache cache(options, transport);
      CallTensors one(options, 1);
      append_chunk(cache, keys);
      cache.attend(query.q.view(), one.o.view(), one.lse.view());
      cache.synchronize();
      one.o.download();
      one.lse.download();
      for (int h = 0; h < 3; ++h) {
        EXPECT_NEAR(one.lse.get(0, 0, h, 0), expected.lse[static_cast<std::size_t>(h)], 1e-5);
        for (int d = 0; d < 16; ++d) {
          EXPECT_NEAR(one.o.get(0, 0, h, d), expected.o[static_cast<std::size_t>(h * 16 + d)],
                      2e-6);
        }
      }
    });
  }
}

// So many queries that a grid of blocks has more of them than a GPU allows in all directions but
// one. Keys are 0: O is the mean of the three values that the window shows.
TEST(RingCache, ChunksMayHaveAnyLength) {
  struct Chunk {
    DType dtype;
    int heads, kv_heads;
    std::int64_t tokens;
  };
  for (const Chunk& chunk : {Chunk{DType::f32, 16, 16, 4096}, Chunk{DType::bf16, 64, 1, 16384}}) {
    SCOPED_TRACE(name_of(chunk.dtype));
    CacheOptions options = small_cache();
    options.batch = 1;
    options.heads = chunk.heads;
    options.kv_heads = chunk.kv_heads;
    options.head_dim = 8;
    options.dtype = chunk.dtype;
    options.window = {2, 0};
    options.capacity = chunk.tokens + 2;
    const auto value_of = [](std::int64_t token) { return static_cast<float>(token % 8); };
    run_in_process(1, [&](Transport& transport) {
      RingCache cache(options, transport);
      CallTensors t(options, chunk.tokens);
      t.k.fill(0.0F);
      for (std::int64_t token = 0; token < chunk.tokens; ++token) {
        for (int h = 0; h < chunk.kv_heads; ++h) {
          for (int d = 0; d < 8; ++d) t.v.set(0, token, h, d, value_of(token));
        }
      }
      for (ShardTensor* tensor : {&t.k, &t.v}) tensor->upload();
      append_chunk(cache, t);
      cache.attend(t.q.view(), t.o.view(), t.lse.view());
      cache.synchronize();
      t.o.download();
      t.lse.download();
      std::int64_t wrong = 0;
      for (std::int64_t token = 0; token < chunk.tokens; ++token) {
        const std::int64_t seen = std::min<std::int64_t>(3, token + 1);
        float sum = 0;
        for (std::int64_t i = 0; i < seen; ++i) sum += value_of(token - i);
        const float mean = sum / static_cast<float>(seen);
        const double lse = std::log(static_cast<double>(seen));
        for (int h = 0; h < chunk.heads; ++h) {
          const bool right = std::abs(t.o.get(0, token, h, 7) - mean) <= 0.01F * mean &&
                             std::abs(t.lse.get(0, token, h, 0) - lse) < 1e-5;
          wrong += right ? 0 : 1;
        }
      }
      EXPECT_EQ(wrong, 0) << "rows";
    });
  }
}

// Not even if it is NaN: of the new tokens the later ones, and what has left the window.
TEST(RingCache, KeysThatAQuerySeesNothingOfChangeNoBit) {
  CacheOptions options = small_cache();
  options.batch = 1;
  options.window = {6, -1};
  const auto last_row = [&](Transport& transport, float hidden) {
    RingCache cache(options, transport);
    CallTensors old(options, 10);
    CallTensors fresh(options, 5);
    fill_with_waves(old.k, 10, 2, 16, 0.2);
    fill_with_waves(old.v, 10, 2, 16, 0.5);
    for (ShardTensor* tensor : {&fresh.k, &fresh.v}) fill_with_waves(*tensor, 5, 2, 16, 0.9);
    fill_with_waves(fresh.q, 5, 4, 16, 0.3);
    for (int h = 0; h < 2; ++h) {
      for (int d = 0; d < 16; ++d) {
        for (ShardTensor* tensor : {&old.k, &old.v}) tensor->set(0, 6, h, d, hidden);
        for (ShardTensor* tensor : {&fresh.k, &fresh.v}) tensor->set(0, 4, h, d, hidden);
      }
    }
    for (ShardTensor* tensor : {&old.k, &old.v, &fresh.k, &fresh.v}) tensor->upload();
    append_chunk(cache, old);
    cache.step(fresh.q.view(), fresh.k.view(), fresh.v.view(), fresh.o.view(), fresh.lse.view());
    cache.synchronize();
    fresh.o.download();
    return values_of(fresh.o, 4, 4, 16);  // tokens 10 to 13; the window of 13 begins at 7
  };
  for (const DType dtype : kDTypes) {
    for (const int ranks : {1, 3}) {
      options.dtype = dtype;
      run_in_process(ranks, [&](Transport& transport) {
        const std::vector<double> usual = last_row(transport, 0.5F);
        for (const float hidden : {NAN, INFINITY}) {
          const std::vector<double> found = last_row(transport, hidden);
          // Token 13 sees neither.
          for (std::size_t i = 3 * 4 * 16; i < found.size(); ++i) EXPECT_EQ(found[i], usual[i]);
        }
      });
    }
  }
}

// A window holds memory for itself and a chunk, however long the sequence becomes.
TEST(RingCache, AWindowBoundsTheMemory) {
  CacheOptions options = small_cache();
  options.window = {20, -1};
  options.capacity = 23;
  run_in_process(2, [&](Transport& transport) {
    RingCache cache(options, transport);
    CallTensors chunk(options, 3);
    for (int i = 0; i < 500; ++i) {
      cache.step(chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.o.view(), chunk.lse.view());
    }
    cache.synchronize();
    EXPECT_EQ(cache.lengths()[0], 1500);
    // Four stripes of two blocks of four tokens, of which one rank has half.
    EXPECT_EQ(cache.cache_bytes(), 2 * 2 * 2 * 16 * padded_head_dim(16) * 4);
    chunk.o.download();
    for (int d = 0; d < 16; ++d) EXPECT_FLOAT_EQ(chunk.o.get(1, 2, 3, d), 0.5F);
  });
}

// ---- what one rank or all of them get wrong

struct CacheFault {
  const char* name;
  std::function<void(RingCache&, CallTensors&)> call;
  std::vector<std::string> texts;
};

std::vector<CacheFault> cache_faults() {
  return {
      {"tokens of another shape",
       [](RingCache& cache, CallTensors& t) {
         TensorView k = t.k.view();
         k.shape[2] = 3;
         cache.append(k, t.v.view());
       },
       {"k is [2, 3, 3, 16], expected [2, 3, 2, 16]"}},
      {"another dtype",
       [](RingCache& cache, CallTensors& t) {
         TensorView v = t.v.view();
         v.dtype = DType::bf16;
         cache.append(t.k.view(), v);
       },
       {"v is bf16, expected fp32"}},
      {"too many tokens",
       [](RingCache& cache, CallTensors&) {
         CallTensors many(small_cache(), 41);
         append_chunk(cache, many);
       },
       {"entry 0 has 3 tokens and gets 41, the cache has room for 40", "larger capacity"}},
      {"queries without keys",
       [](RingCache& cache, CallTensors&) {
         CallTensors many(small_cache(), 4);
         cache.attend(many.q.view(), many.o.view(), many.lse.view());
       },
       {"q has 4 tokens of entry 0, which has 3", "append their keys first"}},
      {"counts of another batch",
       [](RingCache& cache, CallTensors& t) {
         const std::vector<std::int64_t> counts{1, 1, 1};
         cache.append(t.k.view(), t.v.view(), {counts, {}});
       },
       {"3 numbers of new tokens, expected 2"}},
      {"counts past the tensor",
       [](RingCache& cache, CallTensors& t) {
         const std::vector<std::int64_t> counts{1, 4};
         cache.append(t.k.view(), t.v.view(), {counts, {}});
       },
       {"entry 1 has 4 new tokens, expected 0 to the 3 tokens"}},
      {"a placement for other ranks",
       [](RingCache& cache, CallTensors& t) {
         cache.append(t.k.view(), t.v.view(), {{}, Placement::contiguous(3, 5)});
       },
       {"placement 'contiguous' is for 5 ranks, the transport has 3"}},
      {"results over inputs",
       [](RingCache& cache, CallTensors& t) { cache.attend(t.q.view(), t.q.view(), t.lse.view()); },
       {"o shares memory with q"}},
  };
}

TEST(RingCache, MistakesAreErrorsOnAllRanksAndTheCacheGoesOn) {
  for (const CacheFault& fault : cache_faults()) {
    for (const bool everywhere : {true, false}) {
      SCOPED_TRACE(fault.name + std::string(everywhere ? ", everywhere" : ", on rank 1"));
      const auto ring = make_in_process_ring(3);
      std::vector<std::unique_ptr<RingCache>> caches(3);
      std::vector<std::unique_ptr<CallTensors>> tensors(3);
      const auto go = [&](const std::function<void(RingCache&, CallTensors&, int)>& body) {
        return run_ranks(ring, [&](Transport& transport) {
          const auto rank = static_cast<std::size_t>(transport.rank());
          body(*caches[rank], *tensors[rank], transport.rank());
        });
      };
      run_in_process(ring, [&](Transport& transport) {
        const auto rank = static_cast<std::size_t>(transport.rank());
        caches[rank] = std::make_unique<RingCache>(small_cache(), transport);
        tensors[rank] = std::make_unique<CallTensors>(small_cache(), 3);
        append_chunk(*caches[rank], *tensors[rank]);
      });
      const auto outcomes = go([&](RingCache& cache, CallTensors& t, int rank) {
        if (everywhere || rank == 1) return fault.call(cache, t);
        if (std::string(fault.name).find("queries") == 0 || fault.texts[0][0] == 'o')
          return cache.attend(t.q.view(), t.o.view(), t.lse.view());
        append_chunk(cache, t);
      });
      expect_everywhere(outcomes, "ConfigError", fault.texts);
      expect_everywhere(go([&](RingCache& cache, CallTensors& t, int) {
                          cache.step(t.q.view(), t.k.view(), t.v.view(), t.o.view(), t.lse.view());
                          cache.synchronize();
                          EXPECT_EQ(cache.lengths()[0], 6);
                        }),
                        "", {});
    }
  }
}

thread_local bool has_memory = true;

bool spare_partial_results(std::int64_t, const char* what) {
  return has_memory || std::string_view(what) != "partial results of a cache";
}

// Long sequences are attended to in parts, whose results need memory. It is taken before the ranks
// agree on a call.
TEST(RingCache, ALackOfMemoryOnOneRankIsAnErrorOfAllBeforeAnythingChanges) {
  CacheOptions options = small_cache();
  options.batch = 1;
  options.capacity = 20000;
  const AllocationHook before = set_allocation_hook(&spare_partial_results);
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    RingCache cache(options, transport);
    CallTensors chunk(options, 17999);
    append_chunk(cache, chunk);
    CallTensors one(options, 1);
    const auto step = [&] {
      cache.step(one.q.view(), one.k.view(), one.v.view(), one.o.view(), one.lse.view());
      cache.synchronize();
    };
    has_memory = transport.rank() != 1;
    EXPECT_THROW(step(), OutOfMemory);
    EXPECT_EQ(cache.lengths()[0], 17999);
    has_memory = true;
    step();
    EXPECT_EQ(cache.lengths()[0], 18000);
  });
  set_allocation_hook(before);
  expect_everywhere(outcomes, "", {});
}

TEST(RingCache, ARankWithoutItsDeviceSaysSo) {
  const FeignedLuck luck;
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    FeignedLuck::of_this_thread = transport.rank() == 1 ? Luck::no_device : Luck::good;
    const RingCache cache(small_cache(), transport);
  });
  EXPECT_EQ(outcomes[0].kind, "ConfigError");
  EXPECT_NE(outcomes[0].message.find("rank 1 refused: the device is on fire"), std::string::npos);
  EXPECT_EQ(outcomes[1].kind, "DeviceError");
}

TEST(RingCache, RanksThatDoNotDoTheSameAreTold) {
  const auto differ = [&](const std::function<void(RingCache&, CallTensors&, bool)>& body,
                          const Texts& texts) {
    expect_everywhere(run_ranks(3,
                                [&](Transport& transport) {
                                  RingCache cache(small_cache(), transport);
                                  CallTensors t(small_cache(), 3);
                                  append_chunk(cache, t);
                                  body(cache, t, transport.rank() == 1);
                                }),
                      "ConfigError", texts);
  };
  differ(
      [](RingCache& cache, CallTensors& t, bool other) {
        if (other) return append_chunk(cache, t);
        cache.attend(t.q.view(), t.o.view(), t.lse.view());
      },
      {"disagree about the call", "RingCache::append", "RingCache::attend"});
  differ(
      [](RingCache& cache, CallTensors& t, bool other) {
        if (other) cache.truncate(1, 2);
        append_chunk(cache, t);
      },
      {"disagree about the entries' lengths: rank 1 has 3,2, rank 0 has 3,3"});
  differ(
      [](RingCache& cache, CallTensors& t, bool other) {
        const std::vector<std::int64_t> counts{1, other ? 2 : 1};
        cache.append(t.k.view(), t.v.view(), {counts, {}});
      },
      {"disagree about the numbers of new tokens: rank 1 has 1,2, rank 0 has 1,1"});
  expect_everywhere(run_ranks(2,
                              [&](Transport& transport) {
                                CacheOptions options = small_cache();
                                options.block += transport.rank();
                                RingCache cache(options, transport);
                              }),
                    "ConfigError", {"disagree about block: rank 1 has 5, rank 0 has 4"});
}

TEST(RingCache, OptionsThatMakeNoSenseAreRejected) {
  const std::pair<std::function<void(CacheOptions&)>, const char*> wrong[] = {
      {[](CacheOptions& o) { o.capacity = 0; }, "capacity is 0, expected at least 1"},
      {[](CacheOptions& o) { o.block = 0; }, "block is 0, expected at least 1"},
      {[](CacheOptions& o) { o.kv_heads = 3; }, "kv_heads is 3, expected a divisor of the 4"},
      {[](CacheOptions& o) { o.head_dim = 513; }, "head_dim is 513, expected 1 to 512"},
      {[](CacheOptions& o) {
         o.window = {4, 2};
       },
       "window is (4, 2)"},
      {[](CacheOptions& o) { o.scale = -1.0; }, "scale is -1"},
  };
  for (const auto& [spoil, text] : wrong) {
    CacheOptions options = small_cache();
    spoil(options);
    expect_everywhere(
        run_ranks(2, [&](Transport& transport) { RingCache cache(options, transport); }),
        "ConfigError", {text});
  }
}

TEST(RingCache, TokensThatHaveBeenDroppedAreNotAskedFor) {
  CacheOptions options = small_cache();
  options.window = {8, -1};
  options.capacity = 11;
  expect_everywhere(run_ranks(1,
                              [&](Transport& transport) {
                                RingCache cache(options, transport);
                                CallTensors t(options, 3);
                                for (int i = 0; i < 20; ++i) append_chunk(cache, t);
                                cache.truncate(0, 58);
                                cache.truncate(0, 20);
                              }),
                    "ConfigError", {"length is 20, and tokens of entry 0 before"});
  expect_everywhere(run_ranks(2,
                              [&](Transport& transport) {
                                RingCache cache(options, transport);
                                CallTensors t(options, 3);
                                for (int i = 0; i < 20; ++i) append_chunk(cache, t);
                                CallTensors many(options, 30);
                                cache.attend(many.q.view(), many.o.view(), many.lse.view());
                              }),
                    "ConfigError", {"begins at token 22, and tokens before", "have been dropped"});
  expect_everywhere(run_ranks(2,
                              [&](Transport& transport) {
                                RingCache cache(options, transport);
                                CallTensors many(options, 30);
                                append_chunk(cache, many);
                                append_chunk(cache, many);
                              }),
                    "ConfigError", {"append fewer at once"});
}

TEST(RingCache, ARankThatFailsIsATransportErrorOnTheOthers) {
  const std::vector<RankOutcome> outcomes = run_ranks(3, [&](Transport& inner) {
    WatchedTransport transport(inner);
    RingCache cache(small_cache(), transport);
    CallTensors t(small_cache(), 15);
    append_chunk(cache, t);
    if (transport.rank() == 1) transport.fail_after(ring::kTagCache, 1);
    cache.attend(t.q.view(), t.o.view(), t.lse.view());
    cache.synchronize();
  });
  for (const int rank : {0, 2}) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(outcome.kind, "TransportError");
    EXPECT_EQ(outcome.lost_rank, 1) << outcome.message;
  }
  EXPECT_NE(outcomes[1].message.find("rank failure for the test"), std::string::npos);
}

}  // namespace
}  // namespace annulus::test
