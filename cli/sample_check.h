#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "annulus/ring_attention.h"
#include "cli/tensors.h"

namespace annulus::cli {

// The error of one tensor in the row where it is largest beside what is allowed there.
struct SampledError {
  double found = 0.0;  // relative to the scale of kernels/reference/error.h; lse: absolute
  double allowed = 0.0;

  [[nodiscard]] bool ok() const { return found <= allowed; }
};

struct SampledErrors {
  int rows = 0;  // (batch, token, head) rows of queries, and as many of keys
  // Absent where nothing was computed, or nothing finite: NaN that is due says nothing. dk is also
  // absent with detached mixing, which would need O_b of every query.
  std::optional<SampledError> o, lse, dq, dk, dv;
  int nonfinite_rows = 0;  // of the queries: their o is not finite, as it should be

  // The largest of o, dq, dk and dv; absent if nothing finite was compared.
  [[nodiscard]] std::optional<double> worst() const;
  // Empty if all is right, else which tensors are off by how much.
  [[nodiscard]] std::string complaint() const;
  // Whether every tensor that is off is so by infinity or NaN.
  [[nodiscard]] bool overflowed() const;
};

// Evaluates the definition in fp64 for a few rows spread over the sequence and compares. Inputs are
// what the tensors hold, so that rounding them is no error. o, lse and dq come from the inputs
// alone; dk and dv of a key need all of its queries' o and lse, and take the computed ones.
[[nodiscard]] SampledErrors check_sampled_rows(const RingOptions& options,
                                               const JobTensors& tensors, ThreadPool& pool);

// Which products on the way to the results fp32 cannot hold, by the largest inputs: "do (up to
// 3e19) times v (up to 1e19), 64 of them added". Empty: it can hold all.
[[nodiscard]] std::string overflowing_products(const RingOptions& options,
                                               const JobTensors& tensors);

}  // namespace annulus::cli
