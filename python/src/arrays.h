#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/tensor.h"

namespace annulus::python {

namespace nb = nanobind;

// The arrays of one call, borrowed from Python without a copy: anything on the CPU that speaks
// DLPack, the buffer protocol or __array_interface__. Tensors that require gradients are read
// detached. What is wrong with an array becomes a complaint instead of an exception, because a
// ring's other ranks have to hear of it, too: its view has no axes then, which every check refuses.
class Arrays {
 public:
  // `axes` is 4, or 3 for a log-sum-exp.
  [[nodiscard]] ConstTensorView input(nb::handle array, const char* name, int axes = 4);
  // Refuses what cannot be written to, and what overlaps arrays passed before: results would
  // overwrite them.
  [[nodiscard]] TensorView output(nb::handle array, const char* name, int axes = 4);

  // All elements of a contiguous float32 array of any shape, to be written to.
  // Of a contiguous array of this dtype, for writing.
  [[nodiscard]] std::span<std::byte> bytes(nb::handle array, const char* name, DType dtype);

  // The first thing that is wrong: "q is float64, expected float32, ...". Empty: nothing.
  [[nodiscard]] const std::string& complaint() const { return complaint_; }
  // Throws it as a ConfigError that begins with `where`.
  void check(const char* where) const;

 private:
  template <typename Array>
  [[nodiscard]] TensorView import(nb::handle array, const char* name, int axes,
                                  std::vector<Array>& held);
  void complain(const std::string& text);

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
// to; for the others (JAX) memory of ours is handed over when it is full.
class Result {
 public:
  // `given`: an array of the caller's, or None.
  Result(nb::object given, nb::handle like, const ConstTensorView& shape_of, DType dtype, int axes);

  [[nodiscard]] nb::handle writable() const { return writable_; }
  [[nodiscard]] nb::object finish() const;

 private:
  nb::object writable_;
  nb::object convert_;  // null: the writable array is the result
};

}  // namespace annulus::python
