#include "annulus/tensor.h"

#include <algorithm>

#include "annulus/error.h"

namespace annulus {

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "fp32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "fp16";
  }
  return "invalid dtype";
}

DType dtype_from_name(const std::string& name) {
  // The long names are those of PyTorch, NumPy and DLPack.
  if (name == "fp32" || name == "float32") return DType::f32;
  if (name == "bf16" || name == "bfloat16") return DType::bf16;
  if (name == "fp16" || name == "float16") return DType::f16;
  throw ConfigError("dtype_from_name: found '" + name +
                    "', expected fp32, bf16 or fp16 (or float32, bfloat16, float16)");
}

std::string shape_string(const ConstTensorView& view) {
  std::string text = "[";
  const int axes = std::min(view.rank, static_cast<int>(view.shape.size()));
  for (int axis = 0; axis < axes; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(view.shape[static_cast<std::size_t>(axis)]);
  }
  if (view.rank > axes) text += ", ...: " + std::to_string(view.rank) + " axes";
  return text + "]";
}

}  // namespace annulus
