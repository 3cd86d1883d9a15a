// Softcap and dropout: the numbers of pairs, the kernels of every instruction set against the
// oracle of single tasks, and which set is chosen.

#include "kernels/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/kernel_task.h"
#include "support/problem.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

std::int32_t number_of(std::uint64_t seed, std::int64_t batch, int head, std::int64_t query,
                       std::int64_t key) {
  const dropout::Head words = dropout::head_of({seed}, batch, head);
  return dropout::pair_number(words.row(query), words.key(key));
}

// Pinned: a change of the numbers changes every result with dropout.
TEST(DropoutNumbers, AreWhatTheyAlwaysWere) {
  EXPECT_EQ(number_of(0, 0, 0, 0, 0), 2121432663);
  EXPECT_EQ(number_of(1, 0, 0, 0, 0), 102412219);
  EXPECT_EQ(number_of(0x123456789abcdef0U, 3, 5, 70'000, std::int64_t{1} << 40), 1301839794);
}

// The numbers of a rectangle of pairs.
std::vector<std::int32_t> numbers(const dropout::Head& head, int queries, int keys, int stride) {
  std::vector<std::int32_t> out;
  for (int q = 0; q < queries; ++q) {
    const dropout::Row row = head.row(q * stride);
    for (int k = 0; k < keys; ++k) out.push_back(dropout::pair_number(row, head.key(k * stride)));
  }
  return out;
}

constexpr int kSide = 512;
constexpr double kCount = double{kSide} * kSide;
// Fixed seeds: six standard deviations are no chance.
constexpr double kSigmas = 6;

TEST(DropoutNumbers, EveryBitIsFair) {
  for (const int stride : {1, 2, 16, 4096}) {
    std::array<std::int64_t, 32> ones{};
    for (const std::int32_t x : numbers(dropout::head_of({7}, 0, 0), kSide, kSide, stride)) {
      for (int bit = 0; bit < 32; ++bit)
        ones[static_cast<std::size_t>(bit)] += std::bit_cast<std::uint32_t>(x) >> bit & 1;
    }
    for (const std::int64_t count : ones)
      EXPECT_NEAR(static_cast<double>(count), kCount / 2, kSigmas * std::sqrt(kCount) / 2)
          << stride;
  }
}

TEST(DropoutNumbers, KeepTheRightShareInEveryRowAndColumn) {
  for (const double p : {1e-3, 0.1, 0.5, 0.9}) {
    const DropoutRate rate = DropoutRate::of(p);
    const auto all = numbers(dropout::head_of({8}, 1, 2), kSide, kSide, 1);
    std::vector<double> rows(kSide, 0);
    std::vector<double> columns(kSide, 0);
    double sum = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double drops = all[i] < rate.threshold ? 1 : 0;
      rows[i / kSide] += drops;
      columns[i % kSide] += drops;
      sum += drops;
    }
    EXPECT_NEAR(sum / kCount, p, kSigmas * std::sqrt(p * (1 - p) / kCount)) << p;
    // Rows and columns vary as much as independent pairs make them.
    for (const std::vector<double>& lines : {rows, columns}) {
      double chi = 0;
      for (const double x : lines) chi += std::pow(x - kSide * p, 2) / (kSide * p * (1 - p));
      EXPECT_NEAR(chi, kSide, kSigmas * std::sqrt(2.0 * kSide) * (p < 0.01 ? 2 : 1)) << p;
    }
  }
}

// Sum of the products of signs: 0 within its deviation where they are independent.
template <typename A, typename B>
double correlation(std::size_t count, const A& a, const B& b) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += (a(i) < 0) == (b(i) < 0) ? 1 : -1;
  return static_cast<double>(sum) / std::sqrt(static_cast<double>(count));
}

TEST(DropoutNumbers, NeighboursAreIndependent) {
  const dropout::Head head = dropout::head_of({9}, 0, 0);
  const std::vector<std::int32_t> all = numbers(head, kSide, kSide, 1);
  const std::size_t count = all.size() / 2;
  const auto here = [&](std::size_t i) { return all[i]; };
  for (std::size_t step = 1; step <= 64; ++step) {  // of keys, of queries, and of both
    for (const std::size_t shift : {step, step * kSide, step * kSide + step, step * kSide - step}) {
      EXPECT_LT(std::fabs(correlation(count, here, [&](std::size_t i) { return all[i + shift]; })),
                kSigmas)
          << shift;
    }
  }
  // Four corners of rectangles, which affine functions of rows and of keys would correlate.
  for (std::size_t step = 1; step <= 64; ++step) {
    EXPECT_LT(std::fabs(correlation(
                  count, [&](std::size_t i) { return all[i] ^ all[i + step]; },
                  [&](std::size_t i) { return all[i + kSide] ^ all[i + kSide + step]; })),
              kSigmas)
        << step;
  }
}

