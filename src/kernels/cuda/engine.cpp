#include "kernels/cuda/engine.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "annulus/error.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/portable/kernels.h"

namespace annulus::cuda {
namespace {

Modifiers modifiers_of(const Computation& computation, const DropoutSeed& seed) {
  return {static_cast<float>(computation.softcap), computation.dropout, seed};
}

}  // namespace

CudaEngine::CudaEngine(const Computation& computation, std::span<const Stage> forward,
                       std::span<const Stage> backward, const Families& families, int device,
                       Uploads& uploads)
    : computation_(computation),
      families_(families),
      device_(device),
      uploads_(uploads),
      stages_(backward.begin(), backward.end()) {
  for (const Stage& stage : forward) {
    forward_.push_back(compile_stage(stage, computation_, Side::queries, families_.forward.tile,
                                     families_.forward.order, 0, device_));
    forward_launches_ += static_cast<int>(forward_.back().tables.launches.size());
  }
  if (families_.forward.later) put_finest_first();
  while (first_stage_ < forward_.size() && forward_[first_stage_].tables.launches.empty())
    ++first_stage_;
  if (first_stage_ < forward_.size()) {
    const Tables& first = forward_[first_stage_].tables;
    covers_first_ = covers(first, first.launches.front(), computation_.query_rows());
  }
  if (!forward_.empty() && !forward_.back().tables.launches.empty()) {
    const Tables& last = forward_.back().tables;
    covers_last_ = covers(last, last.launches.back(), computation_.query_rows());
  }
  backward_ = compile_backward(families_.backward);
}

void CudaEngine::put_finest_first() {
  // In a ring, later stages load a state, whatever the order of branches.
  if (forward_.size() != 1 || forward_launches_ < 2) return;
  CompiledStage& stage = forward_.front();
  if (!covers(stage.tables, stage.tables.launches.back(), computation_.query_rows())) return;
  const auto reverse = [&] {
    std::reverse(stage.tables.launches.begin(), stage.tables.launches.end());
    std::reverse(stage.traits.begin(), stage.traits.end());
    std::reverse(stage.parcels.begin(), stage.parcels.end());
  };
  reverse();
  finest_first_ = find_later_launches(stage.tables, computation_);
  if (!finest_first_) reverse();
}

CudaEngine::BackwardStages CudaEngine::compile_backward(const BackwardFamily& family) const {
  BackwardStages out;
  out.family = family;
  for (const Stage& stage : stages_) {
    BackwardStage compiled{{}, {}, out.counts};
    if (stage.kind != Stage::Kind::key_gradient && family.query_tile > 0) {
      compiled.queries = compile_stage(stage, computation_, Side::queries, family.query_tile,
                                       ItemOrder::longest_first, 0, device_);
    }
    if (stage.kind != Stage::Kind::query_gradient)
      compiled.keys = compile_stage(stage, computation_, Side::keys, family.key_tile, family.order,
                                    family.step, device_);
    if (family.key_sums) compiled.keys.tables.earlier.resize(compiled.keys.tables.items.size());
    compiled.first_progress =
        out.counts + static_cast<std::int64_t>(compiled.keys.tables.launches.size());
    out.counts = compiled.first_progress +
                 kBackwardTurns * static_cast<std::int64_t>(compiled.keys.turns.size());
    out.stages.push_back(std::move(compiled));
  }
  return out;
}

void CudaEngine::upload(BackwardStages& stages, Queue& queue) {
  if (stages.family.key_sums) {
    std::vector<Tables*> keys;
    for (BackwardStage& stage : stages.stages) keys.push_back(&stage.keys.tables);
    // If keys travel in a ring, other ranks also compute gradients for them.
    const bool returned = gradients_.layout != nullptr && gradients_.layout->sections() == 2 &&
                          stages_.front().plan->ranks() > 1;
    stages.writers = find_key_writers(keys, computation_, returned);
  }
  for (BackwardStage& stage : stages.stages) {
    stage.queries.upload(device_, uploads_, queue);
    stage.keys.upload(device_, uploads_, queue);
    list_bytes_ += stage.queries.memory.bytes() + stage.keys.memory.bytes();
  }
  stages.counters = allocate_reusable(device_, stages.counts * 4, "counters of items");
  list_bytes_ += stages.counters.bytes();
}

CudaEngine::BackwardStages& CudaEngine::stages_for(const KernelShape& shape, Queue& queue) {
  if (backward_.family.fits(shape)) return backward_;
  if (awkward_.stages.empty()) {
    BackwardStages stages = compile_backward(portable_backward_family());
    try {
      upload(stages, queue);
    } catch (const OutOfMemory&) {
      queue.record().wait();  // no stage is kept, and tables are on their way
      throw;
    }
    awkward_ = std::move(stages);
  }
  return awkward_;
}

void CudaEngine::allocate(const ReceivedRows& received, Queue& queue) {
  const DeviceScope scope(device_);
  const std::int64_t row_bytes = parcel_row_bytes(
      computation_.head_dim * static_cast<std::int64_t>(size_of(computation_.dtype)));
  for (CompiledStage& stage : forward_) {
    stage.upload(device_, uploads_, queue);
    list_bytes_ += stage.memory.bytes();
    stage.find_rows(received, row_bytes);
  }
  keys_ = upload_parcels(received.keys, device_, uploads_, queue);
  queries_ = upload_parcels(received.queries, device_, uploads_, queue);
  gradients_ = upload_parcels(received.gradients, device_, uploads_, queue);
  list_bytes_ += keys_.table.bytes() + queries_.table.bytes() + gradients_.table.bytes();
  if (computation_.backward) {
    upload(backward_, queue);
    for (BackwardStage& stage : backward_.stages) stage.keys.find_rows(received, row_bytes);
  }
  if (computation_.kept != nullptr) upload_kept(queue);
  if (!is_fp32())
    accumulators_ = allocate_reusable(device_, accumulator_bytes(), "fp32 accumulators");
  if (!computation_.backward) return;
  statistics_ = allocate_reusable(device_, statistics_bytes(), "row statistics");
  sink_sums_ = allocate_reusable(
      device_, computation_.heads() * kSinkBlocks * static_cast<std::int64_t>(sizeof(double)),
      "sums of sinks");
  list_bytes_ += sink_sums_.bytes();
  // The padding of a row to 16 bytes is sent but never written otherwise.
  check(cudaMemsetAsync(statistics_.data(), 0, static_cast<std::size_t>(statistics_.bytes()),
                        stream_of(queue)),
        "clearing row statistics");
}

std::int64_t CudaEngine::sum_bytes(std::int64_t rows) const {
  constexpr std::int64_t kLine = 128;
  return (rows * computation_.head_dim * 4 + kLine - 1) / kLine * kLine;
}

void CudaEngine::upload_kept(Queue& queue) {
  const KeptRows& kept = *computation_.kept;
  const auto words = static_cast<std::int64_t>(kept.words().size() * sizeof(KeptRows::Word));
  const auto heads = static_cast<std::int64_t>(kept.heads().size() * sizeof(KeptRows::Head));
  kept_memory_ = allocate_reusable(device_, words + heads, "the table of kept rows");
  list_bytes_ += kept_memory_.bytes();
  const auto copy = [&](std::byte* to, const auto& list) {
    uploads_.copy(to, std::as_bytes(std::span(list)), "the table of kept rows", queue);
  };
  copy(kept_memory_.data(), kept.words());
  copy(kept_memory_.data() + words, kept.heads());
  kept_.words = reinterpret_cast<const KeptRows::Word*>(kept_memory_.data());
  kept_.heads = reinterpret_cast<const KeptRows::Head*>(kept_memory_.data() + words);
  kept_.entry_heads = kept.entry_heads();
  kept_.batch_rows = kept.batch_rows();
  kept_.branch_heads = computation_.heads();
  kept_.branches = static_cast<std::int32_t>(computation_.pattern->branches.size());
}

std::string CudaEngine::kernels() const {
  // Only portable kernels write outputs of single branches.
  const bool keeps_branches = computation_.kept != nullptr && computation_.backward;
  std::string forward = keeps_branches ? "portable" : families_.forward.name;
  const std::string backward = families_.backward.name;
  if (!computation_.backward || forward == backward) return forward;
  return forward + " forward, " + backward + " backward";
}

std::int64_t CudaEngine::state_bytes() const { return accumulator_bytes() + statistics_bytes(); }

std::int64_t CudaEngine::accumulator_bytes() const {
  if (is_fp32()) return 0;
  // Forward and backward never run at the same time, so they share the larger workspace.
  const bool one_launch = forward_launches_ <= 1 && covers_last_;
  std::int64_t bytes = one_launch ? 0 : sum_bytes(computation_.query_rows());
  if (computation_.backward)
    bytes = sum_bytes(computation_.query_rows()) + 2 * sum_bytes(computation_.key_rows());
  if (computation_.kept != nullptr) bytes = std::max(bytes, sum_bytes(computation_.kept->rows()));
  return bytes;
}

std::int64_t CudaEngine::statistics_bytes() const {
  return computation_.backward ? computation_.query_rows() * computation_.statistics_width() * 4
                               : 0;
}

RowSpace CudaEngine::query_space() const {
  return {computation_.batch, computation_.query_tokens, computation_.heads()};
}

RowSpace CudaEngine::key_space() const {
  return {computation_.batch, computation_.key_tokens, computation_.kv_heads};
}

TensorRows CudaEngine::rows_of(std::byte* base, std::int64_t tokens, int heads,
                               std::int64_t width) {
  const std::int64_t row = width * 4;
  return {base, tokens * heads * row, row, heads * row};
}

TensorRows CudaEngine::state_rows(const ForwardCall& call) const {
  if (is_fp32()) return call.o;
  return rows_of(accumulators_.data(), computation_.query_tokens, computation_.heads(),
                 computation_.head_dim);
}

float* CudaEngine::branch_sums(const BranchOutputs& branches) const {
  return is_fp32() ? reinterpret_cast<float*>(branches.o) : accumulators_.floats();
}

TensorRows CudaEngine::statistics() const {
  // Head by head: a warp that reads the statistics of 32 tokens then touches 4 cache lines, not 32.
  const std::int64_t row = computation_.statistics_width() * std::int64_t{4};
  const std::int64_t head = computation_.query_tokens * row;
  return {statistics_.data(), computation_.heads() * head, head, row};
}

KernelShape CudaEngine::shape(std::span<const TensorRows> rows) const {
  KernelShape out;
  out.dtype = computation_.dtype;
  out.head_dim = computation_.head_dim;
  out.scale = static_cast<float>(computation_.scale);
  out.aligned = computation_.head_dim % 8 == 0 && keys_.aligned && queries_.aligned &&
                std::all_of(rows.begin(), rows.end(), is_aligned);
  out.batch = computation_.batch;
  out.query_tokens = computation_.query_tokens;
  out.key_tokens = computation_.key_tokens;
  out.heads = computation_.heads();
  out.kv_heads = computation_.kv_heads;
  return out;
}

KernelShape CudaEngine::backward_shape(const BackwardCall& call) const {
  const TensorRows tensors[] = {call.q, call.k, call.v, call.dout};
  return shape(tensors);
}

bool CudaEngine::fits(const ForwardCall& call) const {
  const TensorRows tensors[] = {call.q, call.k, call.v};
  return families_.forward.fits(shape(tensors)) && is_aligned(call.o);
}

bool CudaEngine::ends_rows(const ForwardCall& call) const { return finest_first_ && fits(call); }

void CudaEngine::begin_forward(const ForwardCall& call, Queue& queue) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(queue);
  if (call.branches.lse != nullptr) {
    const TensorRows rows{reinterpret_cast<std::byte*>(call.branches.lse), 0, 0, 4};
    check_launch(fill_rows(rows, {1, computation_.kept->rows(), 1}, -INFINITY, stream), "fill_rows",
                 stream);
    return;
  }
  if (covers_first_) return;
  check_launch(fill_rows(call.lse, query_space(), -INFINITY, stream), "fill_rows", stream);
}

