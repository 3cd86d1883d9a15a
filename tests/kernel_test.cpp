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

#include "annulus/half.h"
#include "annulus/reference.h"
#include "support/kernel_task.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus {
namespace {

using test::Cut;
using test::oracle;
using test::progression;
using test::random_task;
using test::relative_rms;
using test::run_task;
using test::TaskData;
using test::TaskOracle;
using test::TaskResult;
using test::TaskRun;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class KernelTest : public ::testing::TestWithParam<const cpu::Kernels*> {
 protected:
  void TearDown() override {
    EXPECT_TRUE(test::shared_scratch().fence_stands()) << "wrote past the scratch";
  }
  [[nodiscard]] const cpu::Kernels& kernels() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Isa, KernelTest, ::testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

double rms_of_rounding(const std::vector<double>& values, DType dtype) {
  return relative_rms(test::rounded(values, dtype), values) * test::rms(values);
}

// fp32: 2e-6. 16 bit: twice the error of rounding the inputs' exact result, plus what short rows cannot avoid.
void expect_close(const TaskData& data, const TaskResult& got, const TaskOracle& want) {
  const double joint = std::max(test::rms(want.dv), std::max(test::rms(want.dq), test::rms(want.dk)));
  for (std::size_t m = 0; m < 5; ++m) {
    const auto& actual = *got.members()[m];
    const auto& expected = *want.members()[m];
    const std::string what = std::string(name_of(data.dtype)) + " " + test::kResultNames[m];
    if (data.dtype == DType::f32 || m == 1) {
      const double error = relative_rms(actual, expected, m == 1 ? 1.0 : m == 0 ? 0.0 : joint);
      EXPECT_LE(error, 2e-6) << what;
      test::note_worst(what + " relative RMS error", error);
      continue;
    }
    const double unit = rms_of_rounding(expected, data.dtype);
    const double nominal = 0.4 * (data.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) * (m == 0 ? 0.0 : joint);
    const double error = relative_rms(actual, expected) * test::rms(expected) / std::max(unit, nominal);
    EXPECT_LE(error, 2.0) << what;
    test::note_worst(what + " error / rounding error", error);
  }
}

// The oracle of these tests takes any two sets of rows; where the two are one sequence it is the reference.
TEST(KernelOracle, IsTheReference) {
  for (const bool causal : {false, true}) {
    const TaskData data = random_task(1, DType::f32, 8, causal, progression(0, 1, 21), progression(0, 1, 21));
    const TaskOracle got = oracle(data);
    const reference::Shape shape{1, 21, 1, 1, 8};
    const auto forward = reference::forward(dense(1, causal), shape, data.q, data.k, data.v);
    const auto backward = reference::backward(dense(1, causal), shape, data.q, data.k, data.v, data.dout);
    for (std::size_t i = 0; i < got.o.size(); ++i) {
      EXPECT_NEAR(got.o[i], forward.o[i], 1e-13);
      EXPECT_NEAR(got.dq[i], backward.dq[i], 1e-13);
      EXPECT_NEAR(got.dk[i], backward.dk[i], 1e-13);
      EXPECT_NEAR(got.dv[i], backward.dv[i], 1e-13);
    }
    for (std::size_t i = 0; i < got.lse.size(); ++i) EXPECT_NEAR(got.lse[i], forward.lse[i], 1e-13);
  }
}

TEST_P(KernelTest, MatchesOracleForEveryHeadDim) {
  for (int dim = 8; dim <= cpu::kMaxHeadDim; dim += 8) {
    for (const DType dtype : kDTypes) {
      const bool causal = dim / 8 % 2 == (dtype == DType::bf16 ? 0 : 1);
      SCOPED_TRACE("head_dim " + std::to_string(dim) + (causal ? " causal" : " full"));
      // A panel and five lanes of queries; keys with a tail of six.
      const TaskData data = random_task(static_cast<std::uint64_t>(dim), dtype, dim, causal, progression(20, 1, 37),
                                        progression(0, 1, 70));
      TaskRun run;
      run.out_dtype = dtype;
      expect_close(data, run_task(kernels(), data, run), oracle(data));
      ASSERT_TRUE(test::shared_scratch().fence_stands()) << "wrote past the scratch";
    }
  }
}

// Ragged counts, index strides, several runs on either side.
TEST_P(KernelTest, MatchesOracleForRandomRuns) {
  const int rounds = 60;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE("seed " + std::to_string(round));
    test::Random random(static_cast<std::uint64_t>(round));
    const bool large = round % 8 == 0;
    const std::int64_t queries = random.between(1, large ? 300 : 40);
    const std::int64_t keys = random.between(1, large ? 300 : 40);
    const auto stride = [&] { return static_cast<std::int32_t>(random.one_of<std::int64_t>({1, 1, 2, 3, 7})); };
    const auto start = [&] { return static_cast<std::int32_t>(random.between(0, 50)); };
    const TaskData data =
        random_task(static_cast<std::uint64_t>(round), random.one_of<DType>({DType::f32, DType::bf16, DType::f16}),
                    random.one_of<int>({8, 16, 24, 64, 72}), random.coin(), progression(start(), stride(), queries),
                    progression(start(), stride(), keys));
    const auto cuts = [&](std::int64_t rows) {
      std::vector<Cut> out;
      for (std::int64_t at = 0; at < rows;) {
        const std::int64_t length = std::min(rows - at, random.between(1, rows));
        const std::int64_t step = std::min(length, random.between(1, 3));
        for (std::int64_t i = 0; i < step; ++i) out.push_back({at + i, step, (length - i - 1) / step + 1});
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
    if (data.dtype == DType::f32 || queries * keys > 2000) {
      expect_close(data, got, want);
    } else {  // too few numbers for a statistic of roundings
      const double joint = std::max(test::rms(want.dv), 0.1);
      for (std::size_t m = 0; m < 5; ++m) {
        EXPECT_LE(relative_rms(*got.members()[m], *want.members()[m], joint), m == 1 ? 2e-6 : 0.02) << test::kResultNames[m];
      }
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
    const TaskData many = random_task(78, DType::bf16, 16, causal, progression(0, 3, 530), progression(0, 2, 260));
    TaskRun run;
    run.out_dtype = DType::bf16;
    expect_close(many, run_task(kernels(), many, run), oracle(many));
  }
}

TEST_P(KernelTest, ScratchIsEnoughForTheLargestTasks) {
  for (const int dim : {8, 56, 64, 72, 128, 136, 256}) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + " " + name_of(dtype));
      const TaskData data = random_task(5, dtype, dim, true, progression(0, 1, 130), progression(0, 1, cpu::kKeyBlock + 9));
      run_task(kernels(), data);
      ASSERT_TRUE(test::shared_scratch().fence_stands()) << "wrote past the scratch";
    }
  }
}

TEST_P(KernelTest, StateCarriesForwardOverSeveralTasks) {
  for (const DType dtype : kDTypes) {
    for (const bool causal : {false, true}) {
      // The first rows see nothing of the first part: their state must be ignored, it is NaN.
      const TaskData data = random_task(3, dtype, 24, causal, progression(0, 1, 70), progression(0, 1, 90));
      std::vector<float> o(data.q.size(), kNaN);
      std::vector<float> lse(data.q_index.size(), -kInf);
      TaskResult result;
      for (const Cut part : {Cut{40, 1, 30}, Cut{0, 2, 20}, Cut{1, 2, 20}, Cut{70, 1, 20}}) {
        TaskRun run;
        run.key_cuts = {part};
        run.state_o = &o;
        run.state_lse = &lse;
        test::run_forward(kernels(), data, run, result);
        // Rows without any key so far hold zeros or rubbish; the executor clears them at the end.
        o = result.o;
        lse = result.lse;
      }
      const TaskOracle want = oracle(data);
      EXPECT_LE(relative_rms(lse, want.lse, 1.0), 1e-6);
      EXPECT_LE(relative_rms(o, want.o), dtype == DType::bf16 && kernels().native_bf16 ? 3e-3 : 2e-6);
    }
  }
}

TEST_P(KernelTest, GradientsAreAddedToWhatIsThere) {
  const TaskData data = random_task(4, DType::f32, 16, true, progression(0, 1, 45), progression(0, 1, 45));
  std::vector<double> delta;
  const TaskOracle want = oracle(data, &delta);
  TaskResult got;
  test::run_backward(kernels(), data, {}, want.lse, delta, got, 2.0F);
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
    const TaskData data = random_task(6, dtype, 40, true, progression(7, 1, 150), progression(0, 1, 140));
    std::vector<double> delta;
    const TaskOracle want = oracle(data, &delta);
    TaskResult both, queries, keys;
    test::run_backward(kernels(), data, {}, want.lse, delta, both);
    TaskRun run;
    run.key_grad = false;
    test::run_backward(kernels(), data, run, want.lse, delta, queries);
    run.key_grad = true;
    run.query_grad = false;
    test::run_backward(kernels(), data, run, want.lse, delta, keys);
    EXPECT_EQ(queries.dq, both.dq);
    EXPECT_EQ(keys.dk, both.dk);
    EXPECT_EQ(keys.dv, both.dv);
    EXPECT_EQ(queries.dk, std::vector<float>(data.k.size(), 0.0F));
    EXPECT_EQ(keys.dq, std::vector<float>(data.q.size(), 0.0F));
  }
}

