#include "pattern/segments.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "support/random_plans.h"

namespace annulus {
namespace {

using test::Random;

Pattern one_branch(std::int64_t segment_length, std::int64_t dilation, std::int64_t offset) {
  Pattern pattern;
  pattern.heads = 1;
  pattern.branches.push_back({segment_length, dilation, {offset}});
  return pattern;
}

// Every selected token is in exactly the segment and at the index that Pattern::allows implies.
TEST(Segments, HoldEveryTokenOnceOnEachSide) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::int64_t queries = random.between(0, 60);
    const std::int64_t keys = random.coin() ? queries : random.between(0, 60);
    Pattern pattern = one_branch(random.coin() ? kWholeSequence : random.between(1, 70), 1, 0);
    pattern.documents = test::any_documents(random, queries, keys);
    const Segments segments(pattern.documents, pattern.branches[0], queries, keys);
    std::vector<std::int64_t> query_segment(static_cast<std::size_t>(queries), -1);
    std::vector<std::int64_t> key_segment(static_cast<std::size_t>(keys), -1);
    for (const Side side : {Side::queries, Side::keys}) {
      auto& of_token = side == Side::queries ? query_segment : key_segment;
      for (std::int64_t s = 0; s < segments.count(); ++s) {
        const Segments::Part part = segments.part(side, s);
        ASSERT_LE(part.begin, part.end);
        for (std::int64_t t = part.begin; t < part.end; ++t) {
          ASSERT_EQ(of_token[static_cast<std::size_t>(t)], -1) << "a token in two segments";
          of_token[static_cast<std::size_t>(t)] = s;
        }
      }
      const auto tokens = static_cast<std::int64_t>(of_token.size());
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t s = of_token[static_cast<std::size_t>(t)];
        if (s < 0) continue;
        EXPECT_EQ(segments.at_or_after(side, t), s);
        EXPECT_EQ(segments.at_or_before(side, t), s);
      }
    }
    for (std::int64_t q = 0; q < queries; ++q) {
      for (std::int64_t k = 0; k < keys; ++k) {
        const std::int64_t s = query_segment[static_cast<std::size_t>(q)];
        EXPECT_EQ(pattern.allows(pattern.branches[0], 0, q, k),
                  s >= 0 && s == key_segment[static_cast<std::size_t>(k)])
            << q << ", " << k;
      }
    }
    if (HasFailure()) return;
  }
}

TEST(Segments, SegmentsUpToAlikeUntilHoldAsManyRows) {
  int longer = 0;  // than one segment
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::int64_t tokens = random.between(1, 80);
    Pattern pattern = one_branch(random.between(1, 12), 1, 0);
    pattern.documents = test::any_documents(random, tokens, tokens);
    const Segments segments(pattern.documents, pattern.branches[0], tokens, tokens);
    for (std::int64_t s = 0; s < segments.count(); ++s) {
      const std::int64_t until = segments.alike_until(s, segments.count());
      ASSERT_GT(until, s);
      longer += until > s + 1 ? 1 : 0;
      for (std::int64_t other = s; other < until; ++other) {
        for (const Side side : {Side::queries, Side::keys}) {
          const Segments::Part a = segments.part(side, s);
          const Segments::Part b = segments.part(side, other);
          ASSERT_EQ(a.end - a.begin, b.end - b.begin);
          ASSERT_EQ(a.begin - a.origin, b.begin - b.origin);
        }
      }
    }
  }
  EXPECT_GT(longer, 1000);
}

