#include "cli/device_tensors.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace annulus::cli {

std::int64_t DeviceTensors::Image::entry_bytes() const {
  return host.shape[0] == 0
             ? 0
             : host.elements() / host.shape[0] * static_cast<std::int64_t>(size_of(host.dtype));
}

std::byte* DeviceTensors::Image::host_entry(std::int64_t batch) const {
  return static_cast<std::byte*>(host.data) +
         batch * host.stride[0] * static_cast<std::int64_t>(size_of(host.dtype));
}

DeviceTensors::DeviceTensors(const RingOptions& options, const JobTensors& host, int rank) {
  std::shared_ptr<Backend> backend = backend_of(options.device, options.threads);
  if (!backend->immediate()) {
    backend_ = std::move(backend);
    queue_ = backend_->make_queue();
  }
  const auto input = [&](const RingTensor& tensor, const char* name) {
    return place(tensor, host.order, rank, name, inputs_);
  };
  const auto result = [&](const RingTensor& tensor, const char* name) {
    return place(tensor, host.order, rank, name, results_);
  };
  q = input(host.q, "q");
  k = input(host.k, "k");
  v = input(host.v, "v");
  o = result(host.o, "o");
  lse = result(host.lse, "lse");
  if (!options.backward) return;
  dout = input(host.dout, "do");
  dq = result(host.dq, "dq");
  dk = result(host.dk, "dk");
  dv = result(host.dv, "dv");
}

TensorView DeviceTensors::place(const RingTensor& tensor, const TokenOrder& order, int rank,
                                const char* name, std::vector<Image>& images) {
  const TensorView shard = tensor.shard(order, rank);
  if (backend_ == nullptr) return shard;
  Image image{shard, {}};
  image.memory = backend_->allocate(shard.shape[0] * image.entry_bytes(), name);
  const auto& n = shard.shape;
  TensorView view = shard.rank == 3
                        ? TensorView(image.memory.data(), shard.dtype, {n[0], n[1], n[2]})
                        : TensorView(image.memory.data(), shard.dtype, {n[0], n[1], n[2], n[3]});
  view.device = backend_->device();
  images.push_back(std::move(image));
  return view;
}

void DeviceTensors::upload() {
  if (backend_ == nullptr) return;
  for (const Image& image : inputs_) {
    const std::int64_t bytes = image.entry_bytes();
    if (bytes == 0) continue;
    for (std::int64_t b = 0; b < image.host.shape[0]; ++b) {
      queue_->copy(image.memory.data() + b * bytes, image.host_entry(b), bytes);
    }
  }
  // All bits set are NaN in every dtype.
  const std::vector<std::byte> poison(std::size_t{1} << 20, std::byte{0xff});
  for (const Image& image : results_) {
    for (std::int64_t at = 0; at < image.memory.bytes(); at += std::ssize(poison)) {
      queue_->copy(image.memory.data() + at, poison.data(),
                   std::min<std::int64_t>(std::ssize(poison), image.memory.bytes() - at));
    }
  }
  queue_->record().wait();
}

void DeviceTensors::download() {
  if (backend_ == nullptr) return;
  for (const Image& image : results_) {
    const std::int64_t bytes = image.entry_bytes();
    if (bytes == 0) continue;
    for (std::int64_t b = 0; b < image.host.shape[0]; ++b) {
      queue_->copy(image.host_entry(b), image.memory.data() + b * bytes, bytes);
    }
  }
  queue_->record().wait();
}

}  // namespace annulus::cli
