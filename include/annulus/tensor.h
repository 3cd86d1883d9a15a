#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "annulus/device.h"

namespace annulus {

enum class DType : std::uint8_t { f32, bf16, f16 };

[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  return dtype == DType::f32 ? 4 : 2;
}
[[nodiscard]] const char* name_of(DType dtype) noexcept;       // "fp32", "bf16", "fp16"
[[nodiscard]] DType dtype_from_name(const std::string& name);  // ConfigError on anything else

// A borrowed strided array of up to four axes; strides count elements. Annulus uses
// [batch, tokens, heads, head_dim] for q, k, v, o and their gradients (last axis contiguous) and
// [batch, tokens, heads] fp32 for the log-sum-exp. `Void` is `void` or `const void`.
template <typename Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int rank = 0;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> stride{};

  BasicTensorView() = default;

  // A dense row-major view.
  BasicTensorView(Void* data_in, DType dtype_in, std::initializer_list<std::int64_t> shape_in)
      : data(data_in), dtype(dtype_in), rank(static_cast<int>(shape_in.size())) {
    int axis = 0;
    for (std::int64_t extent : shape_in) shape[static_cast<std::size_t>(axis++)] = extent;
    std::int64_t step = 1;
    for (axis = rank - 1; axis >= 0; --axis) {
      stride[static_cast<std::size_t>(axis)] = step;
      step *= shape[static_cast<std::size_t>(axis)];
    }
  }

  // Writable views convert to read-only ones.
  operator BasicTensorView<const void>() const {  // NOLINT(google-explicit-constructor)
    BasicTensorView<const void> view;
    view.data = data;
    view.dtype = dtype;
    view.device = device;
    view.rank = rank;
    view.shape = shape;
    view.stride = stride;
    return view;
  }

  [[nodiscard]] std::int64_t elements() const {
    std::int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= shape[static_cast<std::size_t>(axis)];
    return count;
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// Whether two views have elements in common. Exact for views of one packed array, which interleave;
// otherwise by where they begin and end.
[[nodiscard]] bool share_memory(const ConstTensorView& a, const ConstTensorView& b);

[[nodiscard]] std::string shape_string(const ConstTensorView& view);  // "[1, 4096, 16, 128]"

}  // namespace annulus