// Canonical order: bits depend neither on how rows are spread over runs nor on which rows share a task.
TEST_P(KernelTest, CanonicalOrderIgnoresHowRowsAreCut) {
  for (const DType dtype : kDTypes) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + (causal ? " causal" : " full"));
      const TaskData data = random_task(8, dtype, 24, causal, progression(0, 1, 301), progression(0, 1, 301));
      std::vector<double> delta;
      const TaskOracle want = oracle(data, &delta);
      TaskRun whole;
      whole.canonical_keys = true;
      TaskResult expected;
      test::run_forward(kernels(), data, whole, expected);
      TaskRun queries_only = whole;
      queries_only.key_grad = false;
      test::run_backward(kernels(), data, queries_only, want.lse, delta, expected);
      const std::vector<float> dq = expected.dq;
      TaskRun keys_only;
      keys_only.canonical_queries = true;
      keys_only.query_grad = false;
      test::run_backward(kernels(), data, keys_only, want.lse, delta, expected);

      // Three stripes, then blocks: as shards would be.
      const std::vector<Cut> stripes = {{0, 3, 101}, {1, 3, 100}, {2, 3, 100}};
      const std::vector<Cut> blocks = {{0, 1, 77}, {77, 2, 50}, {78, 2, 50}, {177, 1, 124}};
      for (const auto& cuts : {stripes, blocks}) {
        TaskResult got;
        TaskRun run = whole;
        run.key_cuts = cuts;
        run.query_cuts = cuts;
        test::run_forward(kernels(), data, run, got);
        EXPECT_EQ(got.o, expected.o);
        EXPECT_EQ(got.lse, expected.lse);
        run.key_grad = false;
        test::run_backward(kernels(), data, run, want.lse, delta, got);
        EXPECT_EQ(got.dq, dq);
        run = keys_only;
        run.key_cuts = cuts;
        run.query_cuts = cuts;
        test::run_backward(kernels(), data, run, want.lse, delta, got);
        EXPECT_EQ(got.dk, expected.dk);
        EXPECT_EQ(got.dv, expected.dv);
      }
      if (!causal) continue;
      // A shard of keys from row 93 on is only sent the queries from there on; it starts in the middle of a block.
      for (const std::int64_t first : {1, 2, 93, 128, 250}) {
        TaskRun run = keys_only;
        run.key_cuts = {{first, 1, 301 - first}};
        run.query_cuts = {{first, 1, 301 - first}};
        TaskResult got;
        test::run_backward(kernels(), data, run, want.lse, delta, got);
        const auto at = first * data.dim;
        EXPECT_TRUE(std::equal(got.dk.begin() + at, got.dk.end(), expected.dk.begin() + at)) << first;
        EXPECT_TRUE(std::equal(got.dv.begin() + at, got.dv.end(), expected.dv.begin() + at)) << first;
      }
    }
  }
}

