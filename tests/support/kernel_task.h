#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "annulus/half.h"
#include "core/thread_pool.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_packs.h"
#include "kernels/reference/softmax.h"
#include "kernels/row_index.h"
#include "support/guarded_memory.h"

// One kernel task with its data, an fp64 oracle and memory for kernels: unaligned rows, in runs
// that a test chooses.
namespace annulus::test {

inline constexpr double kNegInf = -std::numeric_limits<double>::infinity();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct TaskData {
  DType dtype = DType::f32;
  int dim = 8;
  double scale = 1;
  Band band;  // in indices
  std::vector<std::int32_t> q_index, k_index;
  std::vector<double> q, dout;  // [queries][dim], representable in dtype
  std::vector<double> k, v;     // [keys][dim]
  std::vector<Repeat> repeats;
  IndexFilter key_filter;  // forward only: the selected keys; the others may be packed, too
  reference::SoftmaxOptions softmax;
  IndexTokens tokens;  // batch entry 2, head 3

  [[nodiscard]] dropout::Rows dropout_rows() const {
    return {dropout::head_of({softmax.dropout_seed}, 2, 3), tokens};
  }
  [[nodiscard]] double kept(std::int64_t query, std::int64_t key) const {
    return reference::kept(softmax, 2, 3, tokens.query(q_index[static_cast<std::size_t>(query)]),
                           tokens.key(k_index[static_cast<std::size_t>(key)]));
  }
  [[nodiscard]] std::int64_t queries() const { return std::ssize(q_index); }
  [[nodiscard]] std::int64_t keys() const { return std::ssize(k_index); }
  [[nodiscard]] bool sees(std::int64_t query, std::int64_t key) const {
    const std::int32_t index = k_index[static_cast<std::size_t>(key)];
    const IndexGap& gap = key_filter.gap;
    if (index < key_filter.begin || index >= key_filter.end) return false;
    if (index >= gap.begin && index < gap.end) return false;
    return band.allows(q_index[static_cast<std::size_t>(query)], index);
  }
  [[nodiscard]] double times(std::int64_t query, std::int64_t key) const {
    double count = 1;
    for (const Repeat& r : repeats) {
      if (q_index[static_cast<std::size_t>(query)] % r.stride == r.phase &&
          k_index[static_cast<std::size_t>(key)] % r.stride == r.phase)
        count += 1;
    }
    return count;
  }
};

inline std::vector<std::int32_t> progression(std::int32_t first, std::int32_t stride,
                                             std::int64_t count) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = first + stride * static_cast<std::int32_t>(i);
  return out;
}

inline double as_stored(DType dtype, double value) {
  std::uint32_t bits = 0;
  store_element(&bits, dtype, 0, static_cast<float>(value));
  return load_element(&bits, dtype, 0);
}

inline TaskData random_task(std::uint64_t seed, DType dtype, int dim, bool causal,
                            std::vector<std::int32_t> q_index, std::vector<std::int32_t> k_index) {
  TaskData data{dtype,
                dim,
                1.0 / std::sqrt(dim),
                causal ? Band::causal() : Band{},
                std::move(q_index),
                std::move(k_index),
                {},
                {},
                {},
                {},
                {},
                {},
                {},
                {}};
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](std::int64_t rows) {
    std::vector<double> out(static_cast<std::size_t>(rows * dim));
    for (double& x : out) x = as_stored(dtype, normal(engine));
    return out;
  };
  data.q = fill(data.queries());
  data.dout = fill(data.queries());
  data.k = fill(data.keys());
  data.v = fill(data.keys());
  return data;
}

// Results of a task, by row number. Gradients are what a kernel adds.
template <typename T>
struct BasicTaskResult {
  std::vector<T> o, lse, dq, dk, dv;
  [[nodiscard]] std::vector<const std::vector<T>*> members() const {
    return {&o, &lse, &dq, &dk, &dv};
  }
};
using TaskResult = BasicTaskResult<float>;
using TaskOracle = BasicTaskResult<double>;

