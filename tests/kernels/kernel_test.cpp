// Every kernel set of this machine on single tasks, against an oracle in fp64.

#include "kernels/cpu/kernel.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/half.h"
#include "annulus/reference.h"
#include "support/kernel_task.h"
#include "support/problem.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

class KernelTest : public EveryKernelSet {};

INSTANTIATE_TEST_SUITE_P(Isa, KernelTest, ::testing::ValuesIn(cpu::available_kernels()),
                         name_of_set);

double rms_of_rounding(const std::vector<double>& values, DType dtype) {
  return relative_rms(rounded(values, dtype), values) * rms(values);
}

// fp32: 2e-6. 16 bit: twice the error of rounding the inputs' exact result, plus what short rows
// cannot avoid.
void expect_close(const TaskData& data, const TaskResult& got, const TaskOracle& want) {
  const double joint = std::max(rms(want.dv), std::max(rms(want.dq), rms(want.dk)));
  for (std::size_t m = 0; m < 5; ++m) {
    const auto& actual = *got.members()[m];
    const auto& expected = *want.members()[m];
    const std::string what = std::string(name_of(data.dtype)) + " " + kResultNames[m];
    if (data.dtype == DType::f32 || m == 1) {
      const double error = relative_rms(actual, expected, m == 1 ? 1.0 : m == 0 ? 0.0 : joint);
      EXPECT_LE(error, 2e-6) << what;
      note_worst(what + " relative RMS error", error);
      continue;
    }
    const double unit = rms_of_rounding(expected, data.dtype);
    const double nominal =
        0.4 * (data.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) * (m == 0 ? 0.0 : joint);
    const double error = relative_rms(actual, expected) * rms(expected) / std::max(unit, nominal);
    EXPECT_LE(error, 2.0) << what;
    note_worst(what + " error / rounding error", error);
  }
}

// Unlike expect_close no statistics: each number of a 16-bit task is held to what its own sum may
// lose, so that tasks of any size are held to the same. The inputs are representable and fp32 sums
// lose kFp32 of the terms' magnitudes; native bf16 rounds the weights P and dS to 8 bits, the
// output is rounded to its dtype, and that is all that may be lost.
void expect_within_rounding(const cpu::Kernels& kernels, const TaskData& data, const TaskRun& run,
                            const TaskResult& got, const TaskOracle& want) {
  constexpr double kFp32 = 1.5e-6;
  const auto unit = [](DType dtype) {
    return dtype == DType::f32 ? 0.0 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  };
  const bool native = data.dtype == DType::bf16 && kernels.native_bf16;
  // O = sum(P V) / sum(P): rounding P touches the sum above and, at most as much, the one below.
  const double weight_unit = native ? 0x1p-8 : 0.0;
  const TaskMagnitudes size = magnitudes(data);
  for (const std::size_t m : {0U, 2U, 3U, 4U}) {
    const auto& actual = *got.members()[m];
    const auto& expected = *want.members()[m];
    const auto& rounded_terms = *size.rounded.members()[m];
    const auto& terms = *size.exact.members()[m];
    const DType out = m == 0 ? run.out_dtype : DType::f32;
    const std::string what = std::string(name_of(data.dtype)) + " " + kResultNames[m];
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double bound = (m == 0 ? 2 : 1) * weight_unit * rounded_terms[i] + kFp32 * terms[i] +
                           unit(out) * std::abs(expected[i]) + 0x1p-25;  // half an fp16 subnormal
      worst = std::max(worst, std::abs(actual[i] - expected[i]) / bound);
    }
    EXPECT_LE(worst, 1.0) << what;
    note_worst(what + " error / bound" + (native ? ", native" : ""), worst);
  }
}

