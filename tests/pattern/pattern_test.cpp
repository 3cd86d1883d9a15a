#include "annulus/pattern.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

using List = std::vector<std::int64_t>;

Pattern one_branch(std::int64_t segment, std::int64_t dilation, std::int64_t offset,
                   bool causal = false) {
  return {"test", 1, causal, {Branch{segment, dilation, {offset}}}, 1.0};
}

List selected(const Branch& branch, int head, std::int64_t tokens) {
  List positions;
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (branch.selects(head, t)) positions.push_back(t);
  }
  return positions;
}

List keys_of(const Pattern& pattern, std::int64_t query, std::int64_t tokens) {
  List keys;
  for (std::int64_t p = 0; p < tokens; ++p) {
    if (pattern.allows(pattern.branches[0], 0, query, p)) keys.push_back(p);
  }
  return keys;
}

Pattern random_pattern(std::mt19937& random, std::int64_t tokens) {
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  Pattern pattern;
  pattern.name = "random";
  pattern.heads = static_cast<int>(draw(1, 4));
  pattern.causal = draw(0, 1) == 1;
  const std::int64_t branches = draw(1, 3);
  for (std::int64_t b = 0; b < branches; ++b) {
    Branch branch;
    branch.segment_length = draw(0, 5) == 0 ? kWholeSequence : draw(1, tokens + 3);
    branch.dilation = draw(1, draw(0, 1) == 0 ? 4 : tokens + 3);
    for (int h = 0; h < pattern.heads; ++h) branch.offset.push_back(draw(-1, branch.dilation - 1));
    pattern.branches.push_back(branch);
  }
  return pattern;
}

// Runs `action`, which must throw a ConfigError whose message contains every one of `parts`.
void expect_refused(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const ConfigError& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << error.what() << "' does not mention '" << part << "'";
    }
    return;
  }
  ADD_FAILURE() << "accepted; expected a ConfigError that mentions '" << parts.front() << "'";
}

TEST(Pattern, SelectionRestartsInEverySegment) {
  EXPECT_EQ(selected(Branch{4, 2, {1}}, 0, 10), (List{1, 3, 5, 7, 9}));
  // 5 is not a multiple of 2: position 5 is the first of its segment, hence selected.
  EXPECT_EQ(selected(Branch{5, 2, {0}}, 0, 12), (List{0, 2, 4, 5, 7, 9, 10}));
  EXPECT_EQ(selected(Branch{4, 2, {-1}}, 0, 10), List{});
}

TEST(Pattern, QueriesAttendSelectedKeysOfTheirSegment) {
  EXPECT_EQ(keys_of(one_branch(5, 2, 0), 7, 12), (List{5, 7, 9}));
  EXPECT_EQ(keys_of(one_branch(5, 2, 0), 10, 12), (List{10}));  // ragged last segment
  EXPECT_EQ(keys_of(one_branch(5, 2, 0), 6, 12), List{});       // query not selected
  EXPECT_EQ(keys_of(one_branch(5, 2, 0, true), 7, 12), (List{5, 7}));
}

TEST(Pattern, DilationAboveSegmentLeavesAtMostOneKeyPerSegment) {
  EXPECT_NO_THROW(one_branch(3, 5, 4).validate());
  EXPECT_EQ(selected(Branch{3, 5, {2}}, 0, 9), (List{2, 5, 8}));
  EXPECT_EQ(keys_of(one_branch(3, 5, 2), 5, 9), (List{5}));
  EXPECT_EQ(selected(Branch{3, 5, {4}}, 0, 9), List{});
  EXPECT_EQ(allowed_pairs(one_branch(3, 5, 2), 9), 3.0);
  EXPECT_EQ(allowed_pairs(one_branch(3, 5, 4), 9), 0.0);
}

