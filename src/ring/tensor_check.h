#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "annulus/ring_attention.h"
#include "annulus/tensor.h"
#include "kernels/dropout.h"

namespace annulus::ring {

// What a call is given besides tensors; see OptionalInputs.
struct CallValues {
  std::optional<DropoutSeed> dropout;
  bool seed_of_rank_0 = false;
  std::string_view claims;
};

struct ForwardTensors {
  ConstTensorView q, k, v;
  TensorView o, lse;
  std::optional<ConstTensorView> sinks;
  CallValues values;
};

struct BackwardTensors {
  ConstTensorView q, k, v, o, lse, dout;
  TensorView dq, dk, dv;
  std::optional<ConstTensorView> sinks;
  std::optional<TensorView> dsinks;
  CallValues values;
  bool adds_dsinks = false;  // to their present values
};

// Tensors of `axes` axes, contiguous along the fourth one. A message about another shape explains
// the expected one by `why` or by the placement, which gives its number of tokens. Calls allocate
// nothing for a right tensor: messages are formatted only for wrong ones.
struct ExpectedTensor {
  int axes = 4;
  std::array<std::int64_t, 4> shape{};
  DType dtype = DType::f32;
  Device device;
  std::string_view why;
  const Placement* placement = nullptr;
};
[[nodiscard]] std::string complaint_about(const char* name, const ConstTensorView& view,
                                          const ExpectedTensor& expected);
// Elements of a result must not share memory, or threads would overwrite each other's. Detects
// strides of 0, as in expanded views, not every overlap.
[[nodiscard]] std::string check_distinct(const char* name, const ConstTensorView& view);

struct NamedTensor {
  std::string_view name;
  ConstTensorView view;
};
// Results must not overlap inputs, which are still read while results are written.
[[nodiscard]] std::string check_apart(std::span<const NamedTensor> results,
                                      std::span<const NamedTensor> read);

// What is wrong with this rank's tensors; empty: nothing.
[[nodiscard]] std::string complaint_about(const ForwardTensors& tensors, const RingOptions& options,
                                          int rank);
[[nodiscard]] std::string complaint_about(const BackwardTensors& tensors,
                                          const RingOptions& options, int rank);

}  // namespace annulus::ring