void CudaEngine::forward(int stage, const ForwardCall& call, Queue& queue) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(queue);
  const CompiledStage& compiled = forward_[static_cast<std::size_t>(stage)];
  const TensorRows tensors[] = {call.q, call.k, call.v};
  ForwardParams params;
  params.shape = shape(tensors);
  params.modifiers = modifiers_of(computation_, call.dropout);
  params.tables = compiled.device;
  params.q.local = call.q;
  params.k = channel(call.k, keys_, 0);
  params.v = channel(call.v, keys_, 1);
  params.lse = call.lse;
  params.state = state_rows(call);
  if (call.branches.o != nullptr) {
    const ForwardKept kept{kept_, branch_sums(call.branches), call.branches.lse};
    params.load_state = static_cast<std::size_t>(stage) > first_stage_;
    for (const Launch& launch : compiled.tables.launches) {
      if (call.stop->load(std::memory_order_relaxed)) return;
      params.first_item = launch.first_item;
      params.items = launch.items;
      check_launch(portable_forward(params, stream, kept), "forward", stream);
    }
    return;
  }
  // The portable kernels take rows of any layout.
  const bool fitting = fits(call);
  const bool by_row = ends_rows(call);
  params.later = by_row ? compiled.later : nullptr;
  bool first = static_cast<std::size_t>(stage) == first_stage_;
  for (std::size_t i = 0; i < compiled.tables.launches.size(); ++i) {
    const Launch& launch = compiled.tables.launches[i];
    if (call.stop->load(std::memory_order_relaxed)) return;
    params.first_item = launch.first_item;
    params.items = launch.items;
    params.load_state = !first;
    params.for_good =
        by_row || (covers_last_ && static_cast<std::size_t>(stage) + 1 == forward_.size() &&
                   i + 1 == compiled.tables.launches.size());
    params.out = params.for_good ? call.o : params.state;
    params.out_dtype = params.for_good ? computation_.dtype : DType::f32;
    params.out_factor =
        params.for_good ? static_cast<float>(computation_.pattern->output_scale) : 1.0F;
    params.sinks = params.for_good ? call.sinks : HeadNumbers();
    check_launch(fitting ? families_.forward.run(params, compiled.traits[i], stream)
                         : portable_forward(params, stream),
                 "forward", stream);
    first = false;
  }
}

