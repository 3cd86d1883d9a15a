// What bench/peer/versus_pytorch.py calls through ctypes: the library on memory that PyTorch owns,
// so that both sides work on identical tensors in one process and their runs can alternate.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "core/thread_pool.h"
#include "kernels/cpu/kernel.h"

namespace {

using namespace annulus;

struct Bench {
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::unique_ptr<RingAttention>> ranks;
};

thread_local std::string last_error;

// Runs body(rank) on every rank and returns the seconds from first start to last end.
template <typename Body>
double timed(Bench& bench, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  if (bench.ranks.size() == 1) {  // as a caller with one rank does: no thread is started
    body(0);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  run_in_process(bench.transports, [&](Transport& transport) { body(transport.rank()); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The shard of `rank` of a dense [batch, tokens, heads, dim] array: contiguous placement, so a
// view.
TensorView shard(const RingAttention& ring, int rank, void* data, int heads, bool lse) {
  const RingOptions& o = ring.options();
  const std::int64_t tokens = o.placement.tokens();
  const std::int64_t first = o.placement.local_tokens(rank) > 0 ? o.placement.position(rank, 0) : 0;
  const std::int64_t width = lse ? 1 : o.head_dim;
  const DType dtype = lse ? DType::f32 : o.dtype;
  auto* base = static_cast<std::byte*>(data) +
               first * heads * width * static_cast<std::int64_t>(size_of(dtype));
  TensorView view(base, dtype, {o.batch, o.placement.local_tokens(rank), heads, width});
  view.stride[0] = tokens * heads * width;
  if (lse) {
    view.rank = 3;
    view.shape[3] = 0;
  }
  return view;
}

}  // namespace

extern "C" {

const char* annulus_bench_error() { return last_error.c_str(); }

// pattern: branches of (segment, dilation); none: dense. dtype: 0 fp32, 1 bf16, 2 fp16. Returns
// null on an error.
void* annulus_bench_open(std::int64_t batch, std::int64_t tokens, int heads, int kv_heads,
                         int head_dim, int dtype, int causal, int branches,
                         const std::int64_t* segments, const std::int64_t* dilations, int ranks,
                         int threads, int schedule, int reproducible, int backward) try {
  const Pattern pattern =
      branches == 0 ? dense(heads, causal != 0)
                    : longnet(heads, {segments, static_cast<std::size_t>(branches)},
                              {dilations, static_cast<std::size_t>(branches)}, causal != 0);
  RingOptions options{pattern, Placement::contiguous(tokens, ranks)};
  options.batch = batch;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  options.dtype = static_cast<DType>(dtype);
  options.schedule = static_cast<Schedule>(schedule);
  options.reproducible = reproducible != 0;
  options.backward = backward != 0;
  options.limits.qkv_elements = INT64_MAX;
  options.limits.communication_bytes = INT64_MAX;
  auto bench = std::make_unique<Bench>();
  options.threads = threads;
  bench->transports = make_in_process_ring(ranks);
  bench->ranks.resize(static_cast<std::size_t>(ranks));
  timed(*bench, [&](int r) {
    const auto i = static_cast<std::size_t>(r);
    bench->ranks[i] = std::make_unique<RingAttention>(options, *bench->transports[i]);
  });
  return bench.release();
} catch (const std::exception& error) {
  last_error = error.what();
  return nullptr;
}

void annulus_bench_close(void* handle) { delete static_cast<Bench*>(handle); }

double annulus_bench_forward(void* handle, void* q, void* k, void* v, void* o, void* lse) {
  Bench& bench = *static_cast<Bench*>(handle);
  return timed(bench, [&](int r) {
    RingAttention& ring = *bench.ranks[static_cast<std::size_t>(r)];
    const int h = ring.options().pattern.heads;
    const int kv = ring.options().kv_heads;
    ring.forward(shard(ring, r, q, h, false), shard(ring, r, k, kv, false),
                 shard(ring, r, v, kv, false), shard(ring, r, o, h, false),
                 shard(ring, r, lse, h, true));
  });
}

double annulus_bench_backward(void* handle, void* q, void* k, void* v, void* o, void* lse,
                              void* dout, void* dq, void* dk, void* dv) {
  Bench& bench = *static_cast<Bench*>(handle);
  return timed(bench, [&](int r) {
    RingAttention& ring = *bench.ranks[static_cast<std::size_t>(r)];
    const int h = ring.options().pattern.heads;
    const int kv = ring.options().kv_heads;
    ring.backward(
        shard(ring, r, q, h, false), shard(ring, r, k, kv, false), shard(ring, r, v, kv, false),
        shard(ring, r, o, h, false), shard(ring, r, lse, h, true), shard(ring, r, dout, h, false),
        shard(ring, r, dq, h, false), shard(ring, r, dk, kv, false), shard(ring, r, dv, kv, false));
  });
}

double annulus_bench_peak_gflops(int bf16) { return cpu::measure_fma_peak_gflops(bf16 != 0); }
const char* annulus_bench_isa() { return cpu::chosen_kernels().name; }

}  // extern "C"
