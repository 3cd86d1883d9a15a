#include <algorithm>
#include <cmath>
#include <cstring>

#include "ring/executor.h"

namespace annulus {
using ring::ChannelSource;
using ring::Work;
using ring::WorkItem;

void RingAttention::Impl::forward(const ConstTensorView& q, const ConstTensorView& k,
                                  const ConstTensorView& v, const TensorView& o,
                                  const TensorView& lse, BranchState::Data* state) {
  const bool per_branch = state != nullptr;
  const int heads = options.pattern.heads;
  const int ratio = heads / options.kv_heads;
  const cpu::Problem prob = problem();

  // Running state of a row: where O so far and its log-sum-exp are. fp32 accumulates in the
  // caller's o.
  const ring::LocalRows out_rows = rows_of(o);
  const ring::LocalRows lse_rows = rows_of(lse);
  const bool direct = direct_output && !per_branch;
  const ring::LocalRows state_rows =
      wide() || direct ? out_rows : rows_of(wide_queries.floats(), heads, options.head_dim);
  const DType state_dtype = direct ? options.dtype : DType::f32;
  const auto rows_of_branch = [&](const ring::Buffer& buffer, int branch, std::int64_t width) {
    return rows_of(buffer.floats() + branch * query_rows() * width, heads, width);
  };

  if (per_branch) {
    state->filled = false;
    std::fill_n(state->lse.floats(), state->lse.bytes() / 4, -INFINITY);
  } else {
    for_each_token([&](std::int64_t b, std::int64_t t) {
      for (int h = 0; h < heads; ++h)
        *reinterpret_cast<float*>(lse_rows.at(b, h) + t * lse_rows.row_step) = -INFINITY;
    });
  }

  const auto compute = [&](const Work& work, bool first_step) {
    bool first_phase = first_step;
    for (const Work::Phase& phase : work.phases()) {
      pool->run_parallel(static_cast<std::int64_t>(phase.items.size()), [&](std::int64_t index,
                                                                            int slot) {
        if (interrupted.load(std::memory_order_relaxed)) return;
        const WorkItem& item = phase.items[static_cast<std::size_t>(index)];
        const int head = work.member(item).q_head;
        const int branch = work.group(item).branch;
        const ring::LocalRows so =
            per_branch ? rows_of_branch(state->o, branch, options.head_dim) : state_rows;
        const ring::LocalRows sl = per_branch ? rows_of_branch(state->lse, branch, 1) : lse_rows;
        const ChannelSource queries[] = {{cpu::kQuery, rows_of(q), nullptr, nullptr, nullptr, 0, 0},
                                         {cpu::kLse, sl, nullptr, nullptr, nullptr, 0, 0},
                                         {cpu::kState, so, nullptr, nullptr, nullptr, 0, 0},
                                         {cpu::kOut, so, nullptr, nullptr, nullptr, 0, 0}};
        const ring::ParcelShape* shape = &key_courier->shape();
        const ChannelSource keys[] = {
            {cpu::kKey, rows_of(k), key_courier.get(), nullptr, shape, 0, 0},
            {cpu::kValue, rows_of(v), key_courier.get(), nullptr, shape, 1, 0}};
        Runs& r = runs_of(slot);
        work.expand(item, true, queries, head, r.queries);
        work.expand(item, false, keys, head / ratio, r.keys);
        if (prob.causal)
          ring::drop_keys_after(r.keys,
                                ring::index_span(r.queries, item.query_begin, item.query_end).last);
        cpu::ForwardTask task;
        task.queries = r.queries;
        task.query_begin = item.query_begin;
        task.query_end = item.query_end;
        task.keys = r.keys;
        task.canonical = options.reproducible;
        task.key_gap = work.group(item).keys.gap;
        task.repeats = work.group(item).repeats;
        task.load_state = per_branch ? !first_step : !first_phase;
        task.out_dtype = per_branch ? DType::f32 : state_dtype;
        kernels->forward(prob, task, pool->scratch(slot));
      });
      check_interrupt();
      first_phase = false;
    }
  };

  const ring::LocalRows sections[] = {rows_of(k), rows_of(v)};
  run_steps(*key_courier, sections, key_plan->steps(),
            [&](int step) { compute(forward_work[static_cast<std::size_t>(step)], step == 0); });

  finish_output(out_rows, lse_rows, state_rows, direct, state);
  if (per_branch) state->filled = true;
}

// What the caller gets: merged, scaled, in its dtype; zeros where a row attended to nothing.
void RingAttention::Impl::finish_output(const ring::LocalRows& out_rows,
                                        const ring::LocalRows& lse_rows,
                                        const ring::LocalRows& state_rows, bool direct,
                                        const BranchState::Data* state) {
  const int heads = options.pattern.heads;
  const auto factor = static_cast<float>(options.pattern.output_scale);
  const bool convert = !direct && !wide();
  if (state == nullptr && every_row_attends && !convert && factor == 1.0F) return;
  const auto row_bytes = static_cast<std::int64_t>(size_of(options.dtype)) * options.head_dim;
  for_each_token([&](std::int64_t b, std::int64_t t) {
    alignas(64) float row[cpu::kMaxHeadDim];
    std::byte* empty = nullptr;      // zeros are due from here ...
    std::byte* empty_end = nullptr;  // ... to here: rows of neighbouring heads are cleared together
    for (int h = 0; h < heads; ++h) {
      auto* l = reinterpret_cast<float*>(lse_rows.at(b, h) + t * lse_rows.row_step);
      std::byte* out = out_rows.at(b, h) + t * out_rows.row_step;
      if (state != nullptr) {
        merge_branches(*state, b, t, h, row, l);
        kernels->store_row(options.dtype, row, factor, out, options.head_dim);
      } else if (*l == -INFINITY) {
        if (out != empty_end) {
          if (empty != nullptr) std::memset(empty, 0, static_cast<std::size_t>(empty_end - empty));
          empty = out;
        }
        empty_end = out + row_bytes;
      } else if (convert) {
        const auto* wide_row =
            reinterpret_cast<const float*>(state_rows.at(b, h) + t * state_rows.row_step);
        kernels->store_row(options.dtype, wide_row, factor, out, options.head_dim);
      } else if (factor != 1.0F) {  // fp32, in place
        kernels->store_row(options.dtype, reinterpret_cast<const float*>(out), factor, out,
                           options.head_dim);
      }
    }
    if (empty != nullptr) std::memset(empty, 0, static_cast<std::size_t>(empty_end - empty));
  });
}

// One softmax over all branches: weights exp(L_b - L).
void RingAttention::Impl::merge_branches(const BranchState::Data& state, std::int64_t batch,
                                         std::int64_t token, int head, float* row,
                                         float* lse) const {
  const auto branches = static_cast<int>(options.pattern.branches.size());
  const std::int64_t at = (batch * local_tokens() + token) * options.pattern.heads + head;
  float highest = -INFINITY;
  bool poisoned = false;
  for (int b = 0; b < branches; ++b) {
    const float l = state.lse.floats()[b * query_rows() + at];
    poisoned = poisoned || std::isnan(l);
    highest = std::max(highest, l);
  }
  std::fill_n(row, options.head_dim, 0.0F);
  *lse = highest;
  if (highest == -INFINITY && !poisoned) return;
  double sum = 0;
  for (int b = 0; b < branches; ++b)
    sum += std::exp(static_cast<double>(state.lse.floats()[b * query_rows() + at]) - highest);
  *lse = static_cast<float>(highest + std::log(sum));
  for (int b = 0; b < branches; ++b) {
    const float l = state.lse.floats()[b * query_rows() + at];
    if (l == -INFINITY) continue;  // its O was never written
    const auto weight = static_cast<float>(std::exp(static_cast<double>(l) - highest) / sum);
    const float* o = state.o.floats() + (b * query_rows() + at) * options.head_dim;
    for (int d = 0; d < options.head_dim; ++d) row[d] = std::fma(weight, o[d], row[d]);
  }
}

// The life of one pass: step s+1 travels while step s computes. `compute` is called for every entry
// of the work list.
void RingAttention::Impl::run_steps(ring::Courier& courier,
                                    std::span<const ring::LocalRows> sections, int steps,
                                    FunctionRef<void(int step)> compute) {
  if (steps > 0) {
    courier.pack(sections, *pool);
    courier.begin(*transport, 1);
    if (options.blocking || options.reproducible) courier.finish();
  }
  if (options.reproducible) {  // everything is here: one pass in canonical order
    compute(0);
    return;
  }
  compute(0);
  for (int step = 1; step <= steps; ++step) {
    courier.finish();
    if (step < steps) {
      courier.begin(*transport, step + 1);
      if (options.blocking) courier.finish();
    }
    compute(step);
  }
}

}  // namespace annulus