// The oracle of these tests takes any two sets of rows; where the two are one sequence it is the
// reference.
TEST(KernelOracle, IsTheReference) {
  for (const bool causal : {false, true}) {
    const TaskData data =
        random_task(1, DType::f32, 8, causal, progression(0, 1, 21), progression(0, 1, 21));
    const TaskOracle got = oracle(data);
    const reference::Shape shape{1, 21, 1, 1, 8};
    const auto forward = reference::forward(dense(1, causal), shape, data.q, data.k, data.v);
    const auto backward =
        reference::backward(dense(1, causal), shape, data.q, data.k, data.v, data.dout);
    for (std::size_t i = 0; i < got.o.size(); ++i) {
      EXPECT_NEAR(got.o[i], forward.o[i], 1e-13);
      EXPECT_NEAR(got.dq[i], backward.dq[i], 1e-13);
      EXPECT_NEAR(got.dk[i], backward.dk[i], 1e-13);
      EXPECT_NEAR(got.dv[i], backward.dv[i], 1e-13);
    }
    for (std::size_t i = 0; i < got.lse.size(); ++i) EXPECT_NEAR(got.lse[i], forward.lse[i], 1e-13);
  }
}

// All that are narrow, around every multiple of a vector that is wider, and the widest.
std::vector<int> head_dims() {
  std::vector<int> dims;
  for (int dim = 1; dim <= 40; ++dim) dims.push_back(dim);
  for (int dim = 48; dim <= 264; dim += 8) {
    dims.push_back(dim);
    dims.push_back(dim + dim / 8 % 8);
  }
  for (const int dim : {250, 255, 257, 288, 300, 384, 447, 480, 500, 511, kMaxHeadDim})
    dims.push_back(dim);
  return dims;
}

TEST_P(KernelTest, MatchesOracleForEveryHeadDim) {
  for (const int dim : head_dims()) {
    for (const DType dtype : kDTypes) {
      const bool causal = dim / 8 % 2 == (dtype == DType::bf16 ? 0 : 1);
      SCOPED_TRACE("head_dim " + std::to_string(dim) + (causal ? " causal" : " full"));
      // A panel and five lanes of queries; keys with a tail of six.
      const TaskData data = random_task(static_cast<std::uint64_t>(dim), dtype, dim, causal,
                                        progression(20, 1, 37), progression(0, 1, 70));
      TaskRun run;
      run.out_dtype = dtype;
      expect_close(data, run_task(kernels(), data, run), oracle(data));
      ASSERT_TRUE(shared_scratch().fence_stands()) << "wrote past the scratch";
    }
  }
}

// Ragged counts, index strides, several runs on either side.
TEST_P(KernelTest, MatchesOracleForRandomRuns) {
  const int rounds = 60;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE("seed " + std::to_string(round));
    Random random(static_cast<std::uint64_t>(round));
    const bool large = round % 8 == 0;
    const std::int64_t queries = random.between(1, large ? 300 : 40);
    const std::int64_t keys = random.between(1, large ? 300 : 40);
    const auto stride = [&] {
      return static_cast<std::int32_t>(random.one_of<std::int64_t>({1, 1, 2, 3, 7}));
    };
    const auto start = [&] { return static_cast<std::int32_t>(random.between(0, 50)); };
    const TaskData data =
        random_task(static_cast<std::uint64_t>(round),
                    random.one_of<DType>({DType::f32, DType::bf16, DType::f16}),
                    random.one_of<int>({1, 3, 8, 16, 20, 24, 33, 64, 72, 100}), random.coin(),
                    progression(start(), stride(), queries), progression(start(), stride(), keys));
    const auto cuts = [&](std::int64_t rows) {
      std::vector<Cut> out;
      for (std::int64_t at = 0; at < rows;) {
        const std::int64_t length = std::min(rows - at, random.between(1, rows));
        const std::int64_t step = std::min(length, random.between(1, 3));
        for (std::int64_t i = 0; i < step; ++i)
          out.push_back({at + i, step, (length - i - 1) / step + 1});
        at += length;
      }
      random.shuffle(out);
      return out;
    };
    TaskRun run;
    run.out_dtype = data.dtype;
    run.query_cuts = cuts(queries);
    run.key_cuts = cuts(keys);
    const TaskResult got = run_task(kernels(), data, run);
    const TaskOracle want = oracle(data);
    // A statistic of roundings needs some numbers.
    if (data.dtype == DType::f32 || queries * keys > 2000) expect_close(data, got, want);
    if (data.dtype != DType::f32) {
      expect_within_rounding(kernels(), data, run, got, want);
      EXPECT_LE(relative_rms(got.lse, want.lse, 1.0), 2e-6);
    }
    if (HasFailure()) return;
  }
}