void CudaEngine::finish_forward(const ForwardCall& call, Queue& queue) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(queue);
  if (call.branches.o != nullptr) {
    MergeParams params;
    params.space = query_space();
    params.kept = kept_;
    params.branch_o = branch_sums(call.branches);
    params.branch_lse = call.branches.lse;
    params.kept_o = is_fp32() ? nullptr : call.branches.o;
    params.lse = call.lse;
    params.out = call.o;
    params.sinks = call.sinks;
    params.head_dim = computation_.head_dim;
    params.dtype = computation_.dtype;
    params.factor = static_cast<float>(computation_.pattern->output_scale);
    check_launch(merge_branches(params, stream), "merge_branches", stream);
    return;
  }
  if (covers_last_ || ends_rows(call)) return;
  FinishParams params;
  params.space = query_space();
  params.lse = call.lse;
  params.state = state_rows(call);
  params.out = call.o;
  params.head_dim = computation_.head_dim;
  params.dtype = computation_.dtype;
  params.factor = static_cast<float>(computation_.pattern->output_scale);
  params.sinks = call.sinks;
  params.only_empty = is_fp32() && params.factor == 1.0F && call.sinks.base == nullptr;
  check_launch(finish_rows(params, stream), "finish_rows", stream);
}

GradientSums CudaEngine::sums(const BackwardCall& call) const {
  if (is_fp32()) return {call.dq, call.dk, call.dv};
  const Computation& c = computation_;
  std::byte* dq = accumulators_.data();
  std::byte* dk = dq + sum_bytes(c.query_rows());
  std::byte* dv = dk + sum_bytes(c.key_rows());
  return {rows_of(dq, c.query_tokens, c.heads(), c.head_dim),
          rows_of(dk, c.key_tokens, c.kv_heads, c.head_dim),
          rows_of(dv, c.key_tokens, c.kv_heads, c.head_dim)};
}

