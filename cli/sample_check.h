#pragma once

#include <cstdint>
#include <optional>

#include "annulus/ring_attention.h"
#include "cli/tensors.h"

namespace annulus::cli {

// Relative RMS errors over the sampled rows, except for lse: its largest absolute error.
struct SampledErrors {
  int rows = 0;  // (batch, token, head) rows of queries, and as many of keys
  double o = 0.0;
  double lse = 0.0;
  std::optional<double> dq, dv;
  std::optional<double> dk;    // not with detached mixing, which would need O_b of every query
  double largest_score = 0.0;  // |scale * q.k|: rounding errors grow with it

  [[nodiscard]] double worst() const;  // of o, dq, dk and dv
  // What they should stay below. Absent for scores so large, or infinite, that correct results of
  // this dtype may be off by any amount.
  [[nodiscard]] static std::optional<double> tolerance(DType dtype, double largest_score);
};

// Evaluates the definition in fp64 for a few rows spread over the sequence and compares. Inputs are
// what the tensors hold, so that rounding them is no error. o, lse and dq come from the inputs
// alone; dk and dv of a key need all of its queries' o and lse, and take the computed ones.
[[nodiscard]] SampledErrors check_sampled_rows(const RingOptions& options,
                                               const JobTensors& tensors, ThreadPool& pool);

}  // namespace annulus::cli
