#pragma once

#include <optional>
#include <string>

#include "annulus/ring_attention.h"
#include "annulus/tensor.h"

namespace annulus::ring {

struct ForwardTensors {
  ConstTensorView q, k, v;
  TensorView o, lse;
  std::optional<ConstTensorView> sinks;
};

struct BackwardTensors {
  ConstTensorView q, k, v, o, lse, dout;
  TensorView dq, dk, dv;
  std::optional<ConstTensorView> sinks;
  std::optional<TensorView> dsinks;
  bool adds_dsinks = false;  // to their present values
};

// What is wrong with this rank's tensors; empty: nothing.
[[nodiscard]] std::string complaint_about(const ForwardTensors& tensors, const RingOptions& options,
                                          int rank);
[[nodiscard]] std::string complaint_about(const BackwardTensors& tensors,
                                          const RingOptions& options, int rank);

}  // namespace annulus::ring