// What a lane computes depends on its own row: alone, or beside rows whose scores jump, its bits are the same.
TEST_P(KernelTest, RowsDoNotDependOnTheirNeighbours) {
  for (const DType dtype : kDTypes) {
    const TaskData data = random_task(9, dtype, 16, true, progression(100, 1, 40), progression(0, 1, 140));
    TaskResult together;
    test::run_forward(kernels(), data, {}, together);
    TaskData wild = data;
    for (std::size_t d = 0; d < 16; ++d) wild.q[5 * 16 + d] *= 2000;
    TaskResult beside;
    test::run_forward(kernels(), wild, {}, beside);
    for (std::int64_t row = 0; row < data.queries(); ++row) {
      TaskResult alone;
      TaskRun run;
      run.query_cuts = {{row, 1, 1}};
      test::run_forward(kernels(), data, run, alone);
      const auto at = static_cast<std::size_t>(row) * 16;
      EXPECT_EQ(std::memcmp(&alone.o[at], &together.o[at], 16 * sizeof(float)), 0) << "row " << row;
      EXPECT_EQ(alone.lse[static_cast<std::size_t>(row)], together.lse[static_cast<std::size_t>(row)]);
      if (row == 5) continue;
      EXPECT_EQ(std::memcmp(&beside.o[at], &together.o[at], 16 * sizeof(float)), 0) << "row " << row;
    }
  }
}