TEST(Pattern, AllowsExactlyThePairsOfTheArithmeticProgressions) {
  for (unsigned seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::int64_t tokens = std::uniform_int_distribution<std::int64_t>(1, 24)(random);
    const Pattern pattern = random_pattern(random, tokens);
    for (const Branch& branch : pattern.branches) {
      const std::int64_t w = std::min(branch.segment_length, tokens);
      for (int h = 0; h < pattern.heads; ++h) {
        std::vector<bool> expected(static_cast<std::size_t>(tokens * tokens), false);
        const std::int64_t offset = branch.offset[static_cast<std::size_t>(h)];
        for (std::int64_t s = 0; s < tokens && offset >= 0; s += w) {
          const std::int64_t end = std::min(s + w, tokens);
          for (std::int64_t t = s + offset; t < end; t += branch.dilation) {
            for (std::int64_t p = s + offset; p < end; p += branch.dilation) {
              expected[static_cast<std::size_t>(t * tokens + p)] = !pattern.causal || p <= t;
            }
          }
        }
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t p = 0; p < tokens; ++p) {
            ASSERT_EQ(pattern.allows(branch, h, t, p),
                      expected[static_cast<std::size_t>(t * tokens + p)])
                << "head " << h << " query " << t << " key " << p;
          }
        }
      }
    }
  }
}

TEST(Presets, DenseIsOneBranchOverTheWholeSequence) {
  const Pattern pattern = dense(3, true);
  pattern.validate();
  EXPECT_EQ(pattern.heads, 3);
  EXPECT_TRUE(pattern.causal);
  EXPECT_EQ(pattern.output_scale, 1.0);
  ASSERT_EQ(pattern.branches.size(), 1U);
  EXPECT_EQ(pattern.branches[0].segment_length, kWholeSequence);
  EXPECT_EQ(pattern.branches[0].dilation, 1);
  EXPECT_EQ(pattern.branches[0].offset, (List{0, 0, 0}));
}

TEST(Presets, HeadGroupsShareTheHeadsOutAndTheFirstGetTheRest) {
  const Pattern pattern = head_groups(5, List{4, 8, 16}, List{1, 2, 4});
  pattern.validate();
  EXPECT_FALSE(pattern.causal);
  EXPECT_EQ(pattern.output_scale, 1.0);
  ASSERT_EQ(pattern.branches.size(), 3U);
  EXPECT_EQ(pattern.branches[0].offset, (List{0, 0, -1, -1, -1}));
  EXPECT_EQ(pattern.branches[1].offset, (List{-1, -1, 1, 1, -1}));
  EXPECT_EQ(pattern.branches[2].offset, (List{-1, -1, -1, -1, 2}));
  EXPECT_EQ(pattern.branches[2].segment_length, 16);
  EXPECT_EQ(pattern.branches[2].dilation, 4);
}

TEST(Presets, HeadGroupsTakeTheOffsetModuloTheDilation) {
  const Pattern pattern = head_groups(4, List{8, 8, 8, 8}, List{1, 1, 2, 3});
  pattern.validate();
  EXPECT_EQ(pattern.branches[1].offset, (List{-1, 0, -1, -1}));
  EXPECT_EQ(pattern.branches[2].offset, (List{-1, -1, 0, -1}));
  EXPECT_EQ(pattern.branches[3].offset, (List{-1, -1, -1, 0}));
}

TEST(Presets, GroupScaleIsOneOverTheNumberOfBranches) {
  EXPECT_EQ(
      longnet(4, List{4, 8, 8, 8}, List{1, 2, 4, 8}, false, Offsets::blocked, true).output_scale,
      0.25);
  EXPECT_EQ(longnet(4, List{4, 8}, List{1, 2}).output_scale, 1.0);
  EXPECT_EQ(head_groups(4, List{4, 8}, List{1, 2}, false, true).output_scale, 0.5);
}

