// What one rank of a large ring keeps to compute: its view of the plan is turned into work lists
// without a transport or tensors.
//
//   build/release/bench/work_lists_bench

#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"
#include "kernels/backend.h"

namespace annulus {
namespace {

constexpr int kHeads = 8;

void compile(benchmark::State& state, const Pattern& pattern, const Placement& placement,
             Stage::Kind kind) {
  const int rank = placement.ranks() / 3;
  const Plan plan({pattern, placement, placement, kHeads, Schedule::ring, Travel::keys}, rank);
  Computation computation;
  computation.pattern = &pattern;
  computation.query_tokens = computation.key_tokens = placement.local_tokens(rank);
  computation.kv_heads = kHeads;
  computation.head_dim = 64;
  std::vector<Stage> stages;
  for (int step = 0; step <= plan.steps(); ++step) stages.push_back({kind, &plan, step, step});
  const std::shared_ptr<Backend> backend = backend_of(Device{}, 0);
  std::int64_t bytes = 0;
  for (auto _ : state) {
    const bool forward = kind == Stage::Kind::forward;
    bytes = backend
                ->compile(computation, forward ? stages : std::vector<Stage>(),
                          forward ? std::vector<Stage>() : stages)
                ->list_bytes();
  }
  state.counters["list_MB"] = static_cast<double>(bytes) / 1e6;
  state.counters["steps"] = plan.steps();
}

void dense_billion(benchmark::State& state, bool causal, Stage::Kind kind) {
  constexpr std::int64_t kTokens = 1'000'000'000;
  compile(state, dense(kHeads, causal),
          causal ? Placement::zigzag(kTokens, 1024) : Placement::contiguous(kTokens, 1024), kind);
}

BENCHMARK_CAPTURE(dense_billion, forward, false, Stage::Kind::forward)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(dense_billion, backward, false, Stage::Kind::gradients)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(dense_billion, causal_zigzag_forward, true, Stage::Kind::forward)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(dense_billion, causal_zigzag_backward, true, Stage::Kind::gradients)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace annulus