bool CudaEngine::deals_dq(const BackwardStages& stages) const {
  // Other ranks add to rows of dQ with columns in the usual order.
  const bool returned = gradients_.layout != nullptr && gradients_.layout->sections() == 1 &&
                        stages_.front().plan->ranks() > 1;
  return stages.family.dealt_dq && !is_fp32() && !returned;
}

bool CudaEngine::ends_keys(const BackwardStages& stages, const BackwardCall& call) const {
  if (is_fp32() || !stages.writers.end) return false;
  const GradientSums sum = sums(call);
  const RowSpace space = key_space();
  const auto alike = [&](const TensorRows& wide, const TensorRows& out) {
    return is_aligned(out) && (space.batch == 1 || wide.batch_step == 2 * out.batch_step) &&
           (space.heads == 1 || wide.head_step == 2 * out.head_step) &&
           (space.tokens == 1 || wide.row_step == 2 * out.row_step);
  };
  return alike(sum.dk, call.dk) && alike(sum.dv, call.dv);
}

void CudaEngine::begin_backward(const BackwardCall& call, Queue& queue) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(queue);
  const BackwardStages& stages = stages_for(backward_shape(call), queue);
  StatisticsParams params;
  params.space = query_space();
  params.lse = call.lse;
  params.o = call.o;
  params.dout = call.dout;
  params.statistics = statistics();
  params.head_dim = computation_.head_dim;
  params.dtype = computation_.dtype;
  // Gradients are multiplied by output_scale at the end, so delta uses the unscaled O. A scale of 0
  // makes every gradient 0.
  const double factor = computation_.pattern->output_scale;
  params.unscale = static_cast<float>(factor == 0 ? 0.0 : 1.0 / factor);
  if (call.branches.o != nullptr) {
    params.kept = kept_;
    params.branch_o = call.branches.o;
    params.branch_lse = call.branches.lse;
  }
  const GradientSums sum = sums(call);
  params.dq = sum.dq;
  params.counters = reinterpret_cast<std::int32_t*>(stages.counters.data());
  params.counter_count = static_cast<std::int32_t>(stages.counters.bytes() / 4);
  check_launch(fill_statistics(params, stream), "fill_statistics", stream);
  if (call.sinks.base != nullptr) {
    SinkParams sinks;
    sinks.space = params.space;
    sinks.sinks = call.sinks;
    sinks.dsinks = call.dsinks;
    sinks.statistics = params.statistics;
    sinks.kept = params.kept;
    sinks.branch_lse = params.branch_lse;
    sinks.sums = reinterpret_cast<double*>(sink_sums_.data());
    sinks.factor = factor;
    sinks.adds = call.adds_dsinks;
    check_launch(take_sinks(sinks, stream), "take_sinks", stream);
  }
  if (stages.writers.begin) return;
  if (is_fp32()) {
    const std::int64_t row = computation_.head_dim * std::int64_t{4};
    check_launch(clear_rows(call.dk, key_space(), row, stream), "clear_rows", stream);
    check_launch(clear_rows(call.dv, key_space(), row, stream), "clear_rows", stream);
    return;
  }
  const std::int64_t bytes = 2 * sum_bytes(computation_.key_rows());
  if (bytes == 0) return;
  check(cudaMemsetAsync(sum.dk.base, 0, static_cast<std::size_t>(bytes), stream),
        "clearing gradients");
}

