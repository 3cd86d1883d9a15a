#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/tensor.h"
#include "torch_tensors.h"

namespace annulus::python {

namespace nb = nanobind;

// The arrays of one call, borrowed from Python without a copy: anything on the CPU or a CUDA device
// that supports DLPack; on the CPU also the buffer protocol and __array_interface__. Tensors that
// require gradients are read as if detached. A wrong array makes a complaint instead of an
// exception, because the ring's other ranks must be told, too. Its view has no axes, which every
// check rejects.
class Arrays {
 public:
  // `device`: where all arrays must be; none: where the first one is. `stream`: the caller's
  // stream, on which work with CUDA arrays will be enqueued.
  explicit Arrays(std::optional<Device> device = std::nullopt,
                  std::optional<std::uintptr_t> stream = std::nullopt)
      : device_(device), stream_(stream), is_given_(stream.has_value()) {}

  // `axes` is 4, or 3 for a log-sum-exp.
  [[nodiscard]] ConstTensorView input(nb::handle array, const char* name, int axes = 4);
  // Rejects arrays that are read-only, and those that overlap arrays passed before: results would
  // overwrite them.
  [[nodiscard]] TensorView output(nb::handle array, const char* name, int axes = 4);

  // All bytes of a contiguous array of any shape with this dtype on this device, for writing.
  [[nodiscard]] std::span<std::byte> bytes(nb::handle array, const char* name, DType dtype,
                                           const Device& device);

  // Where to enqueue work with CUDA arrays: on the caller's stream; without one, on PyTorch's
  // current stream if the first array is a PyTorch tensor, else on the default stream, behind which
  // DLPack has ordered these arrays. None: there are no CUDA arrays.
  [[nodiscard]] std::optional<std::uintptr_t> stream() const {
    return on_cuda_ ? stream_ : std::nullopt;
  }
  // The caller has named the stream and may destroy it when its work is done, so nothing may refer
  // to it after the call.
  [[nodiscard]] bool is_given() const { return is_given_ && on_cuda_; }
  // No caller knows the stream, so the call has to wait for its work.
  [[nodiscard]] bool waits() const { return waits_; }

  // The first problem: "q is float64, expected float32, ...". Empty: none.
  [[nodiscard]] const std::string& complaint() const { return complaint_; }
  // Throws it as a ConfigError that begins with `where`.
  void check(const char* where) const;

 private:
  template <typename Array>
  [[nodiscard]] TensorView import(nb::handle array, const char* name, int axes,
                                  std::vector<Array>& held);
  // By DLPack or one of the other protocols. False: there is a complaint.
  template <typename Array>
  [[nodiscard]] bool find(nb::handle array, const char* name, std::vector<Array>& held,
                          Found& found);
  void complain(const std::string& text);

  std::optional<Device> device_;
  const char* first_ = nullptr;  // the name of the array that determined the device
  std::optional<std::uintptr_t> stream_;
  bool is_given_;
  bool on_cuda_ = false;
  bool waits_ = false;
  std::vector<nb::object> tensors_;  // PyTorch's
  std::vector<nb::ndarray<nb::ro>> inputs_;
  std::vector<nb::ndarray<>> outputs_;
  struct Seen {
    ConstTensorView view;
    const char* name;
  };
  std::vector<Seen> seen_;
  std::string complaint_;
};

// A result in the framework of the array `like`. Most frameworks provide writable memory; the
// others (JAX) take over memory that was allocated here, once it is filled. On CUDA devices only
// PyTorch is asked for memory; for other frameworks it is a ConfigError.
class Result {
 public:
  // `given`: the caller's array, or None. `stream`: the stream that will write to it (CUDA
  // devices).
  Result(nb::object given, nb::handle like, const ConstTensorView& shape_of, DType dtype, int axes,
         std::optional<std::uintptr_t> stream);

  [[nodiscard]] nb::handle writable() const { return writable_; }
  [[nodiscard]] nb::object finish() const;

 private:
  nb::object writable_;
  nb::object convert_;  // null: the writable array is the result
};

}  // namespace annulus::python
