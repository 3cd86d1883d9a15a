#include "annulus/row_set.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace annulus {
namespace {

constexpr std::uint64_t kSeed = 20240611;

std::string to_string(const RowSet& rows) {
  return "{" + std::to_string(rows.first) + ", " + std::to_string(rows.count) + ", " +
         std::to_string(rows.stride) + "}";
}

std::vector<std::int64_t> positions_of(const RowSet& rows) {
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < rows.count; ++i) positions.push_back(rows[i]);
  return positions;
}

std::int64_t uniform(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

RowSet random_small_rows(std::mt19937_64& random) {
  return {uniform(random, -20, 60), uniform(random, 0, 25), uniform(random, 1, 18)};
}

TEST(RowSet, ContainsExactlyItsPositions) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 2000; ++trial) {
    const RowSet rows = random_small_rows(random);
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", rows " + to_string(rows));
    const std::vector<std::int64_t> list = positions_of(rows);
    const std::set<std::int64_t> expected(list.begin(), list.end());
    for (std::int64_t position = -30; position < 560; ++position) {
      ASSERT_EQ(rows.contains(position), expected.count(position) == 1) << position;
    }
  }
}

TEST(RowSet, ClipKeepsExactlyTheRowsInsideTheInterval) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 20000; ++trial) {
    const RowSet rows = random_small_rows(random);
    const std::int64_t begin = uniform(random, -40, 200);
    const std::int64_t end = uniform(random, -40, 200);  // may lie before begin
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", rows " + to_string(rows) + ", [" +
                 std::to_string(begin) + ", " + std::to_string(end) + ")");
    std::vector<std::int64_t> expected;
    for (const std::int64_t position : positions_of(rows)) {
      if (position >= begin && position < end) expected.push_back(position);
    }
    const RowSet clipped = clip(rows, begin, end);
    ASSERT_EQ(positions_of(clipped), expected);
    ASSERT_GE(clipped.count, 0);
    ASSERT_EQ(clipped.stride, rows.stride);
  }
}

TEST(RowSet, IntersectMatchesBruteForce) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 50000; ++trial) {
    const RowSet a = random_small_rows(random);
    const RowSet b = random_small_rows(random);
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", a " + to_string(a) + ", b " + to_string(b));
    std::vector<std::int64_t> expected;
    for (const std::int64_t position : positions_of(a)) {
      if (b.contains(position)) expected.push_back(position);
    }
    const RowSet shared = intersect(a, b);
    ASSERT_EQ(positions_of(shared), expected);
    ASSERT_GE(shared.stride, 1);
    ASSERT_EQ(shared, intersect(b, a));
  }
}

TEST(RowSet, IntersectWithARangeIsClip) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 5000; ++trial) {
    const RowSet rows = random_small_rows(random);
    const std::int64_t begin = uniform(random, -40, 200);
    const std::int64_t count = uniform(random, 1, 100);
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", rows " + to_string(rows));
    const RowSet clipped = clip(rows, begin, begin + count);
    if (clipped.count > 0) {
      ASSERT_EQ(intersect(rows, {begin, count, 1}), clipped);
    }
  }
}

TEST(RowSet, EmptyIntersectionsAreAllEqual) {
  EXPECT_EQ(intersect({0, 10, 2}, {1, 10, 2}), RowSet{});  // same stride, other offset
  EXPECT_EQ(intersect({0, 10, 4}, {2, 10, 6}), (RowSet{8, 3, 12}));
  EXPECT_EQ(intersect({0, 10, 4}, {1, 10, 6}), RowSet{});    // common divisor, other residue
  EXPECT_EQ(intersect({0, 3, 1}, {3, 3, 1}), RowSet{});      // one after the other
  EXPECT_EQ(intersect({0, 0, 1}, {0, 5, 1}), RowSet{});      // nothing to begin with
  EXPECT_EQ(intersect({10, 5, 10}, {21, 4, 2}), RowSet{});   // spans overlap, rows do not
  EXPECT_EQ(intersect({0, 2, 100}, {10, 80, 1}), RowSet{});  // the range lies in a gap
}

// Two progressions through one common point share exactly the multiples of the least common stride
// around that point, as far as both reach. No brute force is possible at this size.
TEST(RowSet, IntersectIsExactForPositionsAndStridesUpToTwoToTheForty) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 40;
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 50000; ++trial) {
    const auto random_stride = [&] {  // of all magnitudes; often with common divisors
      const std::int64_t factor = uniform(random, 1, 12);
      const std::int64_t largest = std::int64_t{1} << uniform(random, 0, 36);
      return factor * uniform(random, 1, largest);
    };
    const std::int64_t common_point = uniform(random, 0, kLimit);
    const auto random_rows_through_point = [&](std::int64_t stride) -> RowSet {
      const std::int64_t before = uniform(random, 0, common_point / stride);
      const std::int64_t after = uniform(random, 0, (kLimit - common_point) / stride);
      return {common_point - before * stride, before + after + 1, stride};
    };
    const RowSet a = random_rows_through_point(random_stride());
    const RowSet b = random_rows_through_point(random_stride());
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", a " + to_string(a) + ", b " + to_string(b));
    const RowSet shared = intersect(a, b);
    ASSERT_EQ(shared, intersect(b, a));
    ASSERT_TRUE(shared.contains(common_point)) << to_string(shared);
    for (const std::int64_t position : {shared.first, shared.last()}) {
      ASSERT_TRUE(a.contains(position)) << to_string(shared);
      ASSERT_TRUE(b.contains(position)) << to_string(shared);
    }
    const std::int64_t cofactor = b.stride / std::gcd(a.stride, b.stride);
    if (cofactor <= kLimit / a.stride) {
      const std::int64_t step = a.stride * cofactor;
      ASSERT_EQ(shared.stride, step);
      ASSERT_FALSE(a.contains(shared.first - step) && b.contains(shared.first - step));
      ASSERT_FALSE(a.contains(shared.last() + step) && b.contains(shared.last() + step));
    } else {
      ASSERT_EQ(shared.count, 1);
    }
  }
}

TEST(RowSet, IntersectOfHugeCoprimeStridesThatMeetOnlyBeyondBothIsEmpty) {
  // 2^40 - 87 and 2^40 - 167 are primes; the progressions meet next at their product, about 2^80.
  constexpr std::int64_t kP = (std::int64_t{1} << 40) - 87;
  constexpr std::int64_t kQ = (std::int64_t{1} << 40) - 167;
  EXPECT_EQ(intersect({1, 2, kP}, {2, 2, kQ}), RowSet{});
  const RowSet origin = intersect({0, 1000, kP}, {0, 1000, kQ});
  EXPECT_EQ(origin.first, 0);
  EXPECT_EQ(origin.count, 1);
  // The stride of that single row is clamped; it still works as an operand.
  EXPECT_EQ(intersect(origin, {0, 5, 3}).count, 1);
  EXPECT_EQ(intersect({-6, 5, 3}, origin).count, 1);
  EXPECT_EQ(intersect(origin, origin), origin);
  EXPECT_EQ(intersect(origin, {1, 5, 3}), RowSet{});
  EXPECT_EQ(clip(origin, 1, 1000).count, 0);
  EXPECT_EQ(clip(origin, 0, 1000).count, 1);
}

}  // namespace
}  // namespace annulus
