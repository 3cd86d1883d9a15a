#pragma once

#include <cmath>

#include "kernels/backend.h"

// Merges a sink into a row, as in kernels/cpu/sink.h.
namespace annulus::cuda {

struct WithSink {
  float lse;   // L' = log(exp(L) + exp(sink))
  float kept;  // exp(L - L'), the factor of O; 0 for a row without keys
};

// -inf: none.
__device__ __forceinline__ float sink_of(const HeadNumbers& sinks, int head) {
  if (sinks.base == nullptr) return -INFINITY;
  return __ldg(reinterpret_cast<const float*>(sinks.base + head * sinks.step));
}

// Branch-free, so that live registers are not moved. A sink of -inf changes no bit. NaN or +inf
// makes every row NaN, even without keys.
__device__ __forceinline__ WithSink with_sink(float lse, float sink) {
  const float above = sink - lse;
  const float less = expf(-fabsf(above));  // the smaller of the two over the larger
  const bool none = sink == -INFINITY;
  const bool empty = lse == -INFINITY;
  WithSink row;
  row.lse = fmaxf(lse, sink) + log1pf(less);
  row.kept = __fdividef(above > 0 ? less : 1.0F, 1.0F + less);
  if (!(sink < INFINITY) || isnan(lse)) row.lse = row.kept = NAN;
  if (empty && sink < INFINITY) {
    row.lse = sink;
    row.kept = 0;
  }
  if (none) {
    row.lse = lse;
    row.kept = empty ? 0.0F : 1.0F;
  }
  return row;
}

}  // namespace annulus::cuda