TEST(DropoutNumbers, SeedsBatchEntriesAndHeadsAreIndependent) {
  const auto of = [&](std::uint64_t seed, std::int64_t batch, int head) {
    return numbers(dropout::head_of({seed}, batch, head), kSide, kSide, 1);
  };
  const std::vector<std::int32_t> first = of(10, 0, 0);
  const std::vector<std::vector<std::int32_t>> others = {
      of(11, 0, 0), of(10, 1, 0),  of(10, 0, 1), of(10, 1, 1),         of(9, 1, 0),
      of(12, 0, 0), of(10, 0, 64), of(0, 0, 0),  of(1ULL << 63, 0, 0), of(10 + (1ULL << 32), 0, 0)};
  for (std::size_t o = 0; o < others.size(); ++o) {
    EXPECT_LT(std::fabs(correlation(
                  first.size(), [&](std::size_t i) { return first[i]; },
                  [&](std::size_t i) { return others[o][i]; })),
              kSigmas)
        << o;
  }
}

// Tokens beyond 2^32 are other tokens.
TEST(DropoutNumbers, TokensHave64Bits) {
  const dropout::Head head = dropout::head_of({11}, 0, 0);
  const std::int64_t far = std::int64_t{1} << 32;
  EXPECT_NE(head.key(5), head.key(5 + far));
  EXPECT_NE(head.row(5).flip, head.row(5 + far).flip);
}

TEST(DropoutRate, CoversAllShares) {
  EXPECT_FALSE(DropoutRate::of(0).drops());
  for (const double p : {1e-9, 2e-8, 1e-7})  // the factor of the others may be 1 in fp32
    EXPECT_TRUE(DropoutRate::of(p).drops()) << p;
  EXPECT_EQ(DropoutRate::of(0).threshold, INT32_MIN);
  EXPECT_EQ(DropoutRate::of(0.5).threshold, 0);
  EXPECT_EQ(DropoutRate::of(0.5).scale, 2.0F);
  EXPECT_EQ(DropoutRate::of(1 - 0x1p-40).threshold, INT32_MAX);  // one number is kept
}

// Pieces keep the numbers of the whole.
TEST(DropoutNumbers, FirstBatchAndHeadShiftTheNumbers) {
  const dropout::Head whole = dropout::head_of({12}, 5, 7);
  const dropout::Head piece = dropout::head_of({12, 4, 6}, 1, 1);
  EXPECT_EQ(whole.rows, piece.rows);
  EXPECT_EQ(whole.keys, piece.keys);
}

class ModifiedKernels : public EveryKernelSet {
 protected:
  // As the engine chooses.
  [[nodiscard]] const cpu::Kernels& modified() const {
    const cpu::Kernels* const other = kernels().with_softcap_or_dropout;
    return other != nullptr ? *other : kernels();
  }
};
INSTANTIATE_TEST_SUITE_P(Isa, ModifiedKernels, ::testing::ValuesIn(cpu::available_kernels()),
                         name_of_set);

TEST_P(ModifiedKernels, AreAnotherSetOnTilesOnly) {
  const bool tiles = std::string(kernels().name).starts_with("amx_bf16");
  EXPECT_EQ(kernels().with_softcap_or_dropout != nullptr, tiles);
  if (tiles) {
    EXPECT_EQ(std::string(modified().name), "avx512");
  }
}