// ---- logits of 1e4 -----------------------------------------------------------------------------

// Scores that are what they are: q = (1, 0, ...), k = (logit, noise...), scale 1.
TaskData with_logits(DType dtype, std::int64_t queries, const std::vector<double>& logits, std::uint64_t seed = 10) {
  TaskData data = random_task(seed, dtype, 16, false, progression(0, 1, queries), progression(0, 1, std::ssize(logits)));
  data.scale = 1;
  for (std::size_t i = 0; i < data.q.size(); ++i) data.q[i] = i % 16 == 0 ? 1 : 0;
  for (std::size_t j = 0; j < logits.size(); ++j) data.k[j * 16] = test::as_stored(dtype, logits[j]);
  return data;
}

// fp32 keeps a score of s to s * 2^-24, and its weight to that: with the few roundings on the way, 4 of them.
void expect_within_conditioning(const cpu::Kernels& kernels, const TaskData& data) {
  const TaskResult got = run_task(kernels, data);
  const TaskOracle want = oracle(data);
  double largest = 1;
  for (std::size_t j = 0; j < data.k.size(); j += 16) largest = std::max(largest, std::abs(data.k[j]));
  const double half = data.dtype == DType::bf16 && kernels.native_bf16 ? 0x1p-8 : 0.0;
  const double relative = 4 * largest * 1.4427 * 0x1p-24 + half + 2e-6;
  for (std::size_t m = 0; m < 5; ++m) {
    const double limit = m == 1 ? 4e-7 * std::max(1.0, largest) : 4 * relative;
    const auto& actual = *got.members()[m];
    const auto& expected = *want.members()[m];
    // dQ and dK multiply by k, which is as large as the logits.
    const double unit = m == 1 ? 1.0 : m == 2 ? largest : 1.0;
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(std::isfinite(actual[i])) << test::kResultNames[m] << "[" << i << "]";
      ASSERT_NEAR(actual[i], expected[i], limit * unit * std::max(1.0, static_cast<double>(data.queries())))
          << test::kResultNames[m] << "[" << i << "]";
    }
  }
}

TEST_P(KernelTest, LogitsUpTo10000NeitherOverflowNorVanish) {
  for (const DType dtype : kDTypes) {
    for (const double level : {1e4, -1e4, 90.0, -90.0, 40.0, -50.0}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " all at " + std::to_string(level));
      // All equal: the output is the mean of V, whatever the level.
      const TaskData data = with_logits(dtype, 3, std::vector<double>(150, level));
      expect_within_conditioning(kernels(), data);
    }
    SCOPED_TRACE(std::string(name_of(dtype)) + " random");
    test::Random random(12);
    std::vector<double> logits(300);
    for (double& x : logits) x = static_cast<double>(random.between(-10000, 10000));
    expect_within_conditioning(kernels(), with_logits(dtype, 2, logits));
  }
}