// The definition: softmax over the keys that a query sees, each as often as it counts; its gradient
// with delta = dO.O. A row that sees nothing, or only scores of -inf, has O = 0 and no gradient,
// and contributes none.
inline TaskOracle oracle(const TaskData& data, std::vector<double>* delta_out = nullptr) {
  const auto dim = static_cast<std::size_t>(data.dim);
  const auto dot = [&](const std::vector<double>& a, std::int64_t i, const std::vector<double>& b,
                       std::int64_t j) {
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      sum += a[static_cast<std::size_t>(i) * dim + d] * b[static_cast<std::size_t>(j) * dim + d];
    }
    return sum;
  };
  const auto add = [&](std::vector<double>& into, std::int64_t i, double w,
                       const std::vector<double>& from, std::int64_t j) {
    for (std::size_t d = 0; d < dim; ++d) {
      into[static_cast<std::size_t>(i) * dim + d] +=
          w * from[static_cast<std::size_t>(j) * dim + d];
    }
  };
  TaskOracle out;
  out.o.assign(data.q.size(), 0);
  out.dq.assign(data.q.size(), 0);
  out.dk.assign(data.k.size(), 0);
  out.dv.assign(data.k.size(), 0);
  out.lse.assign(data.q_index.size(), kNegInf);
  if (delta_out != nullptr) delta_out->assign(data.q_index.size(), 0);
  for (std::int64_t i = 0; i < data.queries(); ++i) {
    std::vector<std::int64_t> seen;
    std::vector<double> score, slope;
    for (std::int64_t j = 0; j < data.keys(); ++j) {
      if (!data.sees(i, j)) continue;
      seen.push_back(j);
      const double s = data.scale * dot(data.q, i, data.k, j);
      score.push_back(reference::capped(data.softmax, s) + std::log(data.times(i, j)));
      slope.push_back(reference::cap_slope(data.softmax, s));
    }
    const bool nothing =
        std::all_of(score.begin(), score.end(), [](double s) { return s == kNegInf; });
    if (!nothing) {
      double highest = kNegInf;
      for (const double s : score) highest = s > highest ? s : highest;
      double sum = 0;
      for (const double s : score) sum += std::exp(s - highest);
      const double lse = highest + std::log(sum);
      out.lse[static_cast<std::size_t>(i)] = lse;
      for (std::size_t n = 0; n < seen.size(); ++n)
        add(out.o, i, data.kept(i, seen[n]) * std::exp(score[n] - lse), data.v, seen[n]);
    }
    const double delta = dot(data.dout, i, out.o, i);
    if (delta_out != nullptr) (*delta_out)[static_cast<std::size_t>(i)] = delta;
    if (nothing) continue;
    for (std::size_t n = 0; n < seen.size(); ++n) {
      const std::int64_t j = seen[n];
      const double p = std::exp(score[n] - out.lse[static_cast<std::size_t>(i)]);
      const double kept = data.kept(i, j);
      const double ds = slope[n] * p * (kept * dot(data.dout, i, data.v, j) - delta);
      add(out.dv, j, kept * p, data.dout, i);
      add(out.dq, i, data.scale * ds, data.k, j);
      add(out.dk, j, data.scale * ds, data.q, i);
    }
  }
  return out;
}

// The sums of the magnitudes of the terms of each result. `rounded` uses the magnitudes of P and
// dS; `exact` uses those of the terms of dS = P (dO.V - delta). Without lse.
struct TaskMagnitudes {
  TaskOracle rounded, exact;
};
inline TaskMagnitudes magnitudes(const TaskData& data) {
  std::vector<double> delta;
  const TaskOracle result = oracle(data, &delta);
  const auto dim = static_cast<std::size_t>(data.dim);
  const auto at = [&](const std::vector<double>& a, std::int64_t row, std::size_t d) {
    return a[static_cast<std::size_t>(row) * dim + d];
  };
  TaskMagnitudes out;
  for (TaskOracle* const sums : {&out.rounded, &out.exact}) {
    sums->o.assign(data.q.size(), 0);
    sums->dq.assign(data.q.size(), 0);
    sums->dk.assign(data.k.size(), 0);
    sums->dv.assign(data.k.size(), 0);
  }
  for (std::int64_t i = 0; i < data.queries(); ++i) {
    for (std::int64_t j = 0; j < data.keys(); ++j) {
      if (!data.sees(i, j)) continue;
      double score = std::log(data.times(i, j));
      double dp = 0;
      double dp_size = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        score += data.scale * at(data.q, i, d) * at(data.k, j, d);
        dp += at(data.dout, i, d) * at(data.v, j, d);
        dp_size += std::abs(at(data.dout, i, d) * at(data.v, j, d));
      }
      const double p = std::exp(score - result.lse[static_cast<std::size_t>(i)]);
      const double own_delta = delta[static_cast<std::size_t>(i)];
      const double ds = p * std::abs(dp - own_delta);
      const double ds_size = p * (dp_size + std::abs(own_delta));
      for (std::size_t d = 0; d < dim; ++d) {
        const std::size_t query = static_cast<std::size_t>(i) * dim + d;
        const std::size_t key = static_cast<std::size_t>(j) * dim + d;
        for (auto [sums, weight] : {std::pair(&out.rounded, ds), std::pair(&out.exact, ds_size)}) {
          sums->o[query] += p * std::abs(data.v[key]);
          sums->dv[key] += p * std::abs(data.dout[query]);
          sums->dq[query] += data.scale * weight * std::abs(data.k[key]);
          sums->dk[key] += data.scale * weight * std::abs(data.q[query]);
        }
      }
    }
  }
  return out;
}