// Long rows: many key blocks, several query blocks, more keys than one gradient chunk.
TEST_P(KernelTest, MatchesOracleAcrossBlocks) {
  const bool scalar = std::string(kernels().name) == "scalar";
  for (const bool causal : {false, true}) {
    const TaskData data = random_task(77, DType::f32, 8, causal, progression(1500, 1, 140),
                                      progression(0, 1, scalar ? 700 : 2300));
    expect_close(data, run_task(kernels(), data), oracle(data));
    const TaskData many =
        random_task(78, DType::bf16, 16, causal, progression(0, 3, 530), progression(0, 2, 260));
    TaskRun run;
    run.out_dtype = DType::bf16;
    expect_close(many, run_task(kernels(), many, run), oracle(many));
    // On tiles more than a round of 1,024 keys, by head dims whose items differ.
    for (const int dim : {64, 136}) {
      const TaskData wide = random_task(79, DType::bf16, dim, causal, progression(1000, 1, 40),
                                        progression(0, 1, 1300));
      expect_close(wide, run_task(kernels(), wide), oracle(wide));
    }
  }
}

// Keys and queries that are counted from different places: a diagonal that is shifted either way,
// also by so much that rows see nothing or everything.
TEST_P(KernelTest, ShiftsTheCausalDiagonal) {
  for (const std::int32_t shift : {-350, -37, -1, 1, 64, 200, 5000}) {
    SCOPED_TRACE("shift " + std::to_string(shift));
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TaskData data =
          random_task(5, dtype, 24, true, progression(3, 2, 190), progression(0, 1, 330));
      data.band = {-Band::kUnlimited, shift};
      expect_close(data, run_task(kernels(), data), oracle(data));
    }
  }
}

constexpr std::int64_t kNoLimit = Band::kUnlimited;
const std::vector<Band> kBands = {{-20, 0},        {-5, 5}, {0, 0},     {-130, -3}, {-300, -200},
                                  {-64, kNoLimit}, {3, 40}, {-17, 200}, {-255, 0}};

// Rows of which some see nothing, in runs that interleave or not.
TEST_P(KernelTest, MatchesOracleForEveryBand) {
  for (const Band& band : kBands) {
    SCOPED_TRACE("band " + std::to_string(band.least) + " to " + std::to_string(band.most));
    for (const DType dtype : {DType::f32, DType::bf16}) {
      if (dtype == DType::bf16 && band == Band{0, 0})
        continue;  // exact: no rounding to compare with
      TaskData data =
          random_task(6, dtype, 24, false, progression(3, 2, 190), progression(0, 1, 430));
      data.band = band;
      expect_close(data, run_task(kernels(), data), oracle(data));
      TaskRun run;
      run.query_cuts = {{0, 2, 95}, {1, 2, 95}};
      run.key_cuts = {{0, 3, 144}, {1, 3, 143}, {2, 3, 143}};
      expect_close(data, run_task(kernels(), data, run), oracle(data));
      run.canonical_keys = true;
      expect_close(data, run_task(kernels(), data, run), oracle(data));
      run.canonical_queries = true;
      expect_close(data, run_task(kernels(), data, run), oracle(data));
    }
  }
}