// The reference maximum is wrong by 1e4 from one key to the next, wherever in a tile or block that is.
TEST_P(KernelTest, LogitsMayJumpBy10000AtAnyKey) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double jump : {1e4, -1e4, 60.0, -100.0}) {
      for (std::size_t at = 0; at < 290; at += at % 128 < 10 || at % 128 > 120 ? 1 : 13) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " by " + std::to_string(jump) + " at key " + std::to_string(at));
        std::vector<double> logits(290, 0.0);
        for (std::size_t j = at; j < logits.size(); ++j) logits[j] = jump;
        TaskResult got;
        const TaskData data = with_logits(dtype, 1, logits);
        test::run_forward(kernels(), data, {}, got);
        const TaskOracle want = oracle(data);
        const double limit = dtype == DType::bf16 ? 4e-3 : 1e-5;
        for (std::size_t i = 0; i < got.o.size(); ++i) ASSERT_NEAR(got.o[i], want.o[i], limit) << i;
        ASSERT_NEAR(got.lse[0], want.lse[0], 2e-3);
      }
    }
  }
}

TEST_P(KernelTest, LogitsMayClimbFromBlockToBlock) {
  for (const double slope : {0.4, 3.0, 33.0, -0.4, -33.0}) {
    std::vector<double> logits(300);
    for (std::size_t j = 0; j < logits.size(); ++j) logits[j] = slope * static_cast<double>(j);
    SCOPED_TRACE("slope " + std::to_string(slope));
    expect_within_conditioning(kernels(), with_logits(DType::f32, 2, logits));
  }
}

TEST_P(KernelTest, StateMayBe10000AwayFromTheScores) {
  for (const double old_lse : {1e4, -1e4, 120.0, -120.0}) {
    const TaskData data = with_logits(DType::f32, 40, std::vector<double>(20, 0.0));
    const std::vector<float> o(data.q.size(), 0.25F);
    const std::vector<float> lse(40, static_cast<float>(old_lse));
    TaskRun run;
    run.state_o = &o;
    run.state_lse = &lse;
    TaskResult got;
    test::run_forward(kernels(), data, run, got);
    const TaskOracle fresh = oracle(data);
    for (std::size_t i = 0; i < got.o.size(); ++i) {
      EXPECT_NEAR(got.o[i], old_lse > 0 ? 0.25 : fresh.o[i], 1e-6);
    }
    EXPECT_NEAR(got.lse[0], old_lse > 0 ? old_lse : fresh.lse[0], 2e-3);
  }
}

// Values from tiny to huge keep their precision: the reference of a row is not its maximum, and must not cost range.
TEST_P(KernelTest, ValuesOfAnyMagnitudeKeepTheirPrecision) {
  for (const double magnitude : {1e-20, 1e-10, 1e10, 1e20}) {
    TaskData data = random_task(13, DType::f32, 8, false, progression(0, 1, 33), progression(0, 1, 150));
    for (double& x : data.q) x = static_cast<float>(x * 4);  // logits to +-30 and beyond
    for (double& x : data.v) x = static_cast<float>(x * magnitude);
    TaskResult got;
    test::run_forward(kernels(), data, {}, got);
    EXPECT_LE(relative_rms(got.o, oracle(data).o), 4e-6) << magnitude;
  }
}

// ---- NaN and infinity --------------------------------------------------------------------------

// Which results may change when row `row` of a tensor (0: q, 1: k, 2: v, 3: dout) does. Queries that are it or see it, and
// the gradients of the keys that those queries see.
struct Affected {
  std::vector<bool> query, key;

  Affected(const TaskData& data, int tensor, std::int64_t row)
      : query(static_cast<std::size_t>(data.queries())), key(static_cast<std::size_t>(data.keys())) {
    const bool of_key = tensor == 1 || tensor == 2;
    for (std::int64_t i = 0; i < data.queries(); ++i) {
      if (of_key ? !data.sees(i, row) : i != row) continue;
      query[static_cast<std::size_t>(i)] = true;
      for (std::int64_t j = 0; j < data.keys(); ++j) {
        if (data.sees(i, j)) key[static_cast<std::size_t>(j)] = true;
      }
    }
  }
};

