#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>

#include "annulus/tensor.h"

namespace annulus::python {

namespace nb = nanobind;

// What an array is, whatever it has come from.
struct Found {
  static constexpr int kMostAxes = 64;  // NumPy's limit
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int axes = 0;
  std::array<std::int64_t, kMostAxes> shape;
  std::array<std::int64_t, kMostAxes> stride;
};

// PyTorch's plain tensors, asked themselves: __dlpack__ takes 4 us each, refuses those of a device
// that is not the current one and those that require gradients. False: it is none of them, or one
// that has something special about it, of which DLPack knows more.
[[nodiscard]] bool find_torch_tensor(nb::handle array, Found& found);

// The stream on which PyTorch enqueues this thread's work for a device.
[[nodiscard]] std::uintptr_t current_torch_stream(int device);

// PyTorch makes tensors for work on this stream until the end of the scope: their memory was not
// given back by work that is still under way on another one, and is not given out to such.
class TorchStreamScope {
 public:
  TorchStreamScope(int device, std::uintptr_t stream);
  ~TorchStreamScope();
  TorchStreamScope(const TorchStreamScope&) = delete;
  TorchStreamScope& operator=(const TorchStreamScope&) = delete;

 private:
  nb::object scope_;  // null: it is the current one
};

}  // namespace annulus::python