// In canonical order a row's bits depend on nothing but what it sees: rows that no other sees may
// be missing, with gaps between those that are there.
TEST_P(KernelTest, RowsThatAreNotSeenMayBeMissing) {
  for (const Band& band : kBands) {
    SCOPED_TRACE("band " + std::to_string(band.least) + " to " + std::to_string(band.most));
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TaskRun run;
      run.canonical_keys = true;
      run.query_cuts = {{0, 1, 50}, {250, 1, 60}};
      TaskData data =
          random_task(9, dtype, 64, false, progression(100, 1, 400), progression(0, 1, 700));
      data.band = band;
      const TaskResult all = run_task(kernels(), data, run);
      for (const Cut& cut : run.query_cuts) {
        const Stretch seen = band.keys_of({100 + cut.first, 100 + cut.first + cut.count - 1});
        const RowSet kept = clip(RowSet{0, 700, 1}, seen.first, seen.last + 1);
        if (kept.count > 0) run.key_cuts.push_back({kept.first, 1, kept.count});
      }
      if (run.key_cuts.size() == 2 &&
          run.key_cuts[0].first + run.key_cuts[0].count > run.key_cuts[1].first) {
        continue;  // the two stretches overlap
      }
      if (run.key_cuts.empty()) continue;
      const TaskResult some = run_task(kernels(), data, run);
      for (const Cut& cut : run.query_cuts) {  // other rows are not computed
        const auto same = [&](const std::vector<float>& a, const std::vector<float>& b, int width) {
          const auto first = a.begin() + cut.first * width;
          return std::equal(first, first + cut.count * width, b.begin() + cut.first * width);
        };
        EXPECT_TRUE(same(all.o, some.o, data.dim));
        EXPECT_TRUE(same(all.lse, some.lse, 1));
        EXPECT_TRUE(same(all.dq, some.dq, data.dim));
      }
    }
  }
}

TEST_P(KernelTest, WeighsRepeatedPairs) {
  const std::vector<std::vector<Repeat>> lists = {
      {{1, 0}}, {{2, 1}}, {{2, 0}, {4, 2}, {8, 6}, {16, 6}}, {{3, 1}, {6, 1}, {4, 3}}};
  for (const auto& repeats : lists) {
    for (const DType dtype : kDTypes) {
      for (const bool causal : {false, true}) {
        TaskData data =
            random_task(17, dtype, 64, causal, progression(100, 1, 300), progression(0, 1, 410));
        data.repeats = repeats;
        expect_close(data, run_task(kernels(), data), oracle(data));
      }
    }
  }
}

// kQueryBlock queries forward, a whole chunk of keys backward, and as many repeats as there may be.
// No oracle: it would take minutes. What is written past the end is seen by the fence, what is
// asked for past the end by the kernel itself.
void expect_scratch_is_enough(const cpu::Kernels& kernels,
                              const reference::SoftmaxOptions& softmax) {
  std::vector<Repeat> repeats;
  while (repeats.size() < kMaxRepeats)
    repeats.push_back({static_cast<std::int32_t>(repeats.size()) + 1, 0});
  for (const int dim : {1, 8, 56, 64, 72, 128, 136, 256, 257, kMaxHeadDim}) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + " " + name_of(dtype));
      TaskResult result;
      TaskData wide = random_task(5, dtype, dim, true, progression(0, 1, cpu::kQueryBlock),
                                  progression(0, 1, cpu::kKeyBlock + 9));
      wide.repeats = repeats;
      wide.softmax = softmax;
      run_forward(kernels, wide, {}, result);
      ASSERT_TRUE(shared_scratch().fence_stands()) << "forward wrote past the scratch";

      TaskData deep = random_task(6, dtype, dim, true, progression(0, 1, cpu::kGradBlock + 2),
                                  progression(0, 1, cpu::max_key_chunk(dim, false)));
      deep.repeats = repeats;
      deep.softmax = softmax;
      const std::vector<double> zeros(deep.q_index.size(), 0.0);
      run_backward(kernels, deep, {}, zeros, zeros, result);
      ASSERT_TRUE(shared_scratch().fence_stands()) << "backward wrote past the scratch";
    }
  }
}