TEST(Documents, EveryQueryAttendsOnlyIfItDoes) {
  int promised = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::int64_t queries = random.between(1, 30);
    const std::int64_t keys = random.coin() ? queries : random.between(1, 30);
    Pattern pattern = test::any_pattern(random, queries, 2);
    pattern.documents = test::any_documents(random, queries, keys);
    if (!every_query_attends(pattern, queries, keys, 1)) continue;
    ++promised;
    for (std::int64_t q = 0; q < queries; ++q) {
      for (int head = 0; head < 2; ++head) {
        bool attends = false;
        for (const Branch& branch : pattern.branches) {
          for (std::int64_t k = 0; k < keys; ++k)
            attends = attends || pattern.allows(branch, head, q, k);
        }
        EXPECT_TRUE(attends) << "query " << q << ", head " << head;
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(promised, 100);
}

TEST(Documents, RestartPositionsAndSegments) {
  Pattern pattern = one_branch(4, 2, 1);  // positions 1, 3 of each segment of 4
  const std::int64_t boundaries[] = {0, 3, 3, 10};
  pattern.documents = packed_documents(boundaries);
  const auto keys_of = [&](std::int64_t query) {
    std::vector<std::int64_t> keys;
    for (std::int64_t k = 0; k < 10; ++k) {
      if (pattern.allows(pattern.branches[0], 0, query, k)) keys.push_back(k);
    }
    return keys;
  };
  using Keys = std::vector<std::int64_t>;
  EXPECT_EQ(keys_of(1), Keys{1});
  EXPECT_EQ(keys_of(3), Keys{});  // position 0 of the third document
  EXPECT_EQ(keys_of(4), (Keys{4, 6}));
  EXPECT_EQ(keys_of(8), Keys{8});
}

// A chunk of 3 queries behind 5 keys that are in a cache, causal.
TEST(Documents, PlaceQueriesBehindTheKeysOfACache) {
  Pattern pattern = dense(1, true);
  pattern.documents = {{.query_end = 3, .key_end = 8, .query_start = 5}};
  for (std::int64_t q = 0; q < 3; ++q) {
    for (std::int64_t k = 0; k < 8; ++k)
      EXPECT_EQ(pattern.allows(pattern.branches[0], 0, q, k), k <= q + 5);
  }
  EXPECT_EQ(allowed_pairs(pattern, 3, 8), 6.0 + 7.0 + 8.0);
}

void expect_refused(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
    ADD_FAILURE() << "accepted, expected a ConfigError with " << parts.front();
  } catch (const ConfigError& error) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Documents, ErrorsSayWhatIsWrong) {
  using List = std::vector<std::int64_t>;
  const auto pack = [](const List& boundaries) {
    return [boundaries] { static_cast<void>(packed_documents(boundaries)); };
  };
  expect_refused(pack({}), {"begin with nothing", "expected 0"});
  expect_refused(pack({2, 5}), {"begin with 2"});
  expect_refused(pack({0, 5, 4}), {"boundary 2 is 4", "at least the one before, 5"});

  const auto validate = [](std::vector<Document> documents) {
    return [documents] {
      Pattern pattern = dense(1);
      pattern.documents = documents;
      static_cast<void>(allowed_pairs(pattern, 8, 6));
    };
  };
  expect_refused(validate({{.query_end = 9, .key_end = 6}}),
                 {"ends at query token 9", "tokens, 8"});
  expect_refused(validate({{.query_end = 8, .key_end = 7}}), {"ends at key token 7", "tokens, 6"});
  expect_refused(validate({{.query_begin = 3, .query_end = 2}}),
                 {"document 0: query tokens are [3, 2)"});
  expect_refused(validate({{.query_end = 4}, {.query_begin = 3, .query_end = 5}}),
                 {"document 1", "[3, 5)", "begins at 4 or later"});
  expect_refused(validate({{.query_end = 4, .query_start = -1}}), {"query_start is -1"});
  expect_refused(validate({{.key_end = 4, .key_start = -2}}), {"key_start is -2"});
  expect_refused(validate({{.entry = std::numeric_limits<std::int64_t>::max()}}),
                 {"entry is 9223372036854775807", "expected less than 2147483648"});
}

// Positions far behind the keys have no segment with tokens on both sides: nothing walks to them.
TEST(Segments, EmptySegmentsAreSkipped) {
  Pattern pattern = dense(1, true);
  pattern.branches[0].segment_length = 1;
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  pattern.documents = {{.query_end = 3, .key_end = 8, .query_start = kFar},
                       {.query_begin = 3, .query_end = 6, .key_begin = 8, .key_end = 10}};
  EXPECT_EQ(allowed_pairs(pattern, 6, 10), 2.0);
  const Segments segments(pattern.documents, pattern.branches[0], 6, 10);
  EXPECT_EQ(segments.next_with_both(0), kFar + 3);
  EXPECT_EQ(segments.next_with_both(kFar + 5), segments.count());
}

TEST(Segments, ManyEmptyDocumentsAreSkippedAtOnce) {
  std::vector<Document> documents{{.query_end = 5, .key_end = 5}};
  documents.resize(5, {5, 5, 5, 5, 0, 0});
  documents.push_back({7, 9, 7, 9, 0, 0});
  documents.resize(9, {9, 9, 9, 9, 0, 0});
  const Segments segments(documents, dense(1).branches[0], 20, 20);
  EXPECT_EQ(segments.at_or_before(Side::queries, 19), 1);
  EXPECT_EQ(segments.at_or_before(Side::queries, 6), 0);
  EXPECT_EQ(segments.at_or_before(Side::keys, 5), 0);
}

}  // namespace
}  // namespace annulus
