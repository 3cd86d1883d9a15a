#include "cli/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "annulus/half.h"

namespace annulus::cli {
namespace {

// splitmix64's finaliser: a bijection whose output bits are as good as independent.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// The sum of four 16-bit uniforms: bell-shaped within +-3.46, one hash and a few integer operations
// where Box-Muller needs a logarithm and a sine (2 against 25 seconds for 4 x 2^29 elements).
float bell(std::uint64_t key, std::uint64_t counter) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15U;
  const std::uint64_t bits = mix(key + counter * kGolden);
  const auto sum = static_cast<std::int32_t>((bits & 0xffffU) + ((bits >> 16) & 0xffffU) +
                                             ((bits >> 32) & 0xffffU) + (bits >> 48));
  // Mean 4 * 65535 / 2; variance of a uniform on [0, 65536) is 65536^2 / 12.
  constexpr float kToUnitVariance = 1.7320508F / 65536.0F;
  return static_cast<float>(sum - 131070) * kToUnitVariance;
}

template <DType dtype>
void fill_row(void* data, std::int64_t first, std::int64_t count, std::uint64_t key,
              std::uint64_t counter) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = bell(key, counter + static_cast<std::uint64_t>(i));
    if constexpr (dtype == DType::f32) {
      static_cast<float*>(data)[first + i] = value;
    } else if constexpr (dtype == DType::bf16) {
      static_cast<std::uint16_t*>(data)[first + i] = float_to_bf16(value);
    } else {
      static_cast<std::uint16_t*>(data)[first + i] = float_to_f16(value);
    }
  }
}

constexpr std::int64_t kTokensPerTask = 64;

// body(batch, first index, end index) over a shard, in parallel.
template <typename Body>
void for_tokens(const TokenOrder& order, int rank, std::int64_t batch, ThreadPool& pool,
                const Body& body) {
  const std::int64_t tokens = order.end(rank) - order.begin(rank);
  const std::int64_t tasks = (tokens + kTokensPerTask - 1) / kTokensPerTask;
  pool.run_parallel(batch * tasks, [&](std::int64_t task, int) {
    const std::int64_t first = order.begin(rank) + task % tasks * kTokensPerTask;
    body(task / tasks, first, std::min(first + kTokensPerTask, order.end(rank)));
  });
}

void fill(const RingTensor& tensor, const TokenOrder& order, int rank, std::uint64_t key,
          ThreadPool& pool) {
  const TensorView& view = tensor.view();
  const std::int64_t row = view.stride[1];  // all heads of a token lie together
  for_tokens(order, rank, view.shape[0], pool,
             [&](std::int64_t batch, std::int64_t first, std::int64_t end) {
               for (std::int64_t index = first; index < end; ++index) {
                 const auto counter = static_cast<std::uint64_t>(
                     (batch * order.tokens() + order.position_of(index)) * row);
                 const std::int64_t at = tensor.row(batch, index, 0);
                 switch (view.dtype) {
                   case DType::f32:
                     fill_row<DType::f32>(view.data, at, row, key, counter);
                     break;
                   case DType::bf16:
                     fill_row<DType::bf16>(view.data, at, row, key, counter);
                     break;
                   case DType::f16:
                     fill_row<DType::f16>(view.data, at, row, key, counter);
                     break;
                 }
               }
             });
}

void touch(const RingTensor& tensor, const TokenOrder& order, int rank, ThreadPool& pool) {
  const TensorView& view = tensor.view();
  if (view.data == nullptr) return;
  const std::size_t element = size_of(view.dtype);
  for_tokens(order, rank, view.shape[0], pool,
             [&](std::int64_t batch, std::int64_t first, std::int64_t end) {
               auto* bytes = static_cast<std::byte*>(view.data);
               std::memset(bytes + static_cast<std::size_t>(tensor.row(batch, first, 0)) * element,
                           0, static_cast<std::size_t>((end - first) * view.stride[1]) * element);
             });
}

}  // namespace