// Rows first, first + stride, ... of a row array that become one run.
struct Cut {
  std::int64_t first = 0;
  std::int64_t stride = 1;
  std::int64_t count = 0;
};

// Rows of one channel: `width` elements each, a gap between rows, and a start that is off by one
// element. The last row ends at the end of a page, before a protected one.
class ChannelRows {
 public:
  ChannelRows(DType dtype, std::int64_t rows, int width)
      : dtype_(dtype),
        rows_(rows),
        width_(width),
        step_(width + 1),
        bytes_(static_cast<std::size_t>(rows * step_) * size_of(dtype), std::byte{0x7b}) {}

  [[nodiscard]] std::byte* row(std::int64_t i) {
    return bytes_.data() + static_cast<std::size_t>(1 + i * step_) * size_of(dtype_);
  }
  [[nodiscard]] std::int64_t step_bytes() const {
    return step_ * static_cast<std::int64_t>(size_of(dtype_));
  }
  template <typename T>
  void store(const std::vector<T>& values) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (int d = 0; d < width_; ++d) {
        store_element(row(i), dtype_, d,
                      static_cast<float>(values[static_cast<std::size_t>(i * width_ + d)]));
      }
    }
  }
  [[nodiscard]] std::vector<float> load() {
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (int d = 0; d < width_; ++d) out.push_back(load_element(row(i), dtype_, d));
    }
    return out;
  }

 private:
  DType dtype_;
  std::int64_t rows_;
  int width_;
  std::int64_t step_;
  GuardedMemory bytes_;
};

// ThreadPool::kScratchBytes before a protected page.
class FencedScratch {
 public:
  FencedScratch() : memory_(static_cast<std::byte*>(std::aligned_alloc(64, kAll))) {
    std::memset(memory_.get(), 0xff,
                ThreadPool::kScratchBytes);  // NaN, so that no kernel can rely on zeros
    std::memset(memory_.get() + ThreadPool::kScratchBytes, 0x5a, kFence);
  }
  [[nodiscard]] std::span<std::byte> span() const {
    return {memory_.get(), ThreadPool::kScratchBytes};
  }
  [[nodiscard]] bool fence_stands() const {
    const std::byte* fence = memory_.get() + ThreadPool::kScratchBytes;
    return std::all_of(fence, fence + kFence, [](std::byte b) { return b == std::byte{0x5a}; });
  }

 private:
  static constexpr std::size_t kFence = std::size_t{2} << 20;
  static constexpr std::size_t kAll = ThreadPool::kScratchBytes + kFence;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
};

struct TaskRun {
  std::vector<Cut> query_cuts, key_cuts;  // empty: one run of all rows
  bool canonical_keys = false;
  bool canonical_queries = false;
  bool query_grad = true;
  bool key_grad = true;
  bool only_branch = true;
  bool packed = false;  // forward gets packed keys, if the set supports it
  DType out_dtype = DType::f32;
  std::size_t scratch_bytes = ThreadPool::kScratchBytes;
  // Forward continues from this state if it is given.
  const std::vector<float>* state_o = nullptr;
  const std::vector<float>* state_lse = nullptr;
};

inline FencedScratch& shared_scratch() {
  static FencedScratch scratch;
  return scratch;
}

inline cpu::Problem problem_of(const TaskData& data) {
  return {data.dtype, data.dim, static_cast<float>(data.scale),
          static_cast<float>(data.softmax.softcap), DropoutRate::of(data.softmax.dropout_p)};
}

