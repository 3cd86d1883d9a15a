#include "support/shards.h"

#include <iterator>
#include <limits>

#include "annulus/half.h"

namespace annulus::test {
namespace {

constexpr std::byte kGap{0xA5};

ShardTensor query_tensor(const RingOptions& options, int rank, Layout layout) {
  return {options.dtype,         options.batch,    options.placement.local_tokens(rank),
          options.pattern.heads, options.head_dim, layout};
}

ShardTensor key_tensor(const RingOptions& options, int rank, Layout layout) {
  return {options.dtype,    options.batch,    options.keys().local_tokens(rank),
          options.kv_heads, options.head_dim, layout};
}

}  // namespace

ShardTensor::ShardTensor(DType dtype, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                         std::int64_t dim, Layout layout) {
  const std::int64_t width = dim == 0 ? 1 : dim;
  std::int64_t start = 0;
  std::int64_t head = width;
  std::int64_t token = heads * width;
  std::int64_t entry = tokens * heads * width;
  if (layout == Layout::heads_major) {
    token = width;
    head = tokens * width;
  } else if (layout == Layout::padded) {
    start = 3;
    head = width + 3;
    token = heads * head + 5;
    entry = tokens * token + 7;
  }
  const std::int64_t elements = tokens == 0 ? 0 : start + batch * entry + 9;
  bytes_.assign(static_cast<std::size_t>(elements) * size_of(dtype), kGap);
  void* const data =
      elements == 0 ? nullptr : bytes_.data() + static_cast<std::size_t>(start) * size_of(dtype);
  host_ = data;
  view_ = dim == 0 ? TensorView(data, dtype, {batch, tokens, heads})
                   : TensorView(data, dtype, {batch, tokens, heads, dim});
  view_.stride[0] = entry;
  view_.stride[1] = token;
  view_.stride[2] = head;
  if (dim != 0) view_.stride[3] = 1;
  if (test_device().kind == Device::Kind::cpu) return;
  view_.device = test_device();
  if (elements == 0) return;
  image_ = std::make_unique<DeviceImage>(bytes_);
  view_.data = image_->data() + start * static_cast<std::int64_t>(size_of(dtype));
}

void ShardTensor::upload() const {
  if (image_ != nullptr) image_->upload();
}

void ShardTensor::download() const {
  if (image_ != nullptr) image_->download();
}

TensorView ShardTensor::head_view() const {
  TensorView view = view_;
  view.rank = 1;
  view.shape = {view_.shape[2]};
  view.stride = {view_.stride[2]};
  return view;
}

std::int64_t ShardTensor::index(std::int64_t b, std::int64_t t, std::int64_t h,
                                std::int64_t d) const {
  return b * view_.stride[0] + t * view_.stride[1] + h * view_.stride[2] + d;
}

template <typename Body>
void ShardTensor::for_each_element(const Body& body) const {
  const std::int64_t dim = view_.rank == 4 ? view_.shape[3] : 1;
  for (std::int64_t b = 0; b < view_.shape[0]; ++b) {
    for (std::int64_t t = 0; t < view_.shape[1]; ++t) {
      for (std::int64_t h = 0; h < view_.shape[2]; ++h) {
        for (std::int64_t d = 0; d < dim; ++d) body(index(b, t, h, d));
      }
    }
  }
}

float ShardTensor::get(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const {
  return load_element(host_, view_.dtype, index(b, t, h, d));
}

void ShardTensor::set(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d, float value) {
  store_element(host_, view_.dtype, index(b, t, h, d), value);
}

void ShardTensor::fill(float value) {
  for_each_element([&](std::int64_t i) { store_element(host_, view_.dtype, i, value); });
}

bool ShardTensor::gaps_untouched() const {
  std::vector<bool> used(bytes_.size(), false);
  const std::size_t size = size_of(view_.dtype);
  const auto start =
      host_ == nullptr
          ? 0
          : static_cast<std::size_t>(static_cast<const std::byte*>(host_) - bytes_.data());
  for_each_element([&](std::int64_t i) {
    for (std::size_t byte = 0; byte < size; ++byte) {
      used[start + static_cast<std::size_t>(i) * size + byte] = true;
    }
  });
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    if (!used[i] && bytes_[i] != kGap) return false;
  }
  return true;
}

Shard::Shard(const RingOptions& options, int rank_in, Layout layout)
    : rank(rank_in),
      positions(options.placement.positions(rank)),
      key_positions(options.keys().positions(rank)),
      batch(options.batch),
      tokens(options.placement.tokens()),
      key_tokens(options.keys().tokens()),
      detached(options.mix_gradient == MixGradient::detached),
      q(query_tensor(options, rank, layout)),
      k(key_tensor(options, rank, layout)),
      v(key_tensor(options, rank, layout)),
      o(query_tensor(options, rank, layout)),
      lse(DType::f32, batch, std::ssize(positions), options.pattern.heads, 0, layout),
      dout(query_tensor(options, rank, layout)),
      dq(query_tensor(options, rank, layout)),
      dk(key_tensor(options, rank, layout)),
      dv(key_tensor(options, rank, layout)),
      sinks(DType::f32, 1, 1, options.pattern.heads, 0, layout),
      dsinks(DType::f32, 1, 1, options.pattern.heads, 0, layout) {}

OptionalInputs Shard::more() const {
  OptionalInputs more;
  if (has_sinks) more.sinks = sinks.head_view();
  more.dropout_seed = dropout_seed;
  return more;
}

OptionalGradients Shard::more_gradients() const {
  OptionalGradients more;
  if (has_sinks) more.sinks = dsinks.head_view();
  return more;
}

bool Shard::is_of_keys(const ShardTensor& tensor) const {
  return &tensor == &k || &tensor == &v || &tensor == &dk || &tensor == &dv;
}

// Calls body(index in the global tensor, batch, local token, head, element).
template <typename Body>
void Shard::for_each_element(const ShardTensor& tensor, const Body& body) const {
  const std::int64_t heads = tensor.view().shape[2];
  const std::int64_t dim = tensor.view().rank == 4 ? tensor.view().shape[3] : 1;
  const std::vector<std::int64_t>& local = is_of_keys(tensor) ? key_positions : positions;
  const std::int64_t all = is_of_keys(tensor) ? key_tokens : tokens;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t t = 0; t < std::ssize(local); ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t at = ((b * all + local[static_cast<std::size_t>(t)]) * heads + h) * dim;
        for (std::int64_t d = 0; d < dim; ++d) body(static_cast<std::size_t>(at + d), b, t, h, d);
      }
    }
  }
}

