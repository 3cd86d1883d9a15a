#include <algorithm>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "ring/executor.h"

namespace annulus {

using ring::ChannelSource;
using ring::LocalRows;
using ring::Work;
using ring::WorkItem;
using ring::WorkKind;

// lse and delta = rowsum(dO * O) of every row, side by side, so that they travel together. Detached
// mixing has one delta per branch, from that branch's own output. Gradients are scaled by
// output_scale at the very end, so delta is taken with the unscaled O.
void RingAttention::Impl::fill_statistics(const ConstTensorView& o, const ConstTensorView& lse,
                                          const ConstTensorView& dout,
                                          const BranchState::Data* state) {
  const int heads = options.pattern.heads;
  const int width = 1 + deltas();
  const LocalRows o_rows = rows_of(o);
  const LocalRows lse_rows = rows_of(lse);
  const LocalRows dout_rows = rows_of(dout);
  // A scale of 0 makes every gradient 0 at the end.
  const double factor = options.pattern.output_scale;
  const auto unscale = static_cast<float>(factor == 0 ? 0.0 : 1.0 / factor);
  for_each_token([&](std::int64_t b, std::int64_t t) {
    for (int h = 0; h < heads; ++h) {
      const std::int64_t at = (b * local_tokens() + t) * heads + h;
      float* out = statistics.floats() + at * width;
      const std::byte* g = dout_rows.at(b, h) + t * dout_rows.row_step;
      out[0] = *reinterpret_cast<const float*>(lse_rows.at(b, h) + t * lse_rows.row_step);
      if (state == nullptr) {
        out[1] =
            unscale * kernels->dot_rows(options.dtype, g, o_rows.at(b, h) + t * o_rows.row_step,
                                        options.head_dim);
        continue;
      }
      for (int branch = 0; branch < deltas(); ++branch) {
        const std::int64_t row = branch * query_rows() + at;
        out[1 + branch] = 0;
        if (state->lse.floats()[row] == -INFINITY) continue;  // its O was never written
        const float* branch_o = state->o.floats() + row * options.head_dim;
        float sum = 0;
        for (int d = 0; d < options.head_dim; ++d)
          sum = std::fma(load_element(g, options.dtype, d), branch_o[d], sum);
        out[1 + branch] = sum;
      }
    }
  });
}

void RingAttention::Impl::backward(const ConstTensorView& q, const ConstTensorView& k,
                                   const ConstTensorView& v, const ConstTensorView& o,
                                   const ConstTensorView& lse, const ConstTensorView& dout,
                                   const TensorView& dq, const TensorView& dk, const TensorView& dv,
                                   const BranchState::Data* state) {
  const int heads = options.pattern.heads;
  const int ratio = heads / options.kv_heads;
  const cpu::Problem prob = problem();
  fill_statistics(o, lse, dout, state);

  // fp32 gradients are summed where the caller wants them, 16-bit ones in the workspace.
  const LocalRows dq_rows =
      wide() ? rows_of(dq) : rows_of(wide_queries.floats(), heads, options.head_dim);
  const LocalRows dk_rows =
      wide() ? rows_of(dk) : rows_of(wide_keys.floats(), options.kv_heads, options.head_dim);
  const LocalRows dv_rows =
      wide() ? rows_of(dv) : rows_of(wide_values.floats(), options.kv_heads, options.head_dim);
  const auto row_bytes = static_cast<std::size_t>(options.head_dim) * sizeof(float);
  for_each_token([&](std::int64_t b, std::int64_t t) {
    for (int h = 0; h < heads; ++h)
      std::memset(dq_rows.at(b, h) + t * dq_rows.row_step, 0, row_bytes);
    for (int h = 0; h < options.kv_heads; ++h) {
      std::memset(dk_rows.at(b, h) + t * dk_rows.row_step, 0, row_bytes);
      std::memset(dv_rows.at(b, h) + t * dv_rows.row_step, 0, row_bytes);
    }
  });

  const LocalRows statistics_rows = rows_of(statistics.floats(), heads, 1 + deltas());
  const ring::Courier* queries_by = query_courier.get();
  const ring::Courier* keys_by = key_courier.get();
  const ring::ParcelShape* query_shape = queries_by != nullptr ? &queries_by->shape() : nullptr;
  const ring::ParcelShape* key_shape = &keys_by->shape();
  const ring::ReturnCourier* back = returns.get();
  const ring::ParcelShape* back_shape = back != nullptr ? &back->shape() : nullptr;

  const auto compute = [&](const Work& work, WorkKind kind) {
    for (const Work::Phase& phase : work.phases()) {
      work.begin_phase();
      pool->run_parallel(static_cast<std::int64_t>(phase.items.size()), [&](std::int64_t index,
                                                                            int slot) {
        const WorkItem& item = phase.items[static_cast<std::size_t>(index)];
        const int head = work.member(item).q_head;
        const std::int64_t delta_offset = 4 * (1 + (deltas() > 1 ? work.group(item).branch : 0));
        const ChannelSource queries[] = {
            {cpu::kQuery, rows_of(q), queries_by, nullptr, query_shape, 0, 0},
            {cpu::kOutGrad, rows_of(dout), queries_by, nullptr, query_shape, 1, 0},
            {cpu::kLse, statistics_rows, queries_by, nullptr, query_shape, 2, 0},
            {cpu::kDelta, statistics_rows, queries_by, nullptr, query_shape, 2, delta_offset},
            {cpu::kQueryGrad, dq_rows, nullptr, back, back_shape, 0, 0}};
        const ChannelSource keys[] = {{cpu::kKey, rows_of(k), keys_by, nullptr, key_shape, 0, 0},
                                      {cpu::kValue, rows_of(v), keys_by, nullptr, key_shape, 1, 0},
                                      {cpu::kKeyGrad, dk_rows, nullptr, back, back_shape, 0, 0},
                                      {cpu::kValueGrad, dv_rows, nullptr, back, back_shape, 1, 0}};
        // In canonical passes received rows have no gradient here.
        const std::size_t query_channels = kind == WorkKind::key_gradient ? 4 : 5;
        const std::size_t key_channels = kind == WorkKind::query_gradient ? 2 : 4;
        Runs& r = runs_of(slot);
        work.expand(item, true, std::span(queries, query_channels), head, r.queries);
        work.expand(item, false, std::span(keys, key_channels), head / ratio, r.keys);
        cpu::BackwardTask task;
        task.query_begin = item.query_begin;
        task.query_end = item.query_end;
        task.key_begin = item.key_begin;
        task.key_end = item.key_end;
        if (prob.causal && kind == WorkKind::query_gradient) {
          ring::drop_keys_after(r.keys,
                                ring::index_span(r.queries, item.query_begin, item.query_end).last);
          task.key_end = ring::row_count(r.keys);
        }
        if (prob.causal && kind == WorkKind::key_gradient) {
          ring::drop_queries_before(r.queries,
                                    ring::index_span(r.keys, item.key_begin, item.key_end).first);
          task.query_end = ring::row_count(r.queries);
        }
        task.queries = r.queries;
        task.keys = r.keys;
        task.canonical_keys = kind == WorkKind::query_gradient;
        task.canonical_queries = kind == WorkKind::key_gradient;
        task.key_gap = work.group(item).keys.gap;
        task.query_gap = work.group(item).queries.gap;
        task.repeats = work.group(item).repeats;
        task.query_grad = kind != WorkKind::key_gradient;
        task.key_grad = kind != WorkKind::query_gradient;
        work.wait_turn(item);
        if (!interrupted.load(std::memory_order_relaxed))
          kernels->backward(prob, task, pool->scratch(slot));
        work.pass_turn(item);
      });
      check_interrupt();
    }
  };

  const LocalRows key_sections[] = {rows_of(k), rows_of(v)};
  const LocalRows query_sections[] = {rows_of(q), rows_of(dout), statistics_rows};
  if (options.reproducible) {
    run_steps(*key_courier, key_sections, key_plan->steps(),
              [&](int) { compute(backward_work[0], WorkKind::query_gradient); });
    run_steps(*query_courier, query_sections, query_plan->steps(),
              [&](int) { compute(backward_work[1], WorkKind::key_gradient); });
  } else {
    const bool by_keys = travel == Travel::keys;
    const LocalRows key_gradients[] = {dk_rows, dv_rows};
    const LocalRows query_gradients[] = {dq_rows};
    const std::span<const LocalRows> gradients = by_keys
                                                     ? std::span<const LocalRows>(key_gradients)
                                                     : std::span<const LocalRows>(query_gradients);
    const auto step = [&](int s) {
      if (s > 0) returns->clear(s, *pool);
      compute(backward_work[static_cast<std::size_t>(s)], WorkKind::gradients);
      if (s == 0) return;
      returns->finish(*transport, gradients,
                      *pool);  // of step s-1: they had this step's compute to arrive
      returns->begin(*transport, s);
      if (options.blocking) returns->finish(*transport, gradients, *pool);
    };
    if (by_keys) {
      run_steps(*key_courier, key_sections, key_plan->steps(), step);
    } else {
      run_steps(*query_courier, query_sections, query_plan->steps(), step);
    }
    returns->finish(*transport, gradients, *pool);
    returns->wait_sends();
  }

  const auto factor = static_cast<float>(options.pattern.output_scale);
  if (wide() && factor == 1.0F) return;
  const auto finish = [&](const LocalRows& from, const TensorView& to, int count, std::int64_t b,
                          std::int64_t t) {
    const LocalRows out = rows_of(to);
    for (int h = 0; h < count; ++h) {
      kernels->store_row(options.dtype,
                         reinterpret_cast<const float*>(from.at(b, h) + t * from.row_step), factor,
                         out.at(b, h) + t * out.row_step, options.head_dim);
    }
  };
  for_each_token([&](std::int64_t b, std::int64_t t) {
    finish(dq_rows, dq, heads, b, t);
    finish(dk_rows, dk, options.kv_heads, b, t);
    finish(dv_rows, dv, options.kv_heads, b, t);
  });
}

}  // namespace annulus
