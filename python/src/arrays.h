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
// that speaks DLPack, on the CPU also the buffer protocol or __array_interface__. Tensors that
// require gradients are read detached. What is wrong with an array becomes a complaint instead of
// an exception, because a ring's other ranks have to hear of it, too: its view has no axes then,
// which every check refuses.
class Arrays {
 public:
  // `device`: where all of them have to be; none: where the first one is. `stream`: the caller's,
  // on which work with CUDA arrays is to be enqueued.
  explicit Arrays(std::optional<Device> device = std::nullopt,
                  std::optional<std::uintptr_t> stream = std::nullopt)
      : device_(device), stream_(stream), is_given_(stream.has_value()) {}

  // `axes` is 4, or 3 for a log-sum-exp.
  [[nodiscard]] ConstTensorView input(nb::handle array, const char* name, int axes = 4);
  // Refuses what cannot be written to, and what overlaps arrays passed before: results would
  // overwrite them.
  [[nodiscard]] TensorView output(nb::handle array, const char* name, int axes = 4);

  // All bytes of a contiguous array of any shape, of this dtype on this device, for writing.
  [[nodiscard]] std::span<std::byte> bytes(nb::handle array, const char* name, DType dtype,
                                           const Device& device);

  // Where work with CUDA arrays is enqueued: on the caller's stream; without one, on PyTorch's
  // current one if the first array is a tensor of its; else on the default stream, after which
  // those arrays have been ordered by DLPack. None: there are no CUDA arrays.
  [[nodiscard]] std::optional<std::uintptr_t> stream() const {
    return on_cuda_ ? stream_ : std::nullopt;
  }
  // It is a stream that the caller has named, and may destroy once its work is done: nobody holds
  // it after the call.
  [[nodiscard]] bool is_given() const { return is_given_ && on_cuda_; }
  // Nobody else knows of that stream: the call has to wait for it.
  [[nodiscard]] bool waits() const { return waits_; }

  // The first thing that is wrong: "q is float64, expected float32, ...". Empty: nothing.
  [[nodiscard]] const std::string& complaint() const { return complaint_; }
  // Throws it as a ConfigError that begins with `where`.
  void check(const char* where) const;

 private:
  template <typename Array>
  [[nodiscard]] TensorView import(nb::handle array, const char* name, int axes,
                                  std::vector<Array>& held);
  // By DLPack and its relatives. False: there is a complaint.
  template <typename Array>
  [[nodiscard]] bool find(nb::handle array, const char* name, std::vector<Array>& held,
                          Found& found);
  void complain(const std::string& text);

  std::optional<Device> device_;
  const char* first_ = nullptr;  // the name of the array that said so
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

// A result in the framework of the array `like`. Most frameworks give memory that can be written
// to; for the others (JAX) memory of ours is handed over when it is full. On CUDA devices PyTorch
// alone is asked for memory: ConfigError for the others.
class Result {
 public:
  // `given`: an array of the caller's, or None. `stream`: on which it will be written, for memory
  // of CUDA devices.
  Result(nb::object given, nb::handle like, const ConstTensorView& shape_of, DType dtype, int axes,
         std::optional<std::uintptr_t> stream);

  [[nodiscard]] nb::handle writable() const { return writable_; }
  [[nodiscard]] nb::object finish() const;

 private:
  nb::object writable_;
  nb::object convert_;  // null: the writable array is the result
};

}  // namespace annulus::python
