// Kernels at the edges of their range: logits of 1e4, values of any magnitude, NaN and infinity.

#include "kernels/cpu/kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/kernel_task.h"
#include "support/problem.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

class KernelRangeTest : public EveryKernelSet {};

INSTANTIATE_TEST_SUITE_P(Isa, KernelRangeTest, ::testing::ValuesIn(cpu::available_kernels()),
                         name_of_set);

// ---- logits of 1e4 -----------------------------------------------------------------------------

// Scores that are what they are: q = (1, 0, ...), k = (logit, noise...), scale 1.
TaskData with_logits(DType dtype, std::int64_t queries, const std::vector<double>& logits,
                     std::uint64_t seed = 10, int dim = 16) {
  const auto width = static_cast<std::size_t>(dim);
  TaskData data = random_task(seed, dtype, dim, false, progression(0, 1, queries),
                              progression(0, 1, std::ssize(logits)));
  data.scale = 1;
  for (std::size_t i = 0; i < data.q.size(); ++i) data.q[i] = i % width == 0 ? 1 : 0;
  for (std::size_t j = 0; j < logits.size(); ++j) data.k[j * width] = as_stored(dtype, logits[j]);
  return data;
}

// fp32 keeps a score of s to s * 2^-24, and its weight to that: with the few roundings on the way,
// 4 of them.
void expect_within_conditioning(const cpu::Kernels& kernels, const TaskData& data) {
  const TaskResult got = run_task(kernels, data);
  const TaskOracle want = oracle(data);
  double largest = 1;
  for (std::size_t j = 0; j < data.k.size(); j += 16)
    largest = std::max(largest, std::abs(data.k[j]));
  const double half = data.dtype == DType::bf16 && kernels.native_bf16 ? 0x1p-8 : 0.0;
  const double relative = 4 * largest * 1.4427 * 0x1p-24 + half + 2e-6;
  for (std::size_t m = 0; m < 5; ++m) {
    const double limit = m == 1 ? 4e-7 * std::max(1.0, largest) : 4 * relative;
    const auto& actual = *got.members()[m];
    const auto& expected = *want.members()[m];
    // dQ and dK multiply by k, which is as large as the logits.
    const double unit = m == 1 ? 1.0 : m == 2 ? largest : 1.0;
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(std::isfinite(actual[i])) << kResultNames[m] << "[" << i << "]";
      ASSERT_NEAR(actual[i], expected[i],
                  limit * unit * std::max(1.0, static_cast<double>(data.queries())))
          << kResultNames[m] << "[" << i << "]";
    }
  }
}

TEST_P(KernelRangeTest, LogitsUpTo10000NeitherOverflowNorVanish) {
  for (const DType dtype : kDTypes) {
    for (const double level : {1e4, -1e4, 90.0, -90.0, 40.0, -50.0}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " all at " + std::to_string(level));
      // All equal: the output is the mean of V, whatever the level.
      const TaskData data = with_logits(dtype, 3, std::vector<double>(150, level));
      expect_within_conditioning(kernels(), data);
    }
    SCOPED_TRACE(std::string(name_of(dtype)) + " random");
    Random random(12);
    std::vector<double> logits(300);
    for (double& x : logits) x = static_cast<double>(random.between(-10000, 10000));
    expect_within_conditioning(kernels(), with_logits(dtype, 2, logits));
  }
}

// Weights may be rounded, but then by the same factor above and below.
TEST_P(KernelRangeTest, OneKeyWithAllTheWeightGivesItsValue) {
  for (const DType dtype : kDTypes) {
    for (const double logit : {27.25, 29.5, 31.125, 60.5}) {
      for (const auto& [at, dim] :
           {std::pair{0, 64}, {31, 16}, {32, 64}, {100, 128}, {290, 128}, {299, 64}}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(logit) + " at key " +
                     std::to_string(at) + ", head dim " + std::to_string(dim));
        std::vector<double> logits(300, 0.0);
        logits[static_cast<std::size_t>(at)] = logit;
        const TaskData data = with_logits(dtype, 3, logits, 10, dim);
        const double* const value = &data.v[static_cast<std::size_t>(at * dim)];
        TaskRun run;
        const std::vector<float> state(data.q.size(), 3.0F);
        const std::vector<float> nothing(3, -kInf);
        const std::vector<float> little(3, 0.0F);
        run.state_o = &state;
        for (const std::vector<float>* const lse : {&nothing, &little}) {
          run.state_lse = lse;
          TaskResult got;
          run_forward(kernels(), data, run, got);
          for (std::size_t i = 0; i < got.o.size(); ++i)
            ASSERT_NEAR(got.o[i], value[i % static_cast<std::size_t>(dim)], 2e-6) << i;
        }
      }
    }
  }
}