inline std::vector<cpu::RowRun> runs_of(
    const std::vector<std::int32_t>& index, std::vector<Cut> cuts,
    std::initializer_list<std::pair<int, ChannelRows*>> channels) {
  if (cuts.empty()) cuts = {{0, 1, std::ssize(index)}};
  std::vector<cpu::RowRun> runs;
  for (const Cut& cut : cuts) {
    if (cut.count == 0) continue;
    cpu::RowRun run;
    run.index = index[static_cast<std::size_t>(cut.first)];
    run.index_stride =
        cut.count > 1 ? index[static_cast<std::size_t>(cut.first + cut.stride)] - run.index : 1;
    run.count = static_cast<std::int32_t>(cut.count);
    for (const auto& [channel, rows] : channels) {
      run.base[static_cast<std::size_t>(channel)] = rows->row(cut.first);
      run.step[static_cast<std::size_t>(channel)] = cut.stride * rows->step_bytes();
    }
    runs.push_back(run);
  }
  return runs;
}

// The rows that a filter keeps.
inline std::vector<cpu::RowRun> kept_runs(const std::vector<cpu::RowRun>& runs,
                                          const IndexFilter& filter) {
  std::vector<cpu::RowRun> out;
  for (const cpu::RowRun& run : runs) {
    RunTemplate rows;
    rows.index = run.index;
    rows.index_stride = run.index_stride;
    rows.count = run.count;
    filter.apply(rows, [&](std::int32_t first, std::int32_t count) {
      cpu::RowRun& part = out.emplace_back(run);
      part.index += first * run.index_stride;
      part.count = count;
      for (std::size_t c = 0; c < part.base.size(); ++c) part.base[c] += first * run.step[c];
    });
  }
  return out;
}

inline std::int64_t count_of(const std::vector<cpu::RowRun>& runs) {
  return std::accumulate(runs.begin(), runs.end(), std::int64_t{0},
                         [](std::int64_t sum, const cpu::RowRun& run) { return sum + run.count; });
}

// Keys packed in pieces, as by engines, in memory of exactly the required bytes.
class PackedMemory {
 public:
  PackedMemory(const cpu::Kernels& kernels, const cpu::Problem& problem,
               const std::vector<cpu::RowRun>& runs, const TaskRun& run) {
    if (!run.packed) return;
    for (const cpu::RowRun& r : runs) {
      const std::int64_t last = r.index + std::int64_t{r.count - 1} * r.index_stride;
      keys_.rows = run.canonical_keys ? std::max(keys_.rows, last + 1) : keys_.rows + r.count;
    }
    const auto bytes = static_cast<std::size_t>(kernels.packed_bytes(problem, keys_.rows));
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, bytes)));
    std::memset(memory_.get(), 0xff, bytes);  // NaN, so that no kernel can rely on zeros
    keys_.memory = memory_.get();
    for (std::int64_t begin = 0; begin < keys_.rows; begin += cpu::kPackRows) {
      const std::int64_t end = std::min(keys_.rows, begin + cpu::kPackRows);
      kernels.pack_keys(problem, {runs, run.canonical_keys, keys_, begin, end});
    }
  }
  [[nodiscard]] const cpu::PackedKeys& keys() const { return keys_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  cpu::PackedKeys keys_;
};

// Forward of all queries of the runs, in tasks of kQueryBlock.
inline void run_forward(const cpu::Kernels& kernels, const TaskData& data, const TaskRun& run,
                        TaskResult& result) {
  ChannelRows q(data.dtype, data.queries(), data.dim);
  ChannelRows k(data.dtype, data.keys(), data.dim);
  ChannelRows v(data.dtype, data.keys(), data.dim);
  ChannelRows lse(DType::f32, data.queries(), 1);
  ChannelRows state(DType::f32, data.queries(), data.dim);
  ChannelRows out(run.out_dtype, data.queries(), data.dim);
  q.store(data.q);
  k.store(data.k);
  v.store(data.v);
  if (run.state_o != nullptr) state.store(*run.state_o);
  if (run.state_lse != nullptr) lse.store(*run.state_lse);
  const auto queries =
      runs_of(data.q_index, run.query_cuts,
              {{cpu::kQuery, &q}, {cpu::kLse, &lse}, {cpu::kState, &state}, {cpu::kOut, &out}});
  const auto all_keys = runs_of(data.k_index, run.key_cuts, {{cpu::kKey, &k}, {cpu::kValue, &v}});
  const auto keys = kept_runs(all_keys, data.key_filter);
  const std::int64_t rows = count_of(queries);
  const PackedMemory packed(kernels, problem_of(data), all_keys, run);
  for (std::int64_t begin = 0; begin < rows; begin += cpu::kQueryBlock) {
    cpu::ForwardTask task;
    task.packed = packed.keys();
    task.key_filter = data.key_filter;
    task.key_gap = data.key_filter.gap;
    task.band = data.band;
    task.queries = queries;
    task.query_begin = begin;
    task.query_end = std::min<std::int64_t>(rows, begin + cpu::kQueryBlock);
    task.keys = keys;
    task.canonical = run.canonical_keys;
    task.repeats = data.repeats;
    task.dropout = data.dropout_rows();
    task.load_state = run.state_o != nullptr;
    task.out_dtype = run.out_dtype;
    kernels.forward(problem_of(data), task, shared_scratch().span().first(run.scratch_bytes));
  }
  result.o = out.load();
  result.lse = lse.load();
}

