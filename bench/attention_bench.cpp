// Kernels alone, one rank: forward and backward over dense and dilated patterns, with the share of
// the measured FMA peak.
//
//   build/release/bench/attention_bench --benchmark_filter=forward

#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include "annulus/half.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "core/thread_pool.h"
#include "kernels/cpu/kernel.h"

namespace {

using namespace annulus;

constexpr int kHeads = 8;

struct Case {
  DType dtype;
  int head_dim;
  std::int64_t tokens;
  bool causal;
  std::int64_t
      dilation;  // 1: dense over all tokens; else one branch of tokens / dilation rows per segment
};

// q, k, v, o, dO, dq, dk, dv of one rank, and its executor.
class Setup {
 public:
  explicit Setup(const Case& c) : case_(c), transport_(std::move(make_in_process_ring(1)[0])) {
    const std::vector<std::int64_t> segments{c.tokens};
    const std::vector<std::int64_t> dilations{c.dilation};
    RingOptions options{longnet(kHeads, segments, dilations, c.causal),
                        Placement::contiguous(c.tokens, 1)};
    options.kv_heads = kHeads;
    options.head_dim = c.head_dim;
    options.dtype = c.dtype;
    ring_ = std::make_unique<RingAttention>(options, *transport_);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const std::int64_t elements = c.tokens * kHeads * c.head_dim;
    for (auto& tensor : tensors_) {
      tensor.resize(static_cast<std::size_t>(elements) * size_of(c.dtype));
      for (std::int64_t i = 0; i < elements; ++i)
        store_element(tensor.data(), c.dtype, i, normal(random));
    }
    lse_.resize(static_cast<std::size_t>(c.tokens * kHeads));
    pairs_ = allowed_pairs(options.pattern, c.tokens);
    forward();
  }

  void forward() { ring_->forward(view(0), view(1), view(2), view(3), lse()); }
  void backward() {
    ring_->backward(view(0), view(1), view(2), view(3), lse(), view(4), view(5), view(6), view(7));
  }

  void report(benchmark::State& state, int flops_per_pair) const {
    const double flops = pairs_ * flops_per_pair * case_.head_dim;
    const bool native = case_.dtype == DType::bf16 && cpu::chosen_kernels().native_bf16;
    static const double peak[2] = {cpu::measure_fma_peak_gflops(false),
                                   cpu::measure_fma_peak_gflops(true)};
    const double roof = peak[native ? 1 : 0] * 1e9 * ThreadPool::shared()->threads();
    state.counters["FLOP/s"] =
        benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
    state.counters["of_peak"] =
        benchmark::Counter(flops / roof, benchmark::Counter::kIsIterationInvariantRate);
    state.SetLabel(std::string(name_of(case_.dtype)) + " " + ring_->kernels());
  }

 private:
  TensorView view(std::size_t i) {
    return {tensors_[i].data(), case_.dtype, {1, case_.tokens, kHeads, case_.head_dim}};
  }
  TensorView lse() { return {lse_.data(), DType::f32, {1, case_.tokens, kHeads}}; }

  Case case_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<RingAttention> ring_;
  std::vector<std::byte> tensors_[8];
  std::vector<float> lse_;
  double pairs_ = 0;
};

Case case_of(const benchmark::State& state) {
  return {static_cast<DType>(state.range(0)), static_cast<int>(state.range(1)), state.range(2),
          state.range(3) != 0, state.range(4)};
}

void forward(benchmark::State& state) {
  Setup setup(case_of(state));
  for (auto _ : state) setup.forward();
  setup.report(state, 4);
}

void backward(benchmark::State& state) {
  Setup setup(case_of(state));
  for (auto _ : state) setup.backward();
  setup.report(state, 10);
}

void dense_cases(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dtype", "dim", "tokens", "causal", "dilation"})
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
  for (const std::int64_t dtype : {0, 1, 2}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const std::int64_t tokens : {512, 1024, 4096}) {
        for (const std::int64_t causal : {0, 1}) b->Args({dtype, dim, tokens, causal, 1});
      }
    }
  }
  for (const std::int64_t r : {2, 4, 8, 16}) b->Args({0, 64, 2048 * r, 0, r});
}

BENCHMARK(forward)->Apply(dense_cases);
BENCHMARK(backward)->Apply(dense_cases);

}  // namespace