// The reference maximum is wrong by 1e4 from one key to the next, wherever in a tile or block that
// is.
TEST_P(KernelRangeTest, LogitsMayJumpBy10000AtAnyKey) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double jump : {1e4, -1e4, 60.0, -100.0}) {
      for (std::size_t at = 0; at < 290; at += at % 128 < 10 || at % 128 > 120 ? 1 : 13) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " by " + std::to_string(jump) + " at key " +
                     std::to_string(at));
        std::vector<double> logits(290, 0.0);
        for (std::size_t j = at; j < logits.size(); ++j) logits[j] = jump;
        TaskResult got;
        const TaskData data = with_logits(dtype, 1, logits);
        run_forward(kernels(), data, {}, got);
        const TaskOracle want = oracle(data);
        const double limit = dtype == DType::bf16 ? 4e-3 : 1e-5;
        for (std::size_t i = 0; i < got.o.size(); ++i) ASSERT_NEAR(got.o[i], want.o[i], limit) << i;
        ASSERT_NEAR(got.lse[0], want.lse[0], 2e-3);
      }
    }
  }
}

TEST_P(KernelRangeTest, LogitsMayClimbFromBlockToBlock) {
  for (const double slope : {0.4, 3.0, 33.0, -0.4, -33.0}) {
    std::vector<double> logits(300);
    for (std::size_t j = 0; j < logits.size(); ++j) logits[j] = slope * static_cast<double>(j);
    SCOPED_TRACE("slope " + std::to_string(slope));
    expect_within_conditioning(kernels(), with_logits(DType::f32, 2, logits));
  }
}

// Beyond 2^31 fp32 and a product that is not rounded differ by more than 2^x has room for.
TEST_P(KernelRangeTest, OneKeyFarAboveTheOthersIsTheOutputAtAnyLevel) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double level : {1e8, 1e9, 1e10, 1e12, 1e20, 1e30}) {
      for (const std::size_t at : {0U, 3U, 8U, 140U, 289U}) {
        for (int trial = 0; trial < 8; ++trial) {
          SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(level) + " at key " +
                       std::to_string(at) + ", trial " + std::to_string(trial));
          std::vector<double> logits(290, 0.0);
          logits[at] = level * (1 + 0.03 * trial);
          const TaskData data = with_logits(dtype, 2, logits);
          TaskResult got;
          run_forward(kernels(), data, {}, got);
          for (std::size_t i = 0; i < got.o.size(); ++i)
            ASSERT_NEAR(got.o[i], data.v[at * 16 + i % 16], 2e-6);
          ASSERT_NEAR(got.lse[0], data.k[at * 16], 1e-6 * level);
        }
      }
    }
  }
}

// The same scores by other roundings: those of the log-sum-exp are then not those of the scores.
TaskData by_thirds(TaskData data) {
  data.scale = 1.0 / 3;
  for (std::size_t j = 0; j < data.k.size(); j += 16)
    data.k[j] = as_stored(data.dtype, 3 * data.k[j]);
  return data;
}

// fp32 rounds a log-sum-exp of 4e4 by up to 2e-3, one of 1e9 by 32. A row that has one key for all
// practical purposes gives it the weight 1 all the same, alone or in several branches.
TEST_P(KernelRangeTest, BackwardGivesALoneKeyTheWeightOne) {
  for (const DType dtype : kDTypes) {
    for (const double level : {5e3, 4e4, -4e4, 1e7, 1e9, -1e9}) {
      if (dtype == DType::f16 && std::abs(level) > 1e4) continue;  // 65,504 is its largest
      for (const bool repeats : {false, true}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " at " + std::to_string(level) +
                     (repeats ? " thrice" : ""));
        Random random(13);
        for (int trial = 0; trial < 20; ++trial) {
          // 140 keys, the others far below.
          std::vector<double> logits(140, level - std::abs(level) / 2);
          const auto top = static_cast<std::size_t>(random.between(0, 139));
          logits[top] = level * (1 + 0.01 * trial);
          TaskData data =
              by_thirds(with_logits(dtype, 5, logits, 20 + static_cast<std::uint64_t>(trial)));
          if (repeats) data.repeats = {{1, 0}, {1, 0}};  // every pair is in three branches
          const TaskResult got = run_task(kernels(), data);
          const TaskOracle want = oracle(data);
          const double limit = dtype == DType::f32 ? 1e-6 : 1e-2;
          for (std::size_t i = 0; i < got.dv.size(); ++i)
            ASSERT_NEAR(got.dv[i], want.dv[i], limit * (1 + std::abs(want.dv[i]))) << i;
        }
      }
    }
  }
}

