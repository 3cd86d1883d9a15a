#include "kernels/cpu/engine.h"

#include <algorithm>
#include <utility>

#include "pattern/segments.h"

namespace annulus::cpu {

CpuEngine::CpuEngine(const Computation& computation, std::span<const Stage> forward,
                     std::span<const Stage> backward, const Kernels& kernels,
                     std::shared_ptr<ThreadPool> pool)
    : computation_(computation),
      problem_{computation.dtype, computation.head_dim, static_cast<float>(computation.scale),
               static_cast<float>(computation.softcap), computation.dropout},
      kernels_(problem_.caps_or_drops() && kernels.with_softcap_or_dropout != nullptr
                   ? *kernels.with_softcap_or_dropout
                   : kernels),
      pool_(std::move(pool)) {
  compile(forward_, forward);
  compile(backward_, backward);

  std::size_t passes = 0;
  std::size_t longest = 0;
  std::size_t counters = 0;
  for (const Work& work : forward_) {
    passes += work.phases().size();
    for (const Phase& phase : work.phases()) share_runner_.reserve(phase);
    longest = std::max(longest, work.longest_run_list());
  }
  for (const Work& work : backward_) {
    longest = std::max(longest, work.longest_run_list());
    counters = std::max(counters, work.turn_counters());
  }
  turns_ = std::make_unique<Turns>(counters);
  list_bytes_ += static_cast<std::int64_t>(counters * sizeof(std::int32_t)) + share_runner_.bytes();
  const Plan& plan = *forward.front().plan;
  every_row_attends_ = every_query_attends(*computation.pattern, plan.query_placement().tokens(),
                                           plan.key_placement().tokens(), computation.batch);
  // Not with output_scale, because a 16-bit output would be rounded twice.
  direct_output_ = passes <= 1 && (is_fp32() || computation.pattern->output_scale == 1.0);
  state_bytes_ = needed_state();
  if (computation.backward)
    dsinks_.resize(static_cast<std::size_t>(kMostSinkBlocks) *
                   static_cast<std::size_t>(computation.heads()));
  runs_.resize(static_cast<std::size_t>(pool_->threads()));
  for (Runs& runs : runs_) {
    runs.queries.reserve(longest);
    runs.keys.reserve(longest);
  }
}

void CpuEngine::compile(std::vector<Work>& works, std::span<const Stage> stages) {
  works.reserve(stages.size());
  std::vector<std::size_t> distinct;  // stages with lists of their own
  for (const Stage& stage : stages) {
    PackedBytes packed_bytes;
    if (kernels_.packed_bytes != nullptr && kernels_.packed_bytes(problem_, 1) > 0)
      packed_bytes = [&](std::int64_t rows) { return kernels_.packed_bytes(problem_, rows); };
    Work& work = works.emplace_back(stage, computation_, pool_->threads(), packed_bytes);
    const bool shared = std::any_of(distinct.rbegin(), distinct.rend(), [&](std::size_t other) {
      return work.share_phases(works[other]);
    });
    if (!shared) distinct.push_back(works.size() - 1);
    list_bytes_ += work.bytes(!shared);
  }
}

CpuEngine::StateBytes CpuEngine::needed_state() const {
  StateBytes bytes;
  if (!is_fp32()) {
    // Forward and backward never run at the same time, so they share the larger workspace.
    const auto [dq, dk, dv] = sum_bytes();
    bytes.accumulators = computation_.backward ? dq + dk + dv : direct_output_ ? 0 : dq;
    if (computation_.kept != nullptr) {
      bytes.accumulators =
          std::max(bytes.accumulators, computation_.kept->rows() * computation_.head_dim * 4);
    }
  }
  for (const Work& work : forward_)
    for (const Phase& phase : work.phases())
      bytes.packed = std::max(bytes.packed, phase.packed_bytes);
  if (computation_.backward)
    bytes.statistics = computation_.query_rows() * computation_.statistics_width() * 4;
  return bytes;
}

void CpuEngine::allocate(const ReceivedRows& received, Queue&) {
  received_ = received;
  accumulators_ = allocate_host(state_bytes_.accumulators, "fp32 accumulators");
  packed_ = allocate_host(state_bytes_.packed, "packed keys");
  statistics_ = allocate_host(state_bytes_.statistics, "row statistics");
}

std::int64_t CpuEngine::state_bytes() const {
  return state_bytes_.accumulators + state_bytes_.packed + state_bytes_.statistics;
}

std::array<std::int64_t, 3> CpuEngine::sum_bytes() const {
  const auto bytes = [&](std::int64_t rows) {
    constexpr std::int64_t kCacheLine = 64;
    return (rows * computation_.head_dim * 4 + kCacheLine - 1) / kCacheLine * kCacheLine;
  };
  const std::int64_t keys = bytes(computation_.key_rows());
  return {bytes(computation_.query_rows()), keys, keys};
}

std::int64_t CpuEngine::list_bytes() const { return list_bytes_; }

TensorRows CpuEngine::rows_of(const float* base, std::int64_t tokens, int heads,
                              std::int64_t width) {
  const std::int64_t row = width * 4;
  auto* bytes = reinterpret_cast<std::byte*>(const_cast<float*>(base));
  return {bytes, tokens * heads * row, row, heads * row};
}

TensorRows CpuEngine::statistics() const {
  return rows_of(statistics_.floats(), computation_.query_tokens, computation_.heads(),
                 computation_.statistics_width());
}

void CpuEngine::for_each_token(std::int64_t tokens,
                               FunctionRef<void(std::int64_t, std::int64_t)> body) const {
  constexpr std::int64_t kTokens = 256;
  const std::int64_t blocks = (tokens + kTokens - 1) / kTokens;
  pool_->run_parallel(computation_.batch * blocks, [&](std::int64_t index, int) {
    const std::int64_t first = index % blocks * kTokens;
    for (std::int64_t t = first; t < std::min(tokens, first + kTokens); ++t)
      body(index / blocks, t);
  });
}

}  // namespace annulus::cpu
