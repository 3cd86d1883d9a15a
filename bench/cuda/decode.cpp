// What decode.py calls through ctypes: a cache of one rank on memory that PyTorch owns.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/in_process.h"
#include "annulus/ring_cache.h"

namespace {

using namespace annulus;

struct Cache {
  std::vector<std::unique_ptr<Transport>> transports;
  std::unique_ptr<RingCache> core;
  void* stream = nullptr;
  std::shared_ptr<Queue> queue;  // of the stream

  void use(void* other) {
    if (queue != nullptr && stream == other) return;
    queue = cuda_queue(core->options().device, stream = other);
    core->use_queue(queue);
  }
};

TensorView view(const Cache& cache, void* data, std::int64_t tokens, int heads, bool lse = false) {
  const CacheOptions& o = cache.core->options();
  TensorView out = lse ? TensorView(data, DType::f32, {o.batch, tokens, heads})
                       : TensorView(data, o.dtype, {o.batch, tokens, heads, o.head_dim});
  out.device = o.device;
  return out;
}

template <typename Body>
int guarded(char* message, int size, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), static_cast<std::size_t>(size) - 1);
    return 1;
  }
}

}  // namespace

// dtype: 0 bf16, 1 fp16, 2 fp32.
extern "C" void* engine_make(std::int64_t batch, std::int64_t capacity, int heads, int kv_heads,
                             int dim, int dtype, char* message, int size) {
  auto cache = std::make_unique<Cache>();
  const int failed = guarded(message, size, [&] {
    cache->transports = make_in_process_ring(1);
    CacheOptions options;
    options.batch = batch;
    options.capacity = capacity;
    options.heads = heads;
    options.kv_heads = kv_heads;
    options.head_dim = dim;
    options.dtype = dtype == 0 ? DType::bf16 : dtype == 1 ? DType::f16 : DType::f32;
    options.device = {Device::Kind::cuda, 0};
    cache->core = std::make_unique<RingCache>(options, *cache->transports[0]);
  });
  return failed != 0 ? nullptr : cache.release();
}

extern "C" void engine_drop(void* cache) { delete static_cast<Cache*>(cache); }

extern "C" int engine_append(void* handle, void* k, void* v, std::int64_t tokens, void* stream,
                             char* message, int size) {
  auto& cache = *static_cast<Cache*>(handle);
  return guarded(message, size, [&] {
    const int heads = cache.core->options().kv_heads;
    cache.use(stream);
    cache.core->append(view(cache, k, tokens, heads), view(cache, v, tokens, heads));
  });
}

extern "C" int engine_attend(void* handle, void* q, void* o, void* lse, std::int64_t tokens,
                             void* stream, char* message, int size) {
  auto& cache = *static_cast<Cache*>(handle);
  return guarded(message, size, [&] {
    const int heads = cache.core->options().heads;
    cache.use(stream);
    cache.core->attend(view(cache, q, tokens, heads), view(cache, o, tokens, heads),
                       view(cache, lse, tokens, heads, true));
  });
}
