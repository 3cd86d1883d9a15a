#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>

#include "annulus/tensor.h"

namespace annulus::python {

namespace nb = nanobind;

// What a call needs to know of an array, whatever its framework.
struct Found {
  static constexpr int kMostAxes = 64;  // NumPy's limit
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int axes = 0;
  std::array<std::int64_t, kMostAxes> shape;
  std::array<std::int64_t, kMostAxes> stride;
};

// Plain PyTorch tensors, read directly: __dlpack__ takes 4 us each, and rejects tensors of a device
// that is not current and tensors that require gradients. False: the array is not one, or has a
// special property, so that DLPack must decide.
[[nodiscard]] bool find_torch_tensor(nb::handle array, Found& found);

// The stream on which PyTorch enqueues this thread's work for a device.
[[nodiscard]] std::uintptr_t current_torch_stream(int device);

// In this scope, PyTorch allocates tensors for work on this stream: its caching allocator neither
// hands out memory that work on another stream still uses, nor gives such memory away.
class TorchStreamScope {
 public:
  TorchStreamScope(int device, std::uintptr_t stream);
  ~TorchStreamScope();
  TorchStreamScope(const TorchStreamScope&) = delete;
  TorchStreamScope& operator=(const TorchStreamScope&) = delete;

 private:
  nb::object scope_;  // null: it is already the current one
};

}  // namespace annulus::python