// Where other branches may have the same pairs, half of a weight can be theirs. It still stays
// below 1, and is right where the log-sum-exp tells one from a half.
TEST_P(KernelRangeTest, BackwardWeightsNeverExceedOne) {
  TaskRun run;
  run.only_branch = false;
  for (const double level : {5e3, 4e4, 1e7, 1e9, 1e12}) {
    for (int trial = 0; trial < 20; ++trial) {
      SCOPED_TRACE(std::to_string(level) + ", trial " + std::to_string(trial));
      std::vector<double> logits(40, -level);
      logits[7] = level * (1 + 0.003 * trial);
      const TaskData data = by_thirds(with_logits(DType::f32, 5, logits));
      const TaskResult got = run_task(kernels(), data, run);
      const TaskOracle want = oracle(data);
      for (std::size_t i = 7 * 16; i < 8 * 16; ++i) {
        double most = 0;
        for (std::size_t t = 0; t < 5; ++t) most += std::abs(data.dout[t * 16 + i % 16]);
        ASSERT_LE(std::abs(got.dv[i]), most * (1 + 1e-6));
        if (level < 1e6) {
          ASSERT_NEAR(got.dv[i], want.dv[i], 1e-6 * most);
        }
      }
    }
  }
}

TEST_P(KernelRangeTest, StateMayBe10000AwayFromTheScores) {
  for (const double old_lse : {1e4, -1e4, 120.0, -120.0}) {
    const TaskData data = with_logits(DType::f32, 40, std::vector<double>(20, 0.0));
    const std::vector<float> o(data.q.size(), 0.25F);
    const std::vector<float> lse(40, static_cast<float>(old_lse));
    TaskRun run;
    run.state_o = &o;
    run.state_lse = &lse;
    TaskResult got;
    run_forward(kernels(), data, run, got);
    const TaskOracle fresh = oracle(data);
    for (std::size_t i = 0; i < got.o.size(); ++i) {
      EXPECT_NEAR(got.o[i], old_lse > 0 ? 0.25 : fresh.o[i], 1e-6);
    }
    EXPECT_NEAR(got.lse[0], old_lse > 0 ? old_lse : fresh.lse[0], 2e-3);
  }
}

// Values from tiny to huge keep their precision: the reference of a row is not its maximum, and
// must not cost range.
TEST_P(KernelRangeTest, ValuesOfAnyMagnitudeKeepTheirPrecision) {
  for (const double magnitude : {1e-20, 1e-10, 1e10, 1e20}) {
    TaskData data =
        random_task(13, DType::f32, 8, false, progression(0, 1, 33), progression(0, 1, 150));
    for (double& x : data.q) x = static_cast<float>(x * 4);  // logits to +-30 and beyond
    for (double& x : data.v) x = static_cast<float>(x * magnitude);
    TaskResult got;
    run_forward(kernels(), data, {}, got);
    EXPECT_LE(relative_rms(got.o, oracle(data).o), 4e-6) << magnitude;
  }
}

// ---- NaN and infinity --------------------------------------------------------------------------

// Which results may change when row `row` of a tensor (0: q, 1: k, 2: v, 3: dout) does. Queries
// that are it or see it, and the gradients of the keys that those queries see.
struct Affected {
  std::vector<bool> query, key;

