// The check of `annulus run` accepts right results of any input and rejects wrong ones.

#include "cli/sample_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "annulus/half.h"
#include "cli/job.h"
#include "support/problem.h"

namespace annulus::cli {
namespace {

using Numbers = std::vector<std::int64_t>;
// Value of one element: which tensor (q, k, v or d for dO), position, a normal deviate.
using Fill = std::function<double(char tensor, std::int64_t position, double normal)>;

constexpr std::int64_t kTokens = 300;

RingOptions options_for(DType dtype, Pattern pattern, int kv_heads = 2) {
  RingOptions options{.pattern = std::move(pattern),
                      .placement = Placement::contiguous(kTokens, 3)};
  options.kv_heads = kv_heads;
  options.head_dim = 32;
  options.dtype = dtype;
  return options;
}

void fill(JobTensors& tensors, const Fill& value) {
  std::mt19937_64 engine(11);
  std::normal_distribution<double> normal;
  const std::pair<char, const RingTensor*> inputs[] = {
      {'q', &tensors.q}, {'k', &tensors.k}, {'v', &tensors.v}, {'d', &tensors.dout}};
  for (const auto& [name, tensor] : inputs) {
    const TensorView& view = tensor->view();
    for (std::int64_t i = 0; i < view.elements(); ++i) {
      store_element(view.data, view.dtype, i,
                    static_cast<float>(value(name, i / view.stride[1], normal(engine))));
    }
  }
}

double plain(char, std::int64_t, double normal) { return normal; }

struct Input {
  const char* name;
  Fill value;
};

const std::vector<Input>& inputs() {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  static const std::vector<Input> list = {
      {"random", plain},
      {"zeros", [](char, std::int64_t, double) { return 0.0; }},
      {"constant_v", [](char t, std::int64_t, double x) { return t == 'v' ? 5.0 : x; }},
      {"nearly_constant_v",
       [](char t, std::int64_t, double x) { return t == 'v' ? 5.0 + 0.03 * x : x; }},
      {"nearly_constant_k_and_v",
       [](char t, std::int64_t, double x) {
         return t == 'v' ? 5.0 + 0.03 * x : t == 'k' ? 3.0 + 0.1 * x : x;
       }},
      {"two_halves",  // long partial sums that cancel
       [](char t, std::int64_t at, double x) {
         return t == 'k' || t == 'v' ? (at < kTokens / 2 ? 3.0 : -3.0) + 0.01 * x : 0.2 * x;
       }},
      {"equal_rows", [](char t, std::int64_t, double) { return t == 'd' ? 0.7 : 0.3; }},
      {"tiny", [](char, std::int64_t, double x) { return 1e-20 * x; }},
      {"tiny_v_and_do",
       [](char t, std::int64_t, double x) { return (t == 'v' || t == 'd' ? 1e-20 : 1.0) * x; }},
      {"subnormal", [](char, std::int64_t, double x) { return 1e-39 * x; }},
      {"scores_of_10", [](char t, std::int64_t, double x) { return (t == 'q' ? 10 : 1) * x; }},
      {"scores_of_10000",
       [](char t, std::int64_t, double x) { return (t == 'q' || t == 'k' ? 100 : 1) * x; }},
      {"large_v", [](char t, std::int64_t, double x) { return (t == 'v' ? 1e4 : 1.0) * x; }},
      {"huge", [](char, std::int64_t, double x) { return 1e30 * x; }},
      {"nan", [](char, std::int64_t, double) { return kNaN; }},
      {"one_nan_key",
       [](char t, std::int64_t at, double x) { return t == 'k' && at == 40 ? kNaN : x; }},
      {"one_infinite_value",
       [](char t, std::int64_t at, double x) {
         return t == 'v' && at == 40 ? std::numeric_limits<double>::infinity() : x;
       }},
  };
  return list;
}

struct Problem {
  const char* name;
  RingOptions options;
};

std::vector<Problem> problems(DType dtype) {
  std::vector<Problem> list = {
      {"dense", options_for(dtype, dense(4))},
      {"dense_causal", options_for(dtype, dense(4, true), 4)},
      {"longnet", options_for(dtype, longnet(4, Numbers{32, 256}, Numbers{1, 4}))},
      {"few_keys", options_for(dtype, longnet(4, Numbers{4}, Numbers{4}))},
      {"scaled", options_for(dtype, head_groups(4, Numbers{64, 300}, Numbers{1, 2}, true, true))}};
  list.push_back({"window", options_for(dtype, dense(4))});
  list.back().options.pattern.window = {30, 12};
  list.push_back(list[2]);
  list.back().name = "longnet_detached";
  list.back().options.mix_gradient = MixGradient::detached;
  return list;
}

class SampleCheck : public testing::TestWithParam<DType> {};

TEST_P(SampleCheck, AcceptsRightResultsOfAnyInput) {
  for (const Problem& problem : problems(GetParam())) {
    for (const Input& input : inputs()) {
      SCOPED_TRACE(std::string(problem.name) + ", " + input.name);
      JobTensors tensors(problem.options);
      fill(tensors, input.value);
      (void)run_job(problem.options, tensors, {});
      const SampledErrors errors =
          check_sampled_rows(problem.options, tensors, *ThreadPool::of(problem.options.threads));
      EXPECT_EQ(errors.complaint(), "");
      const auto note = [&](const char* tensor, const std::optional<SampledError>& error) {
        if (!error || error->allowed > 1.0) return;
        test::note_worst(std::string(name_of(GetParam())) + " " + tensor + " error / allowed",
                         error->found / error->allowed);
      };
      note("o", errors.o);
      note("lse", errors.lse);
      note("dq", errors.dq);
      note("dk", errors.dk);
      note("dv", errors.dv);
    }
  }
}

TEST_P(SampleCheck, SaysThatNothingWasComparedWhereAllIsNaN) {
  const RingOptions options = options_for(GetParam(), dense(4));
  JobTensors tensors(options);
  fill(tensors, [](char, std::int64_t, double) { return std::nan(""); });
  (void)run_job(options, tensors, {});
  const SampledErrors errors =
      check_sampled_rows(options, tensors, *ThreadPool::of(options.threads));
  EXPECT_EQ(errors.nonfinite_rows, errors.rows);
  EXPECT_FALSE(errors.worst().has_value());
}

struct Mutation {
  const char* name;
  // Changes the problem or the results after the computation, so that they no longer match.
  std::function<void(RingOptions&, JobTensors&)> apply;
};

void add_to(const RingTensor& tensor, std::int64_t token, double value) {
  const TensorView& view = tensor.view();
  const std::int64_t at = token * view.stride[1];
  store_element(view.data, view.dtype, at,
                static_cast<float>(load_element(view.data, view.dtype, at) + value));
}

TEST_P(SampleCheck, FindsWrongResults) {
  const std::vector<Mutation> mutations = {
      {"mask", [](RingOptions& o, JobTensors&) { o.pattern.causal = !o.pattern.causal; }},
      {"window",
       [](RingOptions& o, JobTensors&) {
         o.pattern.window = {5, 0};
       }},
      {"scale", [](RingOptions& o, JobTensors&) { o.scale = 0.2; }},
      {"output_scale", [](RingOptions& o, JobTensors&) { o.pattern.output_scale *= 1.1; }},
      {"one_key",
       [](RingOptions&, JobTensors& t) {
         for (std::int64_t d = 0; d < 32; ++d) {  // key 40 of head 0 is another
           store_element(t.k.view().data, t.k.view().dtype, 40 * t.k.view().stride[1] + d,
                         d % 2 == 0 ? 1.5F : -1.5F);
         }
       }},
      {"one_result", [](RingOptions&, JobTensors& t) { add_to(t.o, 0, 1.0); }},
      {"one_dq", [](RingOptions&, JobTensors& t) { add_to(t.dq, 0, 20.0); }},
      {"one_dv", [](RingOptions&, JobTensors& t) { add_to(t.dv, 0, 2.0); }},
      {"nan", [](RingOptions&, JobTensors& t) { add_to(t.dk, 0, std::nan("")); }},
      {"infinity", [](RingOptions&,
                      JobTensors& t) { add_to(t.o, 0, std::numeric_limits<double>::infinity()); }},
      {"lse", [](RingOptions&, JobTensors& t) { add_to(t.lse, 0, 1e-3); }},
  };
  for (const char* const kind : {"random", "nearly_constant_v"}) {
    for (const Problem& problem : problems(GetParam())) {
      const auto input = std::find_if(inputs().begin(), inputs().end(),
                                      [&](const Input& i) { return std::string(i.name) == kind; });
      for (const Mutation& mutation : mutations) {
        SCOPED_TRACE(std::string(problem.name) + ", " + kind + ", " + mutation.name);
        RingOptions options = problem.options;
        JobTensors tensors(options);
        fill(tensors, input->value);
        (void)run_job(options, tensors, {});
        mutation.apply(options, tensors);
        const std::string change = mutation.name;
        // dk is not checked with detached mixing. With few_keys a query sees only itself, so bands
        // make no difference, and key 40 is not among the checked rows.
        const bool invisible = (change == "nan" && options.mix_gradient == MixGradient::detached) ||
                               (std::string(problem.name) == "few_keys" &&
                                (change == "mask" || change == "window" || change == "one_key"));
        EXPECT_EQ(check_sampled_rows(options, tensors, *ThreadPool::of(options.threads))
                      .complaint()
                      .empty(),
                  invisible);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SampleCheck, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace
}  // namespace annulus::cli