void CudaEngine::backward(int stage, const BackwardCall& call, Queue& queue) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(queue);
  const KernelShape shape = backward_shape(call);
  const BackwardStages& stages = stages_for(shape, queue);
  const BackwardStage& compiled = stages.stages[static_cast<std::size_t>(stage)];
  const GradientSums sum = sums(call);
  const TensorRows stats = statistics();
  const bool keys_return = gradients_.layout != nullptr && gradients_.layout->sections() == 2;
  const Parcels none;
  BackwardParams params;
  params.shape = shape;
  params.modifiers = modifiers_of(computation_, call.dropout);
  params.q = channel(call.q, queries_, 0);
  params.dout = channel(call.dout, queries_, 1);
  params.lse = channel(stats, queries_, 2);
  params.k = channel(call.k, keys_, 0);
  params.v = channel(call.v, keys_, 1);
  params.dq = channel(sum.dq, keys_return ? none : gradients_, 0);
  params.dk = channel(sum.dk, keys_return ? gradients_ : none, 0);
  params.dv = channel(sum.dv, keys_return ? gradients_ : none, 1);
  params.key_sums.earlier = compiled.keys.key_sums;
  params.dealt_dq = deals_dq(stages);
  const bool last = static_cast<std::size_t>(stage) == stages.writers.last_stage;
  auto* const counters = reinterpret_cast<std::int32_t*>(stages.counters.data());
  const bool by_branch = computation_.deltas() > 1;
  const auto run = [&](const CompiledStage& part, const auto& kernel, const char* name) {
    params.tables = part.device;
    for (std::size_t i = 0; i < part.tables.launches.size(); ++i) {
      if (call.stop->load(std::memory_order_relaxed)) return;
      const Launch& launch = part.tables.launches[i];
      params.first_item = launch.first_item;
      params.items = launch.items;
      params.delta = channel(stats, queries_, 2, 4 * (1 + (by_branch ? launch.branch : 0)));
      check_launch(kernel(i), name, stream);
    }
  };
  run(
      compiled.queries, [&](std::size_t) { return portable_query_gradient(params, stream); },
      "query_gradient");
  run(
      compiled.keys,
      [&](std::size_t i) {
        if (last && i + 1 == compiled.keys.tables.launches.size()) {
          const auto factor = static_cast<float>(computation_.pattern->output_scale);
          if (ends_keys(stages, call))
            params.key_sums = {params.key_sums.earlier, call.dk.base, call.dv.base, factor};
        }
        const LaunchTurns turns{counters + compiled.first_counter + static_cast<std::int64_t>(i),
                                compiled.keys.device_turns, counters + compiled.first_progress};
        return stages.family.keys(params, compiled.keys.traits[i], turns, stream);
      },
      "key_gradient");
}

void CudaEngine::finish_backward(const BackwardCall& call, Queue& queue) {
  const auto factor = static_cast<float>(computation_.pattern->output_scale);
  if (is_fp32() && factor == 1.0F) return;
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(queue);
  const GradientSums sum = sums(call);
  const BackwardStages& stages = stages_for(backward_shape(call), queue);
  const RoundedRows tensors[] = {{sum.dq, call.dq, query_space(), deals_dq(stages)},
                                 {sum.dk, call.dk, key_space()},
                                 {sum.dv, call.dv, key_space()}};
  const std::size_t count = ends_keys(stages, call) ? 1 : 3;
  check_launch(round_rows(std::span(tensors, count), computation_.head_dim, computation_.dtype,
                          factor, stream),
               "round_rows", stream);
}

}  // namespace annulus::cuda