  Affected(const TaskData& data, int tensor, std::int64_t row)
      : query(static_cast<std::size_t>(data.queries())),
        key(static_cast<std::size_t>(data.keys())) {
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

// Every position of a ragged causal task, every tensor, NaN and both infinities: finite exactly
// where the oracle is, and where nothing can be seen of it, every bit is as before.
TEST_P(KernelRangeTest, PoisonReachesExactlyTheRowsOfTheOracle) {
  constexpr float kPoisons[] = {kNaN, kInf, -kInf};
  constexpr std::int64_t kRows = 43;
  for (const DType dtype : kDTypes) {
    // Queries from 0: the first sees one key only. Index stride 2: a diagonal of another slope than
    // the tiles'. Shuffled: rows of a tile, or of a pair, whose indices do not ascend, as in
    // striped shards.
    for (const std::string order : {"plain", "key index stride 2", "shuffled"}) {
      const TaskData clean =
          random_task(14, dtype, 8, true, progression(0, 1, kRows),
                      progression(0, order == "key index stride 2" ? 2 : 1, kRows));
      TaskRun run;
      if (order == "shuffled") {
        run.key_cuts = {{30, 1, 13}, {1, 3, 10}, {2, 3, 10}, {0, 3, 10}};
        run.query_cuts = {{21, 1, 22}, {1, 2, 10}, {0, 2, 11}};
      }
      const TaskResult bits = run_task(kernels(), clean, run);
      Random random(15);
      for (std::int64_t row = 0; row < kRows; ++row) {
        for (int tensor = 0; tensor < 4; ++tensor) {
          const float poison = kPoisons[(row + tensor) % 3];
          TaskData data = clean;
          std::vector<double>* const tensors[] = {&data.q, &data.k, &data.v, &data.dout};
          (*tensors[tensor])[static_cast<std::size_t>(row * 8 + random.between(0, 7))] = poison;
          SCOPED_TRACE(std::string(name_of(dtype)) + " " + order + ", " + std::to_string(poison) +
                       " in " + std::string("qkvd").substr(static_cast<std::size_t>(tensor), 1) +
                       " row " + std::to_string(row));
          const TaskOracle want = oracle(data);
          const TaskResult got = run_task(kernels(), data, run);
          const Affected affected(data, tensor, row);
          for (std::size_t m = 0; m < 5; ++m) {
            for (std::size_t i = 0; i < want.members()[m]->size(); ++i) {
              const double expected = (*want.members()[m])[i];
              const float actual = (*got.members()[m])[i];
              const std::string where =
                  std::string(kResultNames[m]) + "[" + std::to_string(m == 1 ? i : i / 8) + "]";
              if (m == 0 && want.lse[i / 8] == kNegInf) continue;  // not even initialised
              if (m == 1 && expected == kNegInf) {
                ASSERT_EQ(actual, -kInf) << where;
                continue;
              }
              ASSERT_EQ(std::isfinite(actual), std::isfinite(expected))
                  << where << " is " << actual << ", oracle " << expected;
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

// Without causal mask only the padding of tiles is masked: nothing must leak out of it, and nothing
// be lost in it.
TEST_P(KernelRangeTest, PoisonStaysOutOfPaddingWithoutMask) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t keys : {1, 3, 8, 13}) {
      for (const std::int64_t queries : {1, 5, 33}) {
        const TaskData clean =
            random_task(16, dtype, 8, false, progression(0, 1, queries), progression(0, 1, keys));
        for (int tensor = 0; tensor < 4; ++tensor) {
          TaskData data = clean;
          std::vector<double>* const tensors[] = {&data.q, &data.k, &data.v, &data.dout};
          tensors[tensor]->back() = kNaN;
          const TaskOracle want = oracle(data);
          const TaskResult got = run_task(kernels(), data);
          for (std::size_t m = 0; m < 5; ++m) {
            for (std::size_t i = 0; i < want.members()[m]->size(); ++i) {
              ASSERT_EQ(std::isfinite((*got.members()[m])[i]),
                        std::isfinite((*want.members()[m])[i]))
                  << kResultNames[m] << "[" << i << "], " << queries << " queries, " << keys
                  << " keys, tensor " << tensor;
            }
          }
        }
      }
    }
  }
}

// Rows that see keys, but with scores of -inf only: nothing comes out and no gradient goes in, not
// even 0 x Inf.
TEST_P(KernelRangeTest, RowsWithNothingButMinusInfinityAreEmpty) {
  for (const DType dtype : kDTypes) {
    for (const bool in_keys : {false, true}) {
      TaskData data =
          random_task(17, dtype, 8, false, progression(0, 1, 35), progression(0, 1, 11));
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
        EXPECT_EQ(got.lse[i] == -kInf, want.lse[i] == kNegInf) << "lse " << i;
      }
      for (std::size_t m = 2; m < 5; ++m) {
        for (std::size_t i = 0; i < want.members()[m]->size(); ++i) {
          ASSERT_TRUE(std::isfinite((*want.members()[m])[i]));
          ASSERT_TRUE(std::isfinite((*got.members()[m])[i]))
              << kResultNames[m] << "[" << i / 8 << "]";
        }
      }
    }
  }
}

// ... and no output either, whatever the values of these keys are: nobody clears it afterwards
// where every row has keys.
TEST_P(KernelRangeTest, RowsWithNothingButMinusInfinityAreZeroWhateverTheValues) {
  for (const DType dtype : kDTypes) {
    TaskData data = random_task(18, dtype, 8, false, progression(0, 1, 35), progression(0, 1, 140));
    for (double& x : data.q) x = std::abs(x) + 1;
    for (std::size_t j = 0; j < data.k.size(); j += 8) data.k[j] = -kInf;
    data.v[5] = kNaN;
    data.v[130 * 8 + 2] = kInf;
    TaskRun run;
    run.out_dtype = dtype;
    TaskResult got;
    run_forward(kernels(), data, run, got);
    for (const float x : got.lse) EXPECT_EQ(x, -kInf);
    for (const float x : got.o) EXPECT_EQ(x, 0.0F) << name_of(dtype);
  }
}

}  // namespace
}  // namespace annulus::test