TEST_P(KernelTest, ScratchIsEnoughForTheLargestTasks) {
  expect_scratch_is_enough(kernels(), {});
  const cpu::Kernels* const other = kernels().with_softcap_or_dropout;
  expect_scratch_is_enough(other != nullptr ? *other : kernels(),
                           {.softcap = 2, .dropout_p = 0.5, .dropout_seed = 1});
}

TEST_P(KernelTest, TooLittleScratchIsAnErrorAndNotOverrun) {
  const TaskData data = random_task(5, DType::f32, 64, false, progression(0, 1, cpu::kQueryBlock),
                                    progression(0, 1, 40));
  std::vector<double> delta;
  const TaskOracle want = oracle(data, &delta);
  TaskRun run;
  run.scratch_bytes = std::size_t{256} << 10;  // neither kernel's task fits
  TaskResult result;
  EXPECT_THROW(run_forward(kernels(), data, run, result), DeviceError);
  EXPECT_THROW(run_backward(kernels(), data, run, want.lse, delta, result), DeviceError);
}

TEST_P(KernelTest, StateCarriesForwardOverSeveralTasks) {
  for (const DType dtype : kDTypes) {
    for (const bool causal : {false, true}) {
      // The first rows see nothing of the first part: their state must be ignored, it is NaN.
      const TaskData data =
          random_task(3, dtype, 24, causal, progression(0, 1, 70), progression(0, 1, 90));
      std::vector<float> o(data.q.size(), kNaN);
      std::vector<float> lse(data.q_index.size(), -kInf);
      TaskResult result;
      for (const Cut part : {Cut{40, 1, 30}, Cut{0, 2, 20}, Cut{1, 2, 20}, Cut{70, 1, 20}}) {
        TaskRun run;
        run.key_cuts = {part};
        run.state_o = &o;
        run.state_lse = &lse;
        run_forward(kernels(), data, run, result);
        // Rows without any key so far hold zeros or rubbish; the executor clears them at the end.
        o = result.o;
        lse = result.lse;
      }
      const TaskOracle want = oracle(data);
      EXPECT_LE(relative_rms(lse, want.lse, 1.0), 1e-6);
      EXPECT_LE(relative_rms(o, want.o),
                dtype == DType::bf16 && kernels().native_bf16 ? 3e-3 : 2e-6);
    }
  }
}

TEST_P(KernelTest, GradientsAreAddedToWhatIsThere) {
  const TaskData data =
      random_task(4, DType::f32, 16, true, progression(0, 1, 45), progression(0, 1, 45));
  std::vector<double> delta;
  const TaskOracle want = oracle(data, &delta);
  TaskResult got;
  run_backward(kernels(), data, {}, want.lse, delta, got, 2.0F);
  for (auto* part : {&got.dq, &got.dk, &got.dv}) {
    for (float& x : *part) x -= 2.0F;
  }
  EXPECT_LE(relative_rms(got.dq, want.dq), 1e-5);
  EXPECT_LE(relative_rms(got.dk, want.dk), 1e-5);
  EXPECT_LE(relative_rms(got.dv, want.dv), 1e-5);
}