TokenOrder::TokenOrder(const Placement& placement) {
  begins_.push_back(0);
  bool identity = true;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    std::int64_t index = begins_.back();
    for (const RowSet& rows : placement.ranges(rank)) {
      identity = identity && rows.first == index && (rows.stride == 1 || rows.count == 1);
      index += rows.count;
    }
    begins_.push_back(index);
  }
  if (identity) return;
  positions_.reserve(static_cast<std::size_t>(tokens()));
  indices_.resize(static_cast<std::size_t>(tokens()));
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    for (const RowSet& rows : placement.ranges(rank)) {
      for (std::int64_t i = 0; i < rows.count; ++i) {
        indices_[static_cast<std::size_t>(rows[i])] = static_cast<std::int64_t>(positions_.size());
        positions_.push_back(rows[i]);
      }
    }
  }
}

RingTensor::RingTensor(const char* name, DType dtype, std::int64_t batch, const TokenOrder& order,
                       int heads, int head_dim) {
  const std::int64_t elements = batch * order.tokens() * heads * std::max(1, head_dim);
  buffer_ = allocate_host(elements * static_cast<std::int64_t>(size_of(dtype)), name);
  view_ = head_dim == 0
              ? TensorView(buffer_.data(), dtype, {batch, order.tokens(), heads})
              : TensorView(buffer_.data(), dtype, {batch, order.tokens(), heads, head_dim});
}

TensorView RingTensor::shard(const TokenOrder& order, int rank) const {
  TensorView shard = view_;
  if (view_.data == nullptr) return shard;
  shard.shape[1] = order.end(rank) - order.begin(rank);
  shard.data = static_cast<std::byte*>(view_.data) +
               static_cast<std::size_t>(row(0, order.begin(rank), 0)) * size_of(view_.dtype);
  return shard;
}

std::int64_t RingTensor::shard_bytes(const TokenOrder& order, int rank) const {
  if (view_.data == nullptr) return 0;
  return shard(order, rank).elements() * static_cast<std::int64_t>(size_of(view_.dtype));
}

void RingTensor::load_row(std::int64_t batch, std::int64_t index, int head,
                          std::span<double> out) const {
  const std::int64_t at = row(batch, index, head);
  if (view_.dtype == DType::f32) {
    const float* values = static_cast<const float*>(view_.data) + at;
    std::copy_n(values, out.size(), out.begin());
    return;
  }
  for (std::size_t d = 0; d < out.size(); ++d) {
    out[d] = load_element(view_.data, view_.dtype, at + static_cast<std::int64_t>(d));
  }
}

JobTensors::JobTensors(const RingOptions& options) : order(options.placement) {
  const int heads = options.pattern.heads;
  const auto tensor = [&](const char* name, int tensor_heads) {
    return RingTensor(name, options.dtype, options.batch, order, tensor_heads, options.head_dim);
  };
  q = tensor("q", heads);
  k = tensor("k", options.kv_heads);
  v = tensor("v", options.kv_heads);
  o = tensor("o", heads);
  lse = RingTensor("lse", DType::f32, options.batch, order, heads, 0);
  if (!options.backward) return;
  dout = tensor("do", heads);
  dq = tensor("dq", heads);
  dk = tensor("dk", options.kv_heads);
  dv = tensor("dv", options.kv_heads);
}

std::int64_t JobTensors::shard_bytes(int rank) const {
  std::int64_t bytes = 0;
  for (const RingTensor* tensor : {&q, &k, &v, &o, &lse, &dout, &dq, &dk, &dv}) {
    bytes += tensor->shard_bytes(order, rank);
  }
  return bytes;
}

void fill_synthetic(JobTensors& tensors, int rank, std::uint64_t seed, ThreadPool& pool) {
  std::uint64_t stream = 0;
  for (const RingTensor* tensor : {&tensors.q, &tensors.k, &tensors.v, &tensors.dout}) {
    const std::uint64_t key = mix(mix(seed + 1) + ++stream);
    if (tensor->view().data != nullptr) fill(*tensor, tensors.order, rank, key, pool);
  }
}

void touch_outputs(JobTensors& tensors, int rank, ThreadPool& pool) {
  for (const RingTensor* tensor :
       {&tensors.o, &tensors.lse, &tensors.dq, &tensors.dk, &tensors.dv}) {
    touch(*tensor, tensors.order, rank, pool);
  }
}

}  // namespace annulus::cli