// Every position of a ragged causal task, every tensor, NaN and both infinities: finite exactly where the oracle is, and
// where nothing can be seen of it, every bit is as before.
TEST_P(KernelTest, PoisonReachesExactlyTheRowsOfTheOracle) {
  constexpr float kPoisons[] = {kNaN, kInf, -kInf};
  constexpr std::int64_t kRows = 43;
  for (const DType dtype : kDTypes) {
    // Queries from 0: the first sees one key only. Index stride 2: a diagonal of another slope than the tiles'. Shuffled: rows
    // of a tile, or of a pair, whose indices do not ascend, as in striped shards.
    for (const std::string order : {"plain", "key index stride 2", "shuffled"}) {
      const TaskData clean =
          random_task(14, dtype, 8, true, progression(0, 1, kRows), progression(0, order == "key index stride 2" ? 2 : 1, kRows));
      TaskRun run;
      if (order == "shuffled") {
        run.key_cuts = {{30, 1, 13}, {1, 3, 10}, {2, 3, 10}, {0, 3, 10}};
        run.query_cuts = {{21, 1, 22}, {1, 2, 10}, {0, 2, 11}};
      }
      const TaskResult bits = run_task(kernels(), clean, run);
      test::Random random(15);
      for (std::int64_t row = 0; row < kRows; ++row) {
        for (int tensor = 0; tensor < 4; ++tensor) {
          const float poison = kPoisons[(row + tensor) % 3];
          TaskData data = clean;
          std::vector<double>* const tensors[] = {&data.q, &data.k, &data.v, &data.dout};
          (*tensors[tensor])[static_cast<std::size_t>(row * 8 + random.between(0, 7))] = poison;
          SCOPED_TRACE(std::string(name_of(dtype)) + " " + order + ", " + std::to_string(poison) +
                       " in " + std::string("qkvd").substr(static_cast<std::size_t>(tensor), 1) + " row " + std::to_string(row));
          const TaskOracle want = oracle(data);
          const TaskResult got = run_task(kernels(), data, run);
          const Affected affected(data, tensor, row);
          for (std::size_t m = 0; m < 5; ++m) {
            for (std::size_t i = 0; i < want.members()[m]->size(); ++i) {
              const double expected = (*want.members()[m])[i];
              const float actual = (*got.members()[m])[i];
              const std::string where = std::string(test::kResultNames[m]) + "[" + std::to_string(m == 1 ? i : i / 8) + "]";
              if (m == 0 && want.lse[i / 8] == test::kNegInf) continue;  // not even initialised
              if (m == 1 && expected == test::kNegInf) {
                ASSERT_EQ(actual, -kInf) << where;
                continue;
              }
              ASSERT_EQ(std::isfinite(actual), std::isfinite(expected)) << where << " is " << actual << ", oracle " << expected;
              if (!(m >= 3 ? affected.key : affected.query)[m == 1 ? i : i / 8]) {
                ASSERT_EQ(actual, (*bits.members()[m])[i]) << where << " changed";
              }
            }
          }
        }
      }
    }
  }
}

// Without causal mask only the padding of tiles is masked: nothing must leak out of it, and nothing be lost in it.
TEST_P(KernelTest, PoisonStaysOutOfPaddingWithoutMask) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t keys : {1, 3, 8, 13}) {
      for (const std::int64_t queries : {1, 5, 33}) {
        const TaskData clean = random_task(16, dtype, 8, false, progression(0, 1, queries), progression(0, 1, keys));
        for (int tensor = 0; tensor < 4; ++tensor) {
          TaskData data = clean;
          std::vector<double>* const tensors[] = {&data.q, &data.k, &data.v, &data.dout};
          tensors[tensor]->back() = kNaN;
          const TaskOracle want = oracle(data);
          const TaskResult got = run_task(kernels(), data);
          for (std::size_t m = 0; m < 5; ++m) {
            for (std::size_t i = 0; i < want.members()[m]->size(); ++i) {
              ASSERT_EQ(std::isfinite((*got.members()[m])[i]), std::isfinite((*want.members()[m])[i]))
                  << test::kResultNames[m] << "[" << i << "], " << queries << " queries, " << keys << " keys, tensor " << tensor;
            }
          }
        }
      }
    }
  }
}

