#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/engine.h"
#include "kernels/cpu/row_runs.h"
#include "kernels/cpu/sink.h"

namespace annulus::cpu {

TensorRows CpuEngine::state_rows(const ForwardCall& call) const {
  if (is_fp32() || direct(call)) return call.o;
  return rows_of(accumulators_.floats(), computation_.query_tokens, computation_.heads(),
                 computation_.head_dim);
}

void CpuEngine::begin_forward(const ForwardCall& call, Queue&) {
  if (call.branches.lse != nullptr) {
    std::fill_n(call.branches.lse, computation_.kept->rows(), -INFINITY);
    return;
  }
  if (direct(call) && every_row_attends_) return;  // every row is written once and never read
  for_each_token(computation_.query_tokens, [&](std::int64_t b, std::int64_t t) {
    for (int h = 0; h < computation_.heads(); ++h)
      *reinterpret_cast<float*>(call.lse.at(b, h) + t * call.lse.row_step) = -INFINITY;
  });
}

void CpuEngine::forward(int stage, const ForwardCall& call, Queue&) {
  const Work& work = forward_[static_cast<std::size_t>(stage)];
  const bool per_branch = call.branches.o != nullptr;
  const int heads = computation_.heads();
  const int ratio = heads / computation_.kv_heads;
  // The running state of rows: O and log-sum-exp so far. fp32 accumulates in the caller's o.
  const TensorRows state = state_rows(call);
  const DType state_dtype = direct(call) ? computation_.dtype : DType::f32;
  float* branch_o = branch_outputs(call.branches);
  const auto kept_rows = [&](float* base, int branch, int head, std::int64_t width) {
    const KeptRows& kept = *computation_.kept;
    float* first = base + kept.first(branch, head) * width;
    return TensorRows{reinterpret_cast<std::byte*>(first), kept.batch_rows() * width * 4, 0,
                      width * 4};
  };

  const ChannelSource keys[] = {{kKey, call.k, &received_.keys, 0},
                                {kValue, call.v, &received_.keys, 1}};
  const auto packed_keys = [&](const KeyList& list) {
    return PackedKeys{packed_.data() + list.offset, list.rows};
  };

  // `direct` means that there is only one phase. It need not be in stage 0: with fewer queries than
  // keys, all of a rank's own keys may be hidden.
  bool first_phase = stage == 0 || direct(call);
  for (const Phase& phase : work.phases()) {
    const auto stopped = [&] { return call.stop->load(std::memory_order_relaxed); };
    const auto attend = [&](const WorkItem& item, const KeyList* list, int slot) {
      if (stopped()) return;
      const int head = work.member(item).q_head;
      const WorkGroup& group = work.group(item);
      const int branch = group.branch;
      const TensorRows o =
          per_branch ? kept_rows(branch_o, branch, head, computation_.head_dim) : state;
      const TensorRows lse = per_branch ? kept_rows(call.branches.lse, branch, head, 1) : call.lse;
      const ChannelSource queries[] = {{kQuery, call.q},
                                       {kLse, lse, nullptr, 0, 0, per_branch},
                                       {kState, o, nullptr, 0, 0, per_branch},
                                       {kOut, o, nullptr, 0, 0, per_branch}};
      Runs& runs = runs_[static_cast<std::size_t>(slot)];
      work.expand(item, true, queries, head, runs.queries);
      work.expand(item, false, keys, head / ratio, runs.keys);
      if (!group.band.full()) {
        const Stretch span = index_span(runs.queries, item.query_begin, item.query_end);
        keep_rows(runs.keys, group.band.keys_of(span));
      }
      ForwardTask task;
      task.queries = runs.queries;
      task.query_begin = item.query_begin;
      task.query_end = item.query_end;
      task.keys = runs.keys;
      task.canonical = computation_.reproducible;
      task.band = group.band;
      task.key_gap = group.keys.gap;
      task.key_filter = group.keys;
      if (list != nullptr) task.packed = packed_keys(*list);
      task.repeats = group.repeats;
      task.load_state = per_branch ? stage != 0 : !first_phase;
      if (kernels_take_sinks(call)) task.sink = sink_of(call.sinks, head);
      task.dropout = dropout_rows(call.dropout, item, head, group);
      task.out_dtype = per_branch ? DType::f32 : state_dtype;
      kernels_.forward(problem_, task, pool_->scratch(slot));
    };
    const auto pack = [&](const KeyList& list, std::int64_t begin, int slot) {
      if (stopped()) return;
      Runs& runs = runs_[static_cast<std::size_t>(slot)];
      work.expand(list, keys, work.q_head(list) / ratio, runs.keys);
      PackTask task;
      task.keys = runs.keys;
      task.canonical = computation_.reproducible;
      task.to = packed_keys(list);
      task.begin = begin;
      task.end = std::min(list.rows, begin + kPackRows);
      kernels_.pack_keys(problem_, task);
    };
    if (phase.shares.empty()) {
      pool_->run_parallel(static_cast<std::int64_t>(phase.items.size()),
                          [&](std::int64_t index, int slot) {
                            attend(phase.items[static_cast<std::size_t>(index)], nullptr, slot);
                          });
    } else {
      share_runner_.run(*pool_, phase, pack, attend);
    }
    if (stopped()) return;
    first_phase = false;
  }
}

// Writes the caller's output: merges branches and sinks, scales and rounds; zeros if a row attended
// to nothing.
void CpuEngine::finish_forward(const ForwardCall& call, Queue&) {
  const int heads = computation_.heads();
  const int head_dim = computation_.head_dim;
  const DType dtype = computation_.dtype;
  const TensorRows state = state_rows(call);
  const bool per_branch = call.branches.o != nullptr;
  const auto factor = static_cast<float>(computation_.pattern->output_scale);
  const bool convert = !direct(call) && !is_fp32();
  const bool sinks_taken = call.sinks.base == nullptr || kernels_take_sinks(call);
  if (!per_branch && every_row_attends_ && !convert && factor == 1.0F && sinks_taken) return;
  const auto row_bytes = static_cast<std::int64_t>(size_of(dtype)) * head_dim;
  for_each_token(computation_.query_tokens, [&](std::int64_t b, std::int64_t t) {
    alignas(64) float row[kMaxHeadDim];
    std::byte* empty = nullptr;  // rows to clear begin here ...
    std::byte* empty_end =
        nullptr;  // ... and end here: rows of neighbouring heads are cleared together
    for (int h = 0; h < heads; ++h) {
      auto* l = reinterpret_cast<float*>(call.lse.at(b, h) + t * call.lse.row_step);
      std::byte* out = call.o.at(b, h) + t * call.o.row_step;
      if (per_branch) merge_branches(call.branches, b, t, h, row, l);
      const bool nothing = *l == -INFINITY;
      const WithSink end =
          with_sink(*l, sinks_taken && !nothing ? -INFINITY : sink_of(call.sinks, h));
      const float row_factor = factor * end.kept;
      *l = end.lse;
      if (per_branch) {
        kernels_.store_row(dtype, row, row_factor, out, head_dim);
        if (!is_fp32()) round_branches(call.branches, b, t, h);
      } else if (nothing && std::isnan(end.kept)) {
        std::fill_n(row, head_dim, NAN);
        kernels_.store_row(dtype, row, 1.0F, out, head_dim);
      } else if (nothing) {
        if (out != empty_end) {
          if (empty != nullptr) std::memset(empty, 0, static_cast<std::size_t>(empty_end - empty));
          empty = out;
        }
        empty_end = out + row_bytes;
      } else if (convert) {
        const auto* wide_row = reinterpret_cast<const float*>(state.at(b, h) + t * state.row_step);
        kernels_.store_row(dtype, wide_row, row_factor, out, head_dim);
      } else if (row_factor != 1.0F) {  // fp32, in place
        kernels_.store_row(dtype, reinterpret_cast<const float*>(out), row_factor, out, head_dim);
      }
    }
    if (empty != nullptr) std::memset(empty, 0, static_cast<std::size_t>(empty_end - empty));
  });
}

// Rounds the outputs that are kept for backward. Backward takes delta from rounded outputs, as it
// does for exact gradients.
void CpuEngine::round_branches(const BranchOutputs& kept, std::int64_t batch, std::int64_t token,
                               int head) const {
  const DType dtype = computation_.dtype;
  const int head_dim = computation_.head_dim;
  const auto row_bytes = static_cast<std::int64_t>(size_of(dtype)) * head_dim;
  for (int b = 0; b < static_cast<int>(computation_.pattern->branches.size()); ++b) {
    const std::int64_t at = computation_.kept->row(b, batch, head, token);
    if (at < 0 || kept.lse[at] == -INFINITY) continue;  // its O was never written
    kernels_.store_row(dtype, branch_outputs(kept) + at * head_dim, 1.0F, kept.o + at * row_bytes,
                       head_dim);
  }
}

// One softmax over all branches: weights exp(L_b - L).
void CpuEngine::merge_branches(const BranchOutputs& kept, std::int64_t batch, std::int64_t token,
                               int head, float* row, float* lse) const {
  const auto branches = static_cast<int>(computation_.pattern->branches.size());
  const int head_dim = computation_.head_dim;
  const float* branch_o = branch_outputs(kept);
  // Calls use(lse, o) for every branch that selects the token and has seen a key.
  const auto for_each_branch = [&](const auto& use) {
    for (int b = 0; b < branches; ++b) {
      const std::int64_t at = computation_.kept->row(b, batch, head, token);
      if (at < 0 || kept.lse[at] == -INFINITY) continue;  // its O was never written
      use(kept.lse[at], branch_o + at * head_dim);
    }
  };
  float highest = -INFINITY;
  bool poisoned = false;
  for_each_branch([&](float l, const float*) {
    poisoned = poisoned || std::isnan(l);
    highest = std::max(highest, l);
  });
  std::fill_n(row, head_dim, 0.0F);
  *lse = highest;
  if (highest == -INFINITY && !poisoned) return;
  double sum = 0;
  for_each_branch(
      [&](float l, const float*) { sum += std::exp(static_cast<double>(l) - highest); });
  *lse = static_cast<float>(highest + std::log(sum));
  for_each_branch([&](float l, const float* o) {
    const auto weight = static_cast<float>(std::exp(static_cast<double>(l) - highest) / sum);
    for (int d = 0; d < head_dim; ++d) row[d] = std::fma(weight, o[d], row[d]);
  });
}

}  // namespace annulus::cpu