// `factor`: where a cap bends scores, errors of scores count more.
void expect_close(const cpu::Kernels& kernels, const TaskData& data, const TaskResult& got,
                  double factor = 1) {
  const TaskOracle want = oracle(data);
  const double joint = std::max(rms(want.dv), std::max(rms(want.dq), rms(want.dk)));
  // 16 bit: P and dS are rounded, and where few keys are kept no mean evens that out.
  const bool native = data.dtype == DType::bf16 && kernels.native_bf16;
  for (std::size_t m = 0; m < 5; ++m) {
    const double error = relative_rms(*got.members()[m], *want.members()[m],
                                      m == 1   ? 1.0
                                      : m == 0 ? 0.0
                                               : joint);
    EXPECT_LE(error, native && m != 1 ? 6e-3 : factor * 2e-6) << kResultNames[m];
    note_worst(std::string(native ? "native bf16 " : "fp32 ") + kResultNames[m] + " relative error",
               error);
  }
}

TEST_P(ModifiedKernels, MatchTheOracle) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const auto stride = static_cast<std::int32_t>(random.one_of<std::int64_t>({1, 1, 2, 3}));
    TaskData data = random_task(seed, random.one_of<DType>({DType::f32, DType::f32, DType::bf16}),
                                random.one_of<int>({1, 8, 24, 64, 100, 128, 300}), random.coin(),
                                progression(static_cast<std::int32_t>(random.between(0, 60)),
                                            stride, random.between(1, 200)),
                                progression(0, 1, random.between(1, 300)));
    if (random.coin()) data.softmax.softcap = random.one_of<double>({0.3, 1, 5, 50});
    if (random.coin()) data.softmax.dropout_p = random.one_of<double>({0.1, 0.5, 0.9});
    data.softmax.dropout_seed = seed;
    data.tokens = {random.between(0, 1'000'000), random.between(0, 1'000'000),
                   random.between(1, 9)};
    if (random.between(0, 2) == 0) data.repeats = {{2, 1}, {4, 3}};
    if (random.between(0, 2) == 0) data.scale *= 8;  // scores that a cap bends
    TaskRun run;
    run.canonical_keys = random.coin();
    expect_close(modified(), data, run_task(modified(), data, run), 2);
    if (HasFailure()) return;
  }
}

// The state of a stage is normalised and has what dropout did in it already.
TEST_P(ModifiedKernels, GoOnFromTheStateOfAnotherStage) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TaskData data =
        random_task(3, dtype, 64, true, progression(200, 1, 90), progression(0, 1, 290));
    data.softmax = {.softcap = 2, .dropout_p = 0.4, .dropout_seed = 5};
    data.tokens = {1000, 1000, 4};
    TaskRun first;
    first.key_cuts = {{0, 1, 131}};
    TaskResult half;
    run_forward(modified(), data, first, half);
    TaskRun second;
    second.key_cuts = {{131, 1, 159}};
    second.state_o = &half.o;
    second.state_lse = &half.lse;
    TaskResult whole = run_task(modified(), data);
    run_forward(modified(), data, second, whole);
    expect_close(modified(), data, whole);
  }
}

// tanh keeps its relative precision: with a cap far above all scores nothing changes but rounding,
// and scores far above the cap are the cap.
TEST_P(ModifiedKernels, CapsSmallAndLargeScores) {
  for (const double cap : {1e-3, 20.0, 1e4, 1e8}) {
    SCOPED_TRACE("softcap " + std::to_string(cap));
    TaskData data =
        random_task(4, DType::f32, 64, false, progression(0, 1, 40), progression(0, 1, 100));
    data.softmax.softcap = cap;
    data.scale *= 4;
    expect_close(modified(), data, run_task(modified(), data), cap < 1 ? 5 : 1);
  }
}

// Scores that are infinite or no number.
TEST_P(ModifiedKernels, CapInfinityAndKeepNaN) {
  TaskData data = random_task(5, DType::f32, 8, false, progression(0, 1, 3), progression(0, 1, 20));
  data.softmax.softcap = 3;
  for (std::size_t d = 0; d < 8; ++d) {
    data.q[d] = 1e30;
    data.k[d] = 1e30;       // +inf for query 0
    data.k[8 + d] = -1e30;  // -inf
    data.q[16 + d] = kNaN;  // query 2
  }
  TaskResult result;
  run_forward(modified(), data, {}, result);
  EXPECT_TRUE(std::isfinite(result.lse[0]));
  EXPECT_TRUE(std::isfinite(result.o[0]));
  EXPECT_TRUE(std::isfinite(result.lse[1]));
  EXPECT_TRUE(std::isnan(result.lse[2]));
  EXPECT_TRUE(std::isnan(result.o[16]));
}

}  // namespace
}  // namespace annulus::test
