#include "local_ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "annulus/in_process.h"
#include "core/caches.h"
#include "core/machine.h"
#include "kernels/backend.h"
#include "ring/limits.h"

namespace annulus::python {
namespace {

// Copies rows between [batch, tokens, heads(, head_dim)] views. `positions` are the tokens of
// `whole` that are the shard's tokens 0, 1, ...
template <typename Copy>
void for_each_row(const Placement& placement, int rank, const ConstTensorView& whole,
                  const ConstTensorView& part, const Copy& copy) {
  const auto size = static_cast<std::int64_t>(size_of(whole.dtype));
  std::int64_t local = 0;
  for (const RowSet& rows : placement.ranges(rank)) {
    for (std::int64_t i = 0; i < rows.count; ++i, ++local) {
      for (std::int64_t batch = 0; batch < whole.shape[0]; ++batch) {
        for (std::int64_t head = 0; head < whole.shape[2]; ++head) {
          copy(
              (batch * whole.stride[0] + rows[i] * whole.stride[1] + head * whole.stride[2]) * size,
              (batch * part.stride[0] + local * part.stride[1] + head * part.stride[2]) * size);
        }
      }
    }
  }
}

std::size_t row_bytes(const ConstTensorView& view) {
  return size_of(view.dtype) * (view.rank == 4 ? static_cast<std::size_t>(view.shape[3]) : 1);
}

std::int64_t bytes_of(const ConstTensorView& view) {
  return view.elements() * static_cast<std::int64_t>(size_of(view.dtype));
}

// Of a matrix.
std::optional<TensorView> row_of(std::optional<TensorView> view, int row) {
  if (!view) return view;
  view->data = static_cast<std::byte*>(view->data) +
               row * view->stride[0] * static_cast<std::int64_t>(size_of(view->dtype));
  view->rank = 1;
  view->shape[0] = view->shape[1];
  view->stride[0] = view->stride[1];
  return view;
}

TensorView dense_view(std::byte* data, const ConstTensorView& whole, std::int64_t tokens) {
  return whole.rank == 4 ? TensorView(data, whole.dtype,
                                      {whole.shape[0], tokens, whole.shape[2], whole.shape[3]})
                         : TensorView(data, whole.dtype, {whole.shape[0], tokens, whole.shape[2]});
}

}  // namespace

double LocalRing::forward_flops_of(const RingOptions& options) {
  return 4.0 * allowed_pairs(options.pattern, options.placement.tokens(), options.keys().tokens()) *
         static_cast<double>(options.pattern.times_in(options.batch)) * options.head_dim;
}

void LocalRing::set_documents(const std::vector<Document>& documents) {
  if (has_documents(documents)) return;
  options_.pattern.documents = documents;
  forward_flops_ = forward_flops_of(options_);
  const auto deadline = ring::patient_ring(options_).deadline;
  for (const auto& transport : transports_) transport->set_deadline(deadline);
  on_every_rank(
      [&](int rank) { executors_[static_cast<std::size_t>(rank)]->set_documents(documents); });
}

LocalRing::LocalRing(RingOptions options)
    : options_(std::move(options)),
      forward_flops_(forward_flops_of(options_)),
      transports_(make_in_process_ring(options_.placement.ranks(), ring::patient_ring(options_))),
      copies_(transports_.size()),
      executors_(transports_.size()) {
  for (int rank = 0; options_.device.kind != Device::Kind::cpu && rank < options_.placement.ranks();
       ++rank) {
    if (is_view(options_.placement, rank) && is_view(options_.keys(), rank)) continue;
    throw ConfigError(fmt::format(
        "attention on {}: shards of placement '{}' are no views of the arrays and would have to be "
        "copied, which is done on the CPU only: use 'contiguous', 'striped' or one rank",
        name_of(options_.device), options_.placement.name()));
  }
  on_every_rank([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    executors_[at] = std::make_unique<RingAttention>(options_, *transports_[at]);
  });
}

void LocalRing::on_every_rank(const std::function<void(int rank)>& body) {
  run_in_process(transports_, [&](Transport& transport) { body(transport.rank()); });
}

std::byte* LocalRing::memory(int rank, std::size_t slot, std::size_t bytes) {
  Copies& copies = copies_[static_cast<std::size_t>(rank)];
  if (copies.size() <= slot) copies.resize(slot + 1);
  if (copies[slot].bytes() < static_cast<std::int64_t>(bytes)) {
    copies[slot] = with_caches_dropped([&] {
      return backend_of(options_.device, options_.threads)
          ->allocate(static_cast<std::int64_t>(bytes), "copies of shards");
    });
  }
  return copies[slot].data();
}

TensorView LocalRing::shard(const Placement& placement, int rank, std::size_t slot,
                            const ConstTensorView& whole, bool is_input) {
  const auto size = static_cast<std::int64_t>(size_of(whole.dtype));
  // Views of inputs are only read.
  auto* data = static_cast<std::byte*>(const_cast<void*>(whole.data));
  if (is_view(placement, rank)) {
    TensorView view;
    view.dtype = whole.dtype;
    view.device = whole.device;
    view.rank = whole.rank;
    view.shape = whole.shape;
    view.stride = whole.stride;
    const auto ranges = placement.ranges(rank);
    const RowSet rows = ranges.empty() ? RowSet{} : ranges[0];
    view.data = data + rows.first * whole.stride[1] * size;
    view.shape[1] = rows.count;
    view.stride[1] = whole.stride[1] * rows.stride;
    return view;
  }
  const std::int64_t tokens = placement.local_tokens(rank);
  TensorView part = dense_view(nullptr, whole, tokens);
  part.data = memory(rank, slot, static_cast<std::size_t>(bytes_of(part)));
  if (is_input) {
    const std::size_t row = row_bytes(whole);
    for_each_row(placement, rank, whole, part, [&](std::int64_t from, std::int64_t to) {
      std::memcpy(static_cast<std::byte*>(part.data) + to, data + from, row);
    });
  }
  return part;
}

void LocalRing::collect(const Placement& placement, int rank, const ConstTensorView& part,
                        const TensorView& whole) {
  if (is_view(placement, rank)) return;
  const std::size_t row = row_bytes(whole);
  for_each_row(placement, rank, whole, part, [&](std::int64_t to, std::int64_t from) {
    std::memcpy(static_cast<std::byte*>(whole.data) + to,
                static_cast<const std::byte*>(part.data) + from, row);
  });
}

void LocalRing::forward(const ConstTensorView& q, const ConstTensorView& k,
                        const ConstTensorView& v, const TensorView& o, const TensorView* lse,
                        const OptionalInputs& more) {
  const Placement& queries = options_.placement;
  const Placement& keys = options_.keys();
  on_every_rank([&](int rank) {
    const TensorView q_part = shard(queries, rank, 0, q, true);
    const TensorView k_part = shard(keys, rank, 1, k, true);
    const TensorView v_part = shard(keys, rank, 2, v, true);
    const TensorView o_part = shard(queries, rank, 3, o, false);
    TensorView lse_part;
    if (lse != nullptr) {
      lse_part = shard(queries, rank, 4, *lse, false);
    } else {
      lse_part =
          TensorView(nullptr, DType::f32, {q_part.shape[0], q_part.shape[1], q_part.shape[2]});
      lse_part.device = options_.device;
      lse_part.data = memory(rank, 4, static_cast<std::size_t>(bytes_of(lse_part)));
    }
    executors_[static_cast<std::size_t>(rank)]->forward(q_part, k_part, v_part, o_part, lse_part,
                                                        nullptr, more);
    collect(queries, rank, o_part, o);
    if (lse != nullptr) collect(queries, rank, lse_part, *lse);
  });
}

void LocalRing::backward(const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& v, const ConstTensorView& o,
                         const ConstTensorView& lse, const ConstTensorView& dout,
                         const TensorView& dq, const TensorView& dk, const TensorView& dv,
                         const OptionalInputs& more, const std::optional<TensorView>& dsinks) {
  const Placement& queries = options_.placement;
  const Placement& keys = options_.keys();
  on_every_rank([&](int rank) {
    const TensorView dq_part = shard(queries, rank, 6, dq, false);
    const TensorView dk_part = shard(keys, rank, 7, dk, false);
    const TensorView dv_part = shard(keys, rank, 8, dv, false);
    executors_[static_cast<std::size_t>(rank)]->backward(
        shard(queries, rank, 0, q, true), shard(keys, rank, 1, k, true),
        shard(keys, rank, 2, v, true), shard(queries, rank, 3, o, true),
        shard(queries, rank, 4, lse, true), shard(queries, rank, 5, dout, true), dq_part, dk_part,
        dv_part, nullptr, more, {row_of(dsinks, rank)});
    collect(queries, rank, dq_part, dq);
    collect(keys, rank, dk_part, dk);
    collect(keys, rank, dv_part, dv);
  });
}

void LocalRing::use_stream(std::uintptr_t stream) {
  if (stream_ == stream) return;
  constexpr std::uintptr_t kPerThread = 2;  // CUDA's number for the calling thread's own stream
  if (stream == kPerThread && executors_.size() > 1) {
    throw ConfigError(
        "stream is 2, every thread's own one, and the ranks are threads: expected another stream, "
        "or one rank");
  }
  // One queue for all ranks, because ranks of one device take turns anyway.
  const std::shared_ptr<Queue> queue = cuda_queue(options_.device, reinterpret_cast<void*>(stream));
  for (const auto& executor : executors_) executor->use_queue(queue);
  stream_ = stream;
}

void LocalRing::leave_stream() {
  if (own_ == nullptr) own_ = backend_of(options_.device, options_.threads)->make_queue();
  for (const auto& executor : executors_) executor->use_queue(own_);
  stream_.reset();
}

void LocalRing::synchronize() {
  for (const auto& executor : executors_) executor->synchronize();
}

void LocalRing::interrupt() noexcept {
  for (const auto& executor : executors_) executor->interrupt();
  // The transport tells ranks that wait for rows.
  transports_[0]->abort("interrupted");
}

std::int64_t LocalRing::bytes() const {
  std::int64_t sum = 0;
  for (const auto& executor : executors_) sum += executor->memory_info().workspace_bytes;
  for (const Copies& rank : copies_) {
    for (const Memory& copy : rank) sum += copy.bytes();
  }
  return sum;
}

Limits local_limits(const RingOptions& options) {
  if (options.device.kind != Device::Kind::cpu) {
    // The device decides whether it fits, because it knows what its allocator can free.
    constexpr std::int64_t kNoLimit = std::int64_t{1} << 62;
    return {.communication_bytes = kNoLimit, .qkv_elements = kNoLimit};
  }
  const Limits least;  // Python callers cannot raise them, and a share is only an estimate
  const std::optional<std::int64_t> available = available_memory_bytes();
  if (!available) return least;
  Limits limits = ring::limits_for_memory(options, *available, ring::Missing::results);
  limits.communication_bytes = std::max(limits.communication_bytes, least.communication_bytes);
  limits.qkv_elements = std::max(limits.qkv_elements, least.qkv_elements);
  return limits;
}

}  // namespace annulus::python