TEST(Presets, LongnetBlockedGivesNeighbouringHeadsOneOffset) {
  const Pattern pattern = longnet(6, List{8, 16, 32, 64}, List{1, 2, 4, 16}, true);
  pattern.validate();
  EXPECT_TRUE(pattern.causal);
  ASSERT_EQ(pattern.branches.size(), 4U);
  EXPECT_EQ(pattern.branches[0].offset, (List{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(pattern.branches[1].offset, (List{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(pattern.branches[2].offset, (List{0, 0, 1, 1, 2, 2}));  // ceil(6/4) = 2
  EXPECT_EQ(pattern.branches[3].offset, (List{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(pattern.branches[3].segment_length, 64);
  EXPECT_EQ(pattern.branches[3].dilation, 16);
}

TEST(Presets, LongnetInterleavedCyclesThroughTheOffsets) {
  const Pattern pattern = longnet(6, List{8, 16}, List{1, 4}, false, Offsets::interleaved);
  pattern.validate();
  EXPECT_EQ(pattern.branches[0].offset, (List{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(pattern.branches[1].offset, (List{0, 1, 2, 3, 0, 1}));
}

// Every query sees each key of its segment at a multiple of the dilation from it, in one branch.
TEST(Presets, LongnetWithAllOffsetsLeavesNoRowOut) {
  for (const std::int64_t r : {1, 3, 4, 20}) {
    const Pattern pattern = longnet(2, List{10, 17}, List{r, 2}, false, Offsets::all, true);
    pattern.validate();
    const std::size_t first = static_cast<std::size_t>(std::min<std::int64_t>(r, 10));
    ASSERT_EQ(pattern.branches.size(), first + 2);
    EXPECT_EQ(pattern.output_scale, 0.5);  // one over the segment lengths, whatever the offsets
    for (std::int64_t query = 0; query < 30; ++query) {
      for (std::int64_t key = 0; key < 30; ++key) {
        const auto branches = [&](std::size_t begin, std::size_t end) {
          int count = 0;
          for (std::size_t b = begin; b < end; ++b)
            count += pattern.allows(pattern.branches[b], 1, query, key) ? 1 : 0;
          return count;
        };
        EXPECT_EQ(branches(0, first), query / 10 == key / 10 && (query - key) % r == 0 ? 1 : 0);
        EXPECT_EQ(branches(first, first + 2),
                  query / 17 == key / 17 && (query - key) % 2 == 0 ? 1 : 0);
      }
    }
  }
  EXPECT_NO_THROW(longnet(1, List{1 << 20}, List{1024}, false, Offsets::all).validate());
  EXPECT_THROW((void)longnet(1, List{1 << 20}, List{1025}, false, Offsets::all), ConfigError);
  EXPECT_THROW((void)longnet(1, List{4096, 4096}, List{1000, 25}, false, Offsets::all),
               ConfigError);
  EXPECT_THROW((void)longnet(1, List{kWholeSequence}, List{kWholeSequence}, false, Offsets::all),
               ConfigError);
}

TEST(Presets, AreValidForEveryNumberOfHeadsAndDilation) {
  for (int heads = 1; heads <= 33; ++heads) {
    for (std::int64_t r = 1; r <= 40; ++r) {
      SCOPED_TRACE("heads " + std::to_string(heads) + " dilation " + std::to_string(r));
      const List dilation = {r};
      EXPECT_NO_THROW(longnet(heads, List{16}, dilation).validate());
      for (const Offsets offsets : {Offsets::interleaved, Offsets::all})
        EXPECT_NO_THROW(longnet(heads, List{16}, dilation, false, offsets).validate());
      EXPECT_NO_THROW(head_groups(heads, List{16}, dilation).validate());
    }
  }
  EXPECT_NO_THROW(longnet(8, List{kWholeSequence}, List{kWholeSequence}).validate());
}

TEST(AllowedPairs, KnownCounts) {
  EXPECT_EQ(allowed_pairs(dense(2), 10), 200.0);
  EXPECT_EQ(allowed_pairs(dense(2, true), 10), 110.0);
  EXPECT_EQ(allowed_pairs(dense(2), 0), 0.0);
  // Segments 0..4, 5..9 and 10..11 select 3, 3 and 1 rows.
  EXPECT_EQ(allowed_pairs(one_branch(5, 2, 0), 12), 9.0 + 9.0 + 1.0);
  EXPECT_EQ(allowed_pairs(one_branch(5, 2, 0, true), 12), 6.0 + 6.0 + 1.0);
}

TEST(AllowedPairs, EqualsBruteForce) {
  for (unsigned seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::int64_t tokens = std::uniform_int_distribution<std::int64_t>(1, 40)(random);
    const Pattern pattern = random_pattern(random, tokens);
    std::int64_t pairs = 0;
    for (const Branch& branch : pattern.branches) {
      for (const std::int64_t offset : branch.offset) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t p = 0; p < tokens; ++p) {
            const std::int64_t w = branch.segment_length;
            const std::int64_t r = branch.dilation;
            if (t / w == p / w && t % w % r == offset && p % w % r == offset) {
              pairs += !pattern.causal || p <= t ? 1 : 0;
            }
          }
        }
      }
    }
    EXPECT_EQ(allowed_pairs(pattern, tokens), static_cast<double>(pairs));
  }
}

TEST(AllowedPairs, IsClosedFormForVeryLongSequences) {
  // 10^6 tokens: 488 segments of 2048 and one of 576.
  EXPECT_EQ(allowed_pairs(one_branch(2048, 1, 0), 1'000'000), 488.0 * 2048 * 2048 + 576.0 * 576);
  // 2^40 tokens, 2^25 segments of 2^15: every head of every branch sees (w / r)^2 pairs a segment.
  const Pattern pattern = longnet(16, List{32768, 32768}, List{1, 16});
  EXPECT_EQ(allowed_pairs(pattern, std::int64_t{1} << 40),
            16.0 * std::ldexp(1.0, 25) * (32768.0 * 32768.0 + 2048.0 * 2048.0));
}

TEST(PatternErrors, BadPresetArgumentsAreRefused) {
  const auto refuse_longnet = [](int heads, const List& segments, const List& dilations,
                                 const std::vector<std::string>& parts) {
    expect_refused([&] { static_cast<void>(longnet(heads, segments, dilations)); }, parts);
  };
  const auto refuse_groups = [](int heads, const List& segments, const List& dilations,
                                const std::vector<std::string>& parts) {
    expect_refused([&] { static_cast<void>(head_groups(heads, segments, dilations)); }, parts);
  };
  expect_refused([] { static_cast<void>(dense(0)); }, {"dense", "heads is 0", "at least 1"});
  refuse_longnet(0, {4}, {1}, {"longnet", "heads is 0"});
  refuse_longnet(2, {}, {}, {"longnet", "empty"});
  refuse_longnet(2, {4, 8}, {1}, {"longnet", "2 segments", "1 dilations"});
  refuse_longnet(2, {4, 0}, {1, 2}, {"segments[1] is 0"});
  refuse_longnet(2, {4, 8}, {1, -2}, {"dilations[1] is -2"});
  refuse_groups(-1, {4}, {1}, {"head_groups", "heads is -1"});
  refuse_groups(2, {}, {}, {"head_groups", "empty"});
  refuse_groups(2, {4}, {1, 2}, {"1 segments", "2 dilations"});
  refuse_groups(2, {4, 8}, {1, 0}, {"dilations[1] is 0"});
  refuse_groups(2, {4, 8, 16}, {1, 2, 4}, {"3 branches", "2 heads"});
}

TEST(PatternErrors, ValidateRefusesMalformedPatterns) {
  const auto refuse = [](const std::function<void(Pattern&)>& spoil,
                         const std::vector<std::string>& parts) {
    Pattern pattern = longnet(2, List{4, 8}, List{1, 2});
    pattern.validate();
    spoil(pattern);
    expect_refused([&] { pattern.validate(); }, parts);
    expect_refused([&] { static_cast<void>(allowed_pairs(pattern, 16)); }, parts);
  };
  refuse([](Pattern& p) { p.heads = 0; }, {"longnet", "heads is 0"});
  refuse([](Pattern& p) { p.heads = 3; }, {"branch 0", "2 offsets", "3"});
  refuse([](Pattern& p) { p.branches.clear(); }, {"no branches"});
  refuse([](Pattern& p) { p.branches[1].segment_length = 0; }, {"branch 1", "segment_length is 0"});
  refuse([](Pattern& p) { p.branches[1].dilation = 0; }, {"branch 1", "dilation is 0"});
  refuse([](Pattern& p) { p.branches[1].offset = {0}; }, {"branch 1", "1 offsets"});
  refuse([](Pattern& p) { p.branches[1].offset[1] = 2; }, {"branch 1", "head 1 is 2", "0..1"});
  refuse([](Pattern& p) { p.branches[0].offset[0] = -2; }, {"branch 0", "head 0 is -2"});
  refuse([](Pattern& p) { p.output_scale = std::numeric_limits<double>::quiet_NaN(); },
         {"output_scale is nan"});
  refuse([](Pattern& p) { p.output_scale = 1e300; }, {"output_scale is 1", "fp32"});
}

TEST(PatternErrors, NegativeTokensAreRefused) {
  expect_refused([] { static_cast<void>(allowed_pairs(dense(1), -1)); }, {"tokens is -1"});
}

}  // namespace
}  // namespace annulus
