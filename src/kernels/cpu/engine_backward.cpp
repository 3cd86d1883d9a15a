#include <algorithm>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "kernels/cpu/engine.h"
#include "kernels/cpu/row_runs.h"

namespace annulus::cpu {

// fp32 gradients are summed in the caller's tensors, 16-bit ones in the workspace.
GradientSums CpuEngine::sums(const BackwardCall& call) const {
  if (is_fp32()) return {call.dq, call.dk, call.dv};
  const Computation& c = computation_;
  const auto [dq_bytes, dk_bytes, dv_bytes] = sum_bytes();
  const float* dq = accumulators_.floats();
  const float* dk = dq + dq_bytes / 4;
  const float* dv = dk + dk_bytes / 4;
  return {rows_of(dq, c.query_tokens, c.heads(), c.head_dim),
          rows_of(dk, c.key_tokens, c.kv_heads, c.head_dim),
          rows_of(dv, c.key_tokens, c.kv_heads, c.head_dim)};
}

// Writes lse and delta = rowsum(dO * O) of a row, adjacent because they travel together. Detached
// mixing has one delta per branch, from that branch's own output. Gradients are multiplied by
// output_scale at the end, so delta uses the unscaled O. Returns the row's term of the gradient of
// its head's sink, divided by -output_scale.
double CpuEngine::fill_statistics(const BackwardCall& call, std::int64_t b, std::int64_t t,
                                  int h) const {
  const int heads = computation_.heads();
  const int head_dim = computation_.head_dim;
  const DType dtype = computation_.dtype;
  const auto row_bytes = static_cast<std::int64_t>(size_of(dtype)) * head_dim;
  // With a scale of 0 every gradient becomes 0 at the end.
  const double factor = computation_.pattern->output_scale;
  const auto unscale = static_cast<float>(factor == 0 ? 0.0 : 1.0 / factor);
  const float sink = sink_of(call.sinks, h);
  const std::int64_t at = (b * computation_.query_tokens + t) * heads + h;
  float* out = statistics_.floats() + at * computation_.statistics_width();
  const std::byte* g = call.dout.at(b, h) + t * call.dout.row_step;
  out[0] = *reinterpret_cast<const float*>(call.lse.at(b, h) + t * call.lse.row_step);
  if (call.branches.o == nullptr) {
    out[1] = unscale * kernels_.dot_rows(dtype, g, call.o.at(b, h) + t * call.o.row_step, head_dim);
    if (sink == -INFINITY) return 0;
    // A row without keys has O = 0, so its term is 0 even if dO is not finite.
    if (out[0] == sink && !std::isfinite(out[1])) return 0;
    return static_cast<double>(std::exp(sink - out[0])) * out[1];
  }
  for (int branch = 0; branch < computation_.deltas(); ++branch) {
    const std::int64_t row = computation_.kept->row(branch, b, h, t);
    out[1 + branch] = 0;
    if (row < 0 || call.branches.lse[row] == -INFINITY) continue;  // its O was never written
    const std::byte* o = call.branches.o + row * row_bytes;
    float sum = 0;
    for (int d = 0; d < head_dim; ++d)
      sum = std::fma(load_element(g, dtype, d), load_element(o, dtype, d), sum);
    out[1 + branch] = sum;
  }
  return sink == -INFINITY ? 0 : take_sink(call, b, t, h, sink, out);
}

// Detached mixing holds the branches' weights w = exp(L_b - L) constant, but not p = exp(sink -
// L'), which depends on every score. With m = sum(w delta) = dO.O of the merge without the sink,
// every delta becomes smaller by p m. Returns the same as fill_statistics: p (1 - p) m.
double CpuEngine::take_sink(const BackwardCall& call, std::int64_t batch, std::int64_t token,
                            int head, float sink, float* statistics) const {
  const auto lse_of = [&](int branch) {
    const std::int64_t row = computation_.kept->row(branch, batch, head, token);
    return row < 0 ? -INFINITY : call.branches.lse[row];
  };
  const int deltas = computation_.deltas();
  float highest = -INFINITY;
  for (int branch = 0; branch < deltas; ++branch) highest = std::max(highest, lse_of(branch));
  if (highest == -INFINITY) return 0;
  if (std::isnan(statistics[0])) return NAN;
  double keys = 0;
  double sum = 0;
  for (int branch = 0; branch < deltas; ++branch) {
    if (lse_of(branch) == -INFINITY) continue;
    const double weight = std::exp(static_cast<double>(lse_of(branch)) - highest);
    keys += weight;
    sum += weight * statistics[1 + branch];
  }
  const double mean = sum / keys;
  const double above = static_cast<double>(sink) - highest - std::log(keys);  // sink - L
  const double weight = 1 / (1 + std::exp(-above));
  for (int branch = 0; branch < deltas; ++branch)
    statistics[1 + branch] = static_cast<float>(statistics[1 + branch] - weight * mean);
  return weight / (1 + std::exp(above)) * mean;
}

// Sums over blocks of rows that do not depend on the number of threads.
void CpuEngine::fill_statistics_and_dsinks(const BackwardCall& call) {
  const int heads = computation_.heads();
  if (call.dsinks.base == nullptr) {
    for_each_token(computation_.query_tokens, [&](std::int64_t b, std::int64_t t) {
      for (int h = 0; h < heads; ++h) (void)fill_statistics(call, b, t, h);
    });
    return;
  }
  const std::int64_t tokens = computation_.batch * computation_.query_tokens;
  const std::int64_t blocks = std::min(kMostSinkBlocks, (tokens + 63) / 64);
  pool_->run_parallel(blocks, [&](std::int64_t block, int) {
    double* const sums = dsinks_.data() + block * heads;
    std::fill_n(sums, heads, 0.0);
    for (std::int64_t i = tokens * block / blocks; i < tokens * (block + 1) / blocks; ++i) {
      for (int h = 0; h < heads; ++h) {
        sums[h] +=
            fill_statistics(call, i / computation_.query_tokens, i % computation_.query_tokens, h);
      }
    }
  });
  for (int h = 0; h < heads; ++h) {
    double sum = 0;
    for (std::int64_t block = 0; block < blocks; ++block)
      sum += dsinks_[static_cast<std::size_t>(block * heads + h)];
    const auto gradient = static_cast<float>(-computation_.pattern->output_scale * sum);
    float* const out = call.dsinks.at(h);
    *out = call.adds_dsinks ? *out + gradient : gradient;
  }
}

void CpuEngine::begin_backward(const BackwardCall& call, Queue&) {
  fill_statistics_and_dsinks(call);
  const GradientSums sum = sums(call);
  const auto row_bytes = static_cast<std::size_t>(computation_.head_dim) * sizeof(float);
  const auto clear = [&](const TensorRows& rows, int heads, std::int64_t b, std::int64_t t) {
    for (int h = 0; h < heads; ++h) std::memset(rows.at(b, h) + t * rows.row_step, 0, row_bytes);
  };
  for_each_token(computation_.query_tokens, [&](std::int64_t b, std::int64_t t) {
    clear(sum.dq, computation_.heads(), b, t);
  });
  for_each_token(computation_.key_tokens, [&](std::int64_t b, std::int64_t t) {
    clear(sum.dk, computation_.kv_heads, b, t);
    clear(sum.dv, computation_.kv_heads, b, t);
  });
}

void CpuEngine::backward(int stage, const BackwardCall& call, Queue&) {
  const Work& work = backward_[static_cast<std::size_t>(stage)];
  const Stage::Kind kind = work.kind();
  const int ratio = computation_.heads() / computation_.kv_heads;
  const bool by_branch = computation_.deltas() > 1;
  const GradientSums sum = sums(call);
  const TensorRows stats = statistics();
  const ParcelRows* queries_from =
      received_.queries.layout != nullptr ? &received_.queries : nullptr;
  const ParcelRows* keys_from = received_.keys.layout != nullptr ? &received_.keys : nullptr;
  const ParcelRows* back = received_.gradients.layout != nullptr ? &received_.gradients : nullptr;
  Turns& turns = *turns_;
  const std::vector<Branch>& branches = computation_.pattern->branches;
  const auto branches_of = [&](int head) {
    return std::count_if(branches.begin(), branches.end(), [&](const Branch& branch) {
      return branch.offset[static_cast<std::size_t>(head)] >= 0;
    });
  };

  for (const Phase& phase : work.phases()) {
    turns.begin(phase);
    pool_->run_parallel(
        static_cast<std::int64_t>(phase.items.size()), [&](std::int64_t index, int slot) {
          const WorkItem& item = phase.items[static_cast<std::size_t>(index)];
          const WorkGroup& group = work.group(item);
          const int head = work.member(item).q_head;
          const std::int64_t delta_offset = 4 * (1 + (by_branch ? group.branch : 0));
          const ChannelSource queries[] = {{kQuery, call.q, queries_from, 0},
                                           {kOutGrad, call.dout, queries_from, 1},
                                           {kLse, stats, queries_from, 2},
                                           {kDelta, stats, queries_from, 2, delta_offset},
                                           {kQueryGrad, sum.dq, back, 0}};
          const ChannelSource keys[] = {{kKey, call.k, keys_from, 0},
                                        {kValue, call.v, keys_from, 1},
                                        {kKeyGrad, sum.dk, back, 0},
                                        {kValueGrad, sum.dv, back, 1}};
          // In canonical passes, received rows have no gradient channel.
          const std::size_t query_channels = kind == Stage::Kind::key_gradient ? 4 : 5;
          const std::size_t key_channels = kind == Stage::Kind::query_gradient ? 2 : 4;
          Runs& runs = runs_[static_cast<std::size_t>(slot)];
          work.expand(item, true, std::span(queries, query_channels), head, runs.queries);
          work.expand(item, false, std::span(keys, key_channels), head / ratio, runs.keys);
          BackwardTask task;
          task.query_begin = item.query_begin;
          task.query_end = item.query_end;
          task.key_begin = item.key_begin;
          task.key_end = item.key_end;
          if (!group.band.full() && kind == Stage::Kind::query_gradient) {
            const Stretch span = index_span(runs.queries, item.query_begin, item.query_end);
            keep_rows(runs.keys, group.band.keys_of(span));
            task.key_end = row_count(runs.keys);
          }
          if (!group.band.full() && kind == Stage::Kind::key_gradient) {
            const Stretch span = index_span(runs.keys, item.key_begin, item.key_end);
            keep_rows(runs.queries, group.band.queries_of(span));
            task.query_end = row_count(runs.queries);
          }
          task.queries = runs.queries;
          task.keys = runs.keys;
          task.canonical_keys = kind == Stage::Kind::query_gradient;
          task.canonical_queries = kind == Stage::Kind::key_gradient;
          task.band = group.band;
          task.key_gap = group.keys.gap;
          task.query_gap = group.queries.gap;
          task.repeats = group.repeats;
          task.only_branch = branches_of(head) == 1 && sink_of(call.sinks, head) == -INFINITY;
          task.query_grad = kind != Stage::Kind::key_gradient;
          task.key_grad = kind != Stage::Kind::query_gradient;
          task.dropout = dropout_rows(call.dropout, item, head, group);
          const Turns::Turn turn(turns, item);
          if (!call.stop->load(std::memory_order_relaxed))
            kernels_.backward(problem_, task, pool_->scratch(slot));
        });
    if (call.stop->load(std::memory_order_relaxed)) return;
  }
}

void CpuEngine::finish_backward(const BackwardCall& call, Queue&) {
  const auto factor = static_cast<float>(computation_.pattern->output_scale);
  if (is_fp32() && factor == 1.0F) return;
  const GradientSums sum = sums(call);
  const auto store = [&](const TensorRows& from, const TensorRows& to, int heads, std::int64_t b,
                         std::int64_t t) {
    for (int h = 0; h < heads; ++h) {
      kernels_.store_row(computation_.dtype,
                         reinterpret_cast<const float*>(from.at(b, h) + t * from.row_step), factor,
                         to.at(b, h) + t * to.row_step, computation_.head_dim);
    }
  };
  for_each_token(computation_.query_tokens, [&](std::int64_t b, std::int64_t t) {
    store(sum.dq, call.dq, computation_.heads(), b, t);
  });
  for_each_token(computation_.key_tokens, [&](std::int64_t b, std::int64_t t) {
    store(sum.dk, call.dk, computation_.kv_heads, b, t);
    store(sum.dv, call.dv, computation_.kv_heads, b, t);
  });
}

}  // namespace annulus::cpu
