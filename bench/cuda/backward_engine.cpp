// What backward_engine.py calls through ctypes: whole passes of one rank on memory that PyTorch
// owns, so that two builds of the library and its peers take turns in one process.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"

namespace {

using namespace annulus;

struct Engine {
  std::vector<std::unique_ptr<Transport>> transports;
  std::unique_ptr<RingAttention> ring;
};

TensorView view(const Engine& engine, void* data, int heads, bool lse = false) {
  const RingOptions& o = engine.ring->options();
  const std::int64_t tokens = o.placement.tokens();
  TensorView out = lse ? TensorView(data, DType::f32, {o.batch, tokens, heads})
                       : TensorView(data, o.dtype, {o.batch, tokens, heads, o.head_dim});
  out.device = o.device;
  return out;
}

int failed(const std::exception& error, char* message, int size) {
  std::strncpy(message, error.what(), static_cast<std::size_t>(size) - 1);
  return 1;
}

}  // namespace

extern "C" void* engine_make(int longnet_branches, int causal, int interleaved, int heads,
                             int kv_heads, std::int64_t batch, std::int64_t tokens, int dim,
                             int dtype, int deterministic, char* message, int size) {
  try {
    auto engine = std::make_unique<Engine>();
    engine->transports = make_in_process_ring(1);
    RingOptions options{{}, Placement::contiguous(tokens, 1)};
    std::vector<std::int64_t> segments;
    std::vector<std::int64_t> dilations;
    for (int i = 0; i < longnet_branches; ++i) {
      segments.push_back(std::int64_t{2048} << i);
      dilations.push_back(std::int64_t{1} << i);
    }
    options.pattern = longnet_branches == 0
                          ? dense(heads, causal != 0)
                          : longnet(heads, segments, dilations, causal != 0,
                                    interleaved != 0 ? Offsets::interleaved : Offsets::blocked);
    options.batch = batch;
    options.kv_heads = kv_heads;
    options.head_dim = dim;
    options.dtype = dtype == 0 ? DType::bf16 : DType::f16;
    options.deterministic = deterministic != 0;
    options.limits = {std::int64_t{1} << 40, std::int64_t{1} << 40};
    options.device = {Device::Kind::cuda, 0};
    engine->ring = std::make_unique<RingAttention>(options, *engine->transports[0]);
    return engine.release();
  } catch (const std::exception& error) {
    failed(error, message, size);
    return nullptr;
  }
}

extern "C" void engine_drop(void* engine) { delete static_cast<Engine*>(engine); }

extern "C" void engine_kernels(void* engine, char* text, int size) {
  std::strncpy(text, static_cast<Engine*>(engine)->ring->kernels().c_str(),
               static_cast<std::size_t>(size) - 1);
}

// q k v o lse [do dq dk dv]: forward without the last four.
extern "C" int engine_run(void* handle, void* const* data, int backward, void* stream,
                          char* message, int size) {
  try {
    Engine& engine = *static_cast<Engine*>(handle);
    const RingOptions& o = engine.ring->options();
    const int heads = o.pattern.heads;
    engine.ring->use_queue(cuda_queue(o.device, stream));
    const TensorView q = view(engine, data[0], heads);
    const TensorView k = view(engine, data[1], o.kv_heads);
    const TensorView v = view(engine, data[2], o.kv_heads);
    const TensorView out = view(engine, data[3], heads);
    const TensorView lse = view(engine, data[4], heads, true);
    if (backward == 0) {
      engine.ring->forward(q, k, v, out, lse);
    } else {
      engine.ring->backward(q, k, v, out, lse, view(engine, data[5], heads),
                            view(engine, data[6], heads), view(engine, data[7], o.kv_heads),
                            view(engine, data[8], o.kv_heads));
    }
    return 0;
  } catch (const std::exception& error) {
    return failed(error, message, size);
  }
}