void Shard::load(const Inputs& inputs) {
  const auto copy = [&](const std::vector<double>& from, ShardTensor& to) {
    for_each_element(
        to, [&](std::size_t at, auto... place) { to.set(place..., static_cast<float>(from[at])); });
  };
  copy(inputs.q, q);
  copy(inputs.k, k);
  copy(inputs.v, v);
  copy(inputs.dout, dout);
  has_sinks = !inputs.sinks.empty();
  dropout_seed = inputs.dropout_seed;
  for (std::size_t h = 0; h < inputs.sinks.size(); ++h)
    sinks.set(0, 0, static_cast<std::int64_t>(h), 0, static_cast<float>(inputs.sinks[h]));
  for (ShardTensor* out : {&o, &lse, &dq, &dk, &dv, &dsinks}) {
    out->fill(std::numeric_limits<float>::quiet_NaN());
  }
  loaded_ = {q.bytes(), k.bytes(), v.bytes(), dout.bytes(), sinks.bytes()};
}

void Shard::forward(RingAttention& ring) {
  if (detached && (positions.size() % 2 == 0 || test_device().kind != Device::Kind::cpu)) {
    state = ring.make_branch_state();
  } else if (detached) {  // the same in separate memory, which is all that backward gets
    state_lse_.resize(static_cast<std::size_t>(ring.branch_state_rows()));
    state_o_.resize(state_lse_.size() * static_cast<std::size_t>(ring.options().head_dim) *
                    size_of(ring.options().dtype));
    state = ring.make_branch_state(state_o_, state_lse_, false);
  }
  for (const ShardTensor* tensor : {&q, &k, &v, &o, &lse, &sinks}) tensor->upload();
  ring.forward(q.view(), k.view(), v.view(), o.view(), lse.view(), detached ? &state : nullptr,
               more());
  ring.synchronize();
  for (const ShardTensor* tensor : {&q, &k, &v, &o, &lse}) tensor->download();
}

void Shard::backward(RingAttention& ring) {
  if (!state_o_.empty()) state = ring.make_branch_state(state_o_, state_lse_, true);
  for (const ShardTensor* tensor : {&o, &lse, &dout, &dq, &dk, &dv, &dsinks}) tensor->upload();
  ring.backward(q.view(), k.view(), v.view(), o.view(), lse.view(), dout.view(), dq.view(),
                dk.view(), dv.view(), detached ? &state : nullptr, more(), more_gradients());
  ring.synchronize();
  for (const ShardTensor* tensor : {&q, &k, &v, &dout, &dq, &dk, &dv, &sinks, &dsinks})
    tensor->download();
}

void Shard::enqueue(RingAttention& ring) const {
  ring.forward(q.view(), k.view(), v.view(), o.view(), lse.view());
  ring.backward(q.view(), k.view(), v.view(), o.view(), lse.view(), dout.view(), dq.view(),
                dk.view(), dv.view());
}

void Shard::collect(Results& results) const {
  const auto copy = [&](const ShardTensor& from, std::vector<float>& to) {
    for_each_element(from, [&](std::size_t at, auto... place) { to[at] = from.get(place...); });
  };
  copy(o, results.o);
  copy(lse, results.lse);
  copy(dq, results.dq);
  copy(dk, results.dk);
  copy(dv, results.dv);
  const std::int64_t heads = dsinks.view().shape[2];
  for (std::int64_t h = 0; has_sinks && h < heads; ++h)
    results.dsinks_of_ranks[static_cast<std::size_t>(rank * heads + h)] = dsinks.get(0, 0, h, 0);
}

std::string Shard::damage() const {
  const ShardTensor* const inputs[] = {&q, &k, &v, &dout, &sinks};
  const char* const names[] = {"q", "k", "v", "dout", "sinks"};
  for (std::size_t i = 0; i < 5; ++i) {
    if (inputs[i]->bytes() != loaded_[i]) return std::string(names[i]) + " was changed";
  }
  const ShardTensor* const outputs[] = {&o, &lse, &dq, &dk, &dv, &dsinks};
  for (std::size_t i = 0; i < 6; ++i) {
    if (!outputs[i]->gaps_untouched()) {
      return std::string("bytes between the rows of ") + kResultNames[i] + " were changed";
    }
  }
  return "";
}

}  // namespace annulus::test