// What is not asked for is neither computed into memory nor needs any.
TEST_P(KernelTest, GradientsCanBeAskedForSeparately) {
  for (const DType dtype : kDTypes) {
    const TaskData data =
        random_task(6, dtype, 40, true, progression(7, 1, 150), progression(0, 1, 140));
    std::vector<double> delta;
    const TaskOracle want = oracle(data, &delta);
    TaskResult both, queries, keys;
    run_backward(kernels(), data, {}, want.lse, delta, both);
    TaskRun run;
    run.key_grad = false;
    run_backward(kernels(), data, run, want.lse, delta, queries);
    run.key_grad = true;
    run.query_grad = false;
    run_backward(kernels(), data, run, want.lse, delta, keys);
    EXPECT_EQ(queries.dq, both.dq);
    EXPECT_EQ(keys.dk, both.dk);
    EXPECT_EQ(keys.dv, both.dv);
    EXPECT_EQ(queries.dk, std::vector<float>(data.k.size(), 0.0F));
    EXPECT_EQ(keys.dq, std::vector<float>(data.q.size(), 0.0F));
  }
}

// Canonical order: bits depend neither on how rows are spread over runs nor on which rows share a
// task.
TEST_P(KernelTest, CanonicalOrderIgnoresHowRowsAreCut) {
  for (const DType dtype : kDTypes) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + (causal ? " causal" : " full"));
      const TaskData data =
          random_task(8, dtype, 24, causal, progression(0, 1, 301), progression(0, 1, 301));
      std::vector<double> delta;
      const TaskOracle want = oracle(data, &delta);
      TaskRun whole;
      whole.canonical_keys = true;
      TaskResult expected;
      run_forward(kernels(), data, whole, expected);
      TaskRun queries_only = whole;
      queries_only.key_grad = false;
      run_backward(kernels(), data, queries_only, want.lse, delta, expected);
      const std::vector<float> dq = expected.dq;
      TaskRun keys_only;
      keys_only.canonical_queries = true;
      keys_only.query_grad = false;
      run_backward(kernels(), data, keys_only, want.lse, delta, expected);

      // Three stripes, then blocks: as shards would be.
      const std::vector<Cut> stripes = {{0, 3, 101}, {1, 3, 100}, {2, 3, 100}};
      const std::vector<Cut> blocks = {{0, 1, 77}, {77, 2, 50}, {78, 2, 50}, {177, 1, 124}};
      for (const auto& cuts : {stripes, blocks}) {
        TaskResult got;
        TaskRun run = whole;
        run.key_cuts = cuts;
        run.query_cuts = cuts;
        run_forward(kernels(), data, run, got);
        EXPECT_EQ(got.o, expected.o);
        EXPECT_EQ(got.lse, expected.lse);
        run.key_grad = false;
        run_backward(kernels(), data, run, want.lse, delta, got);
        EXPECT_EQ(got.dq, dq);
        run = keys_only;
        run.key_cuts = cuts;
        run.query_cuts = cuts;
        run_backward(kernels(), data, run, want.lse, delta, got);
        EXPECT_EQ(got.dk, expected.dk);
        EXPECT_EQ(got.dv, expected.dv);
      }
      if (!causal) continue;
      // A shard of keys from row 93 on is only sent the queries from there on; it starts in the
      // middle of a block.
      for (const std::int64_t first : {1, 2, 93, 128, 250}) {
        TaskRun run = keys_only;
        run.key_cuts = {{first, 1, 301 - first}};
        run.query_cuts = {{first, 1, 301 - first}};
        TaskResult got;
        run_backward(kernels(), data, run, want.lse, delta, got);
        const auto at = first * data.dim;
        EXPECT_TRUE(std::equal(got.dk.begin() + at, got.dk.end(), expected.dk.begin() + at))
            << first;
        EXPECT_TRUE(std::equal(got.dv.begin() + at, got.dv.end(), expected.dv.begin() + at))
            << first;
      }
    }
  }
}

