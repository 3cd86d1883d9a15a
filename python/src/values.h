#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"
#include "annulus/ring_attention.h"
#include "annulus/tensor.h"
#include "flag.h"

// How Python spells options: strings for enumerations, None for the default.
namespace annulus::python {

namespace nb = nanobind;

// Casts to a class of this module. TypeError: "pattern is 'dense': a Pattern was expected". For
// arguments whose errors must also reach the other ranks: nanobind raises its own before the call.
template <typename T>
[[nodiscard]] T& instance_of(nb::handle object, const char* name, const char* expected) {
  T* found = nullptr;
  if (nb::try_cast<T*>(object, found) && found != nullptr) return *found;
  const std::string text =
      std::string(name) + " is " + nb::repr(object).c_str() + ": " + expected + " was expected";
  throw nb::type_error(text.c_str());
}

// Casts to a value; None: none. TypeError: "stream is 'x': a whole number from 0 on was expected".
template <typename T>
[[nodiscard]] std::optional<T> optional_value(nb::handle object, const char* name,
                                              const char* expected) {
  if (object.is_none()) return std::nullopt;
  T found{};
  if (nb::try_cast(object, found)) return found;
  const std::string text =
      std::string(name) + " is " + nb::repr(object).c_str() + ": " + expected + " was expected";
  throw nb::type_error(text.c_str());
}

// The number of a CUDA stream.
[[nodiscard]] inline std::optional<std::uintptr_t> parse_stream(nb::handle stream) {
  return optional_value<std::uintptr_t>(stream, "stream", "a whole number from 0 on");
}

[[nodiscard]] Offsets parse_offsets(const std::string& name);
[[nodiscard]] Schedule parse_schedule(const std::string& name);
[[nodiscard]] Travel parse_travel(const std::string& name);
[[nodiscard]] MixGradient parse_mix_gradient(const std::string& name);
[[nodiscard]] BackwardTravel parse_backward_travel(const std::string& name);
// "float32", "fp32", numpy.float32, numpy.dtype("float32"), torch.float32, ...
[[nodiscard]] DType parse_dtype(nb::handle dtype);
[[nodiscard]] const char* python_name_of(DType dtype) noexcept;  // "float32"
// None or a pair (before, after). Pattern::validate checks the numbers.
[[nodiscard]] Window parse_window(nb::handle window);
[[nodiscard]] nb::object object_of(const Window& window);  // None: no window
[[nodiscard]] Pattern windowed(Pattern pattern, nb::handle window);
// The arguments that make documents, each None, a number, or a sequence, array or tensor. Those of
// single batch entries are a sequence of these; see Pattern.with_documents.
struct DocumentArguments {
  nb::handle cu_seqlens;
  nb::handle cu_seqlens_k;
  nb::handle query_start;
  nb::handle seqused_k;
  nb::handle leftpad_k;
};
struct SequenceLengths {
  std::int64_t queries = 0;
  std::int64_t keys = 0;
};
// The pattern with these documents. If the lengths are known: ConfigError where documents exceed
// them, or where it is not known at which keys the queries are.
[[nodiscard]] Pattern with_documents(Pattern pattern, const DocumentArguments& arguments,
                                     const std::optional<SequenceLengths>& lengths);

// None, a name or a Pattern, with the arguments that go with a name.
[[nodiscard]] Pattern parse_pattern(nb::handle pattern, int heads,
                                    const std::optional<std::vector<std::int64_t>>& segments,
                                    const std::optional<std::vector<std::int64_t>>& dilations,
                                    bool causal, nb::handle window, const std::string& offsets,
                                    bool group_scale);

[[nodiscard]] Pattern make_longnet(int heads, const std::vector<std::int64_t>& segments,
                                   const std::vector<std::int64_t>& dilations, Flag causal,
                                   const std::string& offsets, Flag group_scale, nb::handle window);

}  // namespace annulus::python