// Backward with the given statistics. Gradients start from `start`, which the caller subtracts
// again.
inline void run_backward(const cpu::Kernels& kernels, const TaskData& data, const TaskRun& run,
                         const std::vector<double>& lse_in, const std::vector<double>& delta_in,
                         TaskResult& result, float start = 0.0F) {
  ChannelRows q(data.dtype, data.queries(), data.dim);
  ChannelRows dout(data.dtype, data.queries(), data.dim);
  ChannelRows k(data.dtype, data.keys(), data.dim);
  ChannelRows v(data.dtype, data.keys(), data.dim);
  ChannelRows lse(DType::f32, data.queries(), 1);
  ChannelRows delta(DType::f32, data.queries(), 1);
  ChannelRows dq(DType::f32, data.queries(), data.dim);
  ChannelRows dk(DType::f32, data.keys(), data.dim);
  ChannelRows dv(DType::f32, data.keys(), data.dim);
  q.store(data.q);
  dout.store(data.dout);
  k.store(data.k);
  v.store(data.v);
  lse.store(lse_in);
  delta.store(delta_in);
  dq.store(std::vector<float>(data.q.size(), start));
  dk.store(std::vector<float>(data.k.size(), start));
  dv.store(std::vector<float>(data.k.size(), start));
  auto queries = runs_of(data.q_index, run.query_cuts,
                         {{cpu::kQuery, &q},
                          {cpu::kOutGrad, &dout},
                          {cpu::kLse, &lse},
                          {cpu::kDelta, &delta},
                          {cpu::kQueryGrad, &dq}});
  auto keys =
      runs_of(data.k_index, run.key_cuts,
              {{cpu::kKey, &k}, {cpu::kValue, &v}, {cpu::kKeyGrad, &dk}, {cpu::kValueGrad, &dv}});
  // A gradient that is not computed may have no memory.
  for (cpu::RowRun& r : queries) {
    if (!run.query_grad) r.base[cpu::kQueryGrad] = nullptr;
  }
  for (cpu::RowRun& r : keys) {
    if (!run.key_grad) r.base[cpu::kKeyGrad] = r.base[cpu::kValueGrad] = nullptr;
  }
  cpu::BackwardTask task;
  task.band = data.band;
  task.queries = queries;
  task.query_end = count_of(queries);
  task.keys = keys;
  task.key_end = count_of(keys);
  task.canonical_keys = run.canonical_keys;
  task.canonical_queries = run.canonical_queries;
  task.repeats = data.repeats;
  task.only_branch = run.only_branch;
  task.dropout = data.dropout_rows();
  task.query_grad = run.query_grad;
  task.key_grad = run.key_grad;
  kernels.backward(problem_of(data), task, shared_scratch().span().first(run.scratch_bytes));
  result.dq = dq.load();
  result.dk = dk.load();
  result.dv = dv.load();
}

// Forward and backward; backward gets the oracle's statistics, rounded to fp32.
inline TaskResult run_task(const cpu::Kernels& kernels, const TaskData& data,
                           const TaskRun& run = {}) {
  TaskResult result;
  run_forward(kernels, data, run, result);
  std::vector<double> delta;
  const TaskOracle expected = oracle(data, &delta);
  run_backward(kernels, data, run, expected.lse, delta, result);
  return result;
}

// Tests of every kernel set that this machine can run.
class EveryKernelSet : public ::testing::TestWithParam<const cpu::Kernels*> {
 protected:
  void TearDown() override {
    EXPECT_TRUE(shared_scratch().fence_stands()) << "wrote past the scratch";
  }
  [[nodiscard]] const cpu::Kernels& kernels() const { return *GetParam(); }
};
inline std::string name_of_set(const ::testing::TestParamInfo<const cpu::Kernels*>& set) {
  return set.param->name;
}

}  // namespace annulus::test