// Rows that see keys, but with scores of -inf only: nothing comes out and no gradient goes in, not even 0 x Inf.
TEST_P(KernelTest, RowsWithNothingButMinusInfinityAreEmpty) {
  for (const DType dtype : kDTypes) {
    for (const bool in_keys : {false, true}) {
      TaskData data = random_task(17, dtype, 8, false, progression(0, 1, 35), progression(0, 1, 11));
      if (in_keys) {  // for all rows
        for (std::size_t i = 0; i < data.q.size(); ++i) data.q[i] = std::abs(data.q[i]) + 1;
        for (std::size_t j = 0; j < data.k.size(); j += 8) data.k[j] = -kInf;
      } else {  // for row 4
        for (std::size_t j = 0; j < data.k.size(); j += 8) data.k[j] = std::abs(data.k[j]) + 1;
        data.q[4 * 8] = -kInf;
        data.dout[4 * 8 + 3] = kNaN;  // its gradient goes nowhere
      }
      SCOPED_TRACE(std::string(name_of(dtype)) + (in_keys ? " -inf in k" : " -inf in q"));
      const TaskOracle want = oracle(data);
      const TaskResult got = run_task(kernels(), data);
      for (std::size_t i = 0; i < want.lse.size(); ++i) {
        EXPECT_EQ(got.lse[i] == -kInf, want.lse[i] == test::kNegInf) << "lse " << i;
      }
      for (std::size_t m = 2; m < 5; ++m) {
        for (std::size_t i = 0; i < want.members()[m]->size(); ++i) {
          ASSERT_TRUE(std::isfinite((*want.members()[m])[i]));
          ASSERT_TRUE(std::isfinite((*got.members()[m])[i])) << test::kResultNames[m] << "[" << i / 8 << "]";
        }
      }
    }
  }
}

// ---- conversions -------------------------------------------------------------------------------

std::vector<float> awkward_floats() {
  std::vector<float> out = {0.0F, -0.0F, 1.0F, 65504.0F, 65519.9F, 65520.0F, -65520.0F, 1e30F, 6e-8F, 2.9e-8F, 3e-8F, 6.1e-5F,
                            6.097e-5F, 5.96e-8F, kInf, -kInf, kNaN, 0x1.004p0F, 0x1.00cp0F, 0x1.01p0F, 0x1.03p0F, 3.4e38F, 1e-38F, 1e-40F};
  test::Random random(18);
  while (out.size() % 256 != 0 || out.size() < 4096) {
    out.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.between(0, 0xffffffff))));
  }
  return out;
}

TEST_P(KernelTest, StoreRowRoundsToNearestEven) {
  const std::vector<float> values = awkward_floats();
  for (const DType dtype : kDTypes) {
    for (const int dim : {8, 24, 256}) {
      for (std::size_t at = 0; at + static_cast<std::size_t>(dim) <= values.size(); at += static_cast<std::size_t>(dim)) {
        std::vector<float> row(values.begin() + static_cast<std::ptrdiff_t>(at), values.begin() + static_cast<std::ptrdiff_t>(at) + dim);
        std::vector<std::byte> out(static_cast<std::size_t>(dim) * 4);
        kernels().store_row(dtype, row.data(), 1.0F, out.data(), dim);
        for (int d = 0; d < dim; ++d) {
          std::uint32_t expected = 0;
          store_element(&expected, dtype, 0, row[static_cast<std::size_t>(d)]);
          const float got = load_element(out.data(), dtype, d);
          const float want = load_element(&expected, dtype, 0);
          ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(want))
              << name_of(dtype) << " " << row[static_cast<std::size_t>(d)] << " became " << got << ", expected " << want;
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
      ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << name_of(dtype) << " " << std::hex << bits;
    }
  }
}

}  // namespace
}  // namespace annulus
