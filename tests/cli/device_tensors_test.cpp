// Jobs of the tool on a device that is none: tensors are copied there and back, passes are
// enqueued.

#include <gtest/gtest.h>

#include <vector>

#include "cli/job.h"
#include "cli/oracle_check.h"
#include "cli/sample_check.h"
#include "support/late_backend.h"

namespace annulus::cli {
namespace {

RingOptions some_options(DType dtype, MixGradient mix, const char* placement) {
  const std::vector<std::int64_t> segments = {32, 64};
  const std::vector<std::int64_t> dilations = {1, 2};
  RingOptions options{.pattern = longnet(4, segments, dilations, true),
                      .placement = Placement::named(placement, 150, 3)};
  options.batch = 2;
  options.kv_heads = 2;
  options.head_dim = 16;
  options.dtype = dtype;
  options.mix_gradient = mix;
  options.schedule = Schedule::ring;
  return options;
}

TEST(DeviceTensors, ResultsOfALateDeviceComeBackWhole) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      for (const char* placement : {"contiguous", "zigzag"}) {
        const RingOptions options = some_options(dtype, mix, placement);
        const OracleCheck oracle(options, 1);
        const test::LateBackends late;
        const OracleCheck::Outcome outcome = oracle.run(options);
        ASSERT_EQ(outcome.deviations.size(), 5U);
        for (const Deviation& deviation : outcome.deviations) {
          EXPECT_TRUE(deviation.ok()) << name_of(dtype) << " " << placement << " "
                                      << deviation.tensor << " " << deviation.found;
        }
      }
    }
  }
}

TEST(DeviceTensors, RanksWithoutTokensHaveNothingToCopy) {
  RingOptions options = some_options(DType::f32, MixGradient::full, "contiguous");
  options.placement = Placement::contiguous(3, 5);
  const OracleCheck oracle(options, 1);
  const test::LateBackends late;
  for (const Deviation& deviation : oracle.run(options).deviations) {
    EXPECT_TRUE(deviation.ok()) << deviation.tensor << " " << deviation.found;
  }
}

TEST(DeviceTensors, ManyPassesAreOneRepetitionAndCountTheirBytesEach) {
  const RingOptions options = some_options(DType::bf16, MixGradient::full, "zigzag");
  JobTensors tensors(options);
  JobSettings settings;
  settings.prepare = [&](int rank, ThreadPool& pool) { fill_synthetic(tensors, rank, 1, pool); };
  const JobReport once = run_job(options, tensors, settings);
  const test::LateBackends late;
  settings.repeat = 2;
  settings.passes = 3;
  const JobReport many = run_job(options, tensors, settings);
  EXPECT_EQ(many.forward.seconds.size(), 2U);
  EXPECT_EQ(many.forward.measured_bytes, once.forward.measured_bytes);
  EXPECT_EQ(many.backward.measured_bytes, once.backward.measured_bytes);
  EXPECT_EQ(check_sampled_rows(options, tensors, *ThreadPool::shared()).complaint(), "");
}

}  // namespace
}  // namespace annulus::cli
