#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "annulus/ring_attention.h"
#include "cli/tensors.h"

namespace annulus::cli {

// The error of one tensor in the row where it is largest relative to its limit.
struct SampledError {
  double found = 0.0;  // relative to the scale of kernels/reference/error.h; lse: absolute
  double allowed = 0.0;

  [[nodiscard]] bool ok() const { return found <= allowed; }
};

struct SampledErrors {
  int rows = 0;  // number of checked (batch, token, head) rows of queries, and of keys
  // Absent if not computed, or if no finite value was expected. dk is also absent with detached
  // mixing, which would need O_b of every query.
  std::optional<SampledError> o, lse, dq, dk, dv;
  int nonfinite_rows = 0;  // of the queries; o is NaN there, as expected

  // The largest of o, dq, dk and dv; absent if nothing finite was compared.
  [[nodiscard]] std::optional<double> worst() const;
  // Which tensors are wrong by how much; empty if none is.
  [[nodiscard]] std::string complaint() const;
  // Whether all wrong tensors are wrong by infinity or NaN.
  [[nodiscard]] bool overflowed() const;
};

// Evaluates the definition in fp64 for a few rows spread over the sequence (reference/rows.h) and
// compares. It starts from the inputs as stored, so their rounding is no error. dk and dv of a key
// need o and lse of all queries that see it, and use the computed ones.
[[nodiscard]] SampledErrors check_sampled_rows(const RingOptions& options,
                                               const JobTensors& tensors, ThreadPool& pool);

// Which products of the largest inputs overflow fp32, such as "do (up to 3e19) times v (up to
// 1e19), 64 of them added". Empty if none does.
[[nodiscard]] std::string overflowing_products(const RingOptions& options,
                                               const JobTensors& tensors);

}  // namespace annulus::cli
