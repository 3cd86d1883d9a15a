#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "annulus/tensor.h"
#include "kernels/backend.h"

namespace annulus::ring {

// Tensors as kernels take them: [batch, tokens, heads, head_dim] or without head_dim, and [heads].

inline TensorRows rows_of(const ConstTensorView& view) {
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  // Kernels use one type for reading and writing. They never write to inputs.
  auto* base = static_cast<std::byte*>(const_cast<void*>(view.data));
  return {base, view.stride[0] * size, view.stride[2] * size, view.stride[1] * size};
}

inline HeadNumbers numbers_of(const std::optional<ConstTensorView>& view) {
  if (!view.has_value()) return {};
  return {static_cast<std::byte*>(const_cast<void*>(view->data)),
          view->stride[0] * static_cast<std::int64_t>(sizeof(float))};
}

}  // namespace annulus::ring