// What a lane computes depends on its own row: alone, or beside rows whose scores jump, its bits
// are the same.
TEST_P(KernelTest, RowsDoNotDependOnTheirNeighbours) {
  for (const DType dtype : kDTypes) {
    const TaskData data =
        random_task(9, dtype, 16, true, progression(100, 1, 40), progression(0, 1, 140));
    TaskResult together;
    run_forward(kernels(), data, {}, together);
    TaskData wild = data;
    for (std::size_t d = 0; d < 16; ++d) wild.q[5 * 16 + d] *= 2000;
    TaskResult beside;
    run_forward(kernels(), wild, {}, beside);
    const auto bits = [](const TaskResult& result, std::size_t at) {
      std::vector<std::uint32_t> row(16);
      std::memcpy(row.data(), &result.o[at], row.size() * sizeof(float));
      return row;
    };
    for (std::int64_t row = 0; row < data.queries(); ++row) {
      TaskResult alone;
      TaskRun run;
      run.query_cuts = {{row, 1, 1}};
      run_forward(kernels(), data, run, alone);
      const auto at = static_cast<std::size_t>(row) * 16;
      EXPECT_EQ(bits(alone, at), bits(together, at)) << "row " << row;
      EXPECT_EQ(alone.lse[static_cast<std::size_t>(row)],
                together.lse[static_cast<std::size_t>(row)]);
      if (row == 5) continue;
      EXPECT_EQ(bits(beside, at), bits(together, at)) << "row " << row;
    }
  }
}

// ---- conversions -------------------------------------------------------------------------------

std::vector<float> awkward_floats() {
  std::vector<float> out = {0.0F,       -0.0F,     1.0F,      65504.0F, 65519.9F, 65520.0F,
                            -65520.0F,  1e30F,     6e-8F,     2.9e-8F,  3e-8F,    6.1e-5F,
                            6.097e-5F,  5.96e-8F,  kInf,      -kInf,    kNaN,     0x1.004p0F,
                            0x1.00cp0F, 0x1.01p0F, 0x1.03p0F, 3.4e38F,  1e-38F,   1e-40F};
  Random random(18);
  while (out.size() % 256 != 0 || out.size() < 4096) {
    out.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.between(0, 0xffffffff))));
  }
  return out;
}

TEST_P(KernelTest, StoreRowRoundsToNearestEven) {
  const std::vector<float> values = awkward_floats();
  for (const DType dtype : kDTypes) {
    for (const int dim : {8, 24, 256}) {
      for (std::size_t at = 0; at + static_cast<std::size_t>(dim) <= values.size();
           at += static_cast<std::size_t>(dim)) {
        std::vector<float> row(values.begin() + static_cast<std::ptrdiff_t>(at),
                               values.begin() + static_cast<std::ptrdiff_t>(at) + dim);
        std::vector<std::byte> out(static_cast<std::size_t>(dim) * 4);
        kernels().store_row(dtype, row.data(), 1.0F, out.data(), dim);
        for (int d = 0; d < dim; ++d) {
          std::uint32_t expected = 0;
          store_element(&expected, dtype, 0, row[static_cast<std::size_t>(d)]);
          const float got = load_element(out.data(), dtype, d);
          const float want = load_element(&expected, dtype, 0);
          ASSERT_TRUE(std::isnan(want)
                          ? std::isnan(got)
                          : std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(want))
              << name_of(dtype) << " " << row[static_cast<std::size_t>(d)] << " became " << got
              << ", expected " << want;
        }
      }
    }
  }
}

TEST_P(KernelTest, DotRowsWidensEveryHalfExactly) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      std::vector<std::uint16_t> a(8, 0);
      std::vector<std::uint16_t> one(8, 0);
      a[bits % 8] = static_cast<std::uint16_t>(bits);
      store_element(one.data(), dtype, static_cast<std::int64_t>(bits % 8), 1.0F);
      const float want = load_element(a.data(), dtype, static_cast<std::int64_t>(bits % 8));
      const float got = kernels().dot_rows(dtype, reinterpret_cast<const std::byte*>(a.data()),
                                           reinterpret_cast<const std::byte*>(one.data()), 8);
      ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
          << name_of(dtype) << " " << std::hex << bits;
    }
  }
}

}  // namespace
}  // namespace annulus::test
