#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "ring/agreement.h"
#include "ring/option_list.h"

namespace annulus::ring {

// A value that has a name, and the names of all values of its type in the order of preference. The
// argument says the type.
template <typename T>
struct Name {
  const char* text;
  T value;
};
[[nodiscard]] std::span<const Name<DType>> names_like(DType);
[[nodiscard]] std::span<const Name<MixGradient>> names_like(MixGradient);
[[nodiscard]] std::span<const Name<Schedule>> names_like(Schedule);
[[nodiscard]] std::span<const Name<BackwardTravel>> names_like(BackwardTravel);

template <typename T>
concept Named = requires(T value) {
  names_like(value);
};

// A value as people write it.
[[nodiscard]] std::string text_of(std::int64_t value);
[[nodiscard]] std::string text_of(int value);
[[nodiscard]] std::string text_of(bool value);
[[nodiscard]] std::string text_of(double value);
[[nodiscard]] std::string text_of(const std::optional<double>& value);
[[nodiscard]] std::string text_of(const Device& value);
template <Named T>
[[nodiscard]] std::string text_of(T value) {
  for (const Name<T>& name : names_like(value)) {
    if (name.value == value) return name.text;
  }
  return "";
}

// The value that a text stands for. Returns what was expected instead ("a whole number from 1 to
// 4096"), or nothing if all is well.
[[nodiscard]] std::string read_text(const OptionInfo& info, const std::string& text,
                                    std::int64_t& value);
[[nodiscard]] std::string read_text(const OptionInfo& info, const std::string& text, int& value);
[[nodiscard]] std::string read_text(const OptionInfo& info, const std::string& text, double& value);
[[nodiscard]] std::string read_text(const OptionInfo& info, const std::string& text,
                                    std::optional<double>& value);
[[nodiscard]] std::string read_text(const OptionInfo& info, const std::string& text, Device& value);
template <Named T>
[[nodiscard]] std::string read_text(const OptionInfo& /*info*/, const std::string& text, T& value) {
  std::string expected;
  for (const Name<T>& name : names_like(value)) {
    if (text == name.text) {
      value = name.value;
      return "";
    }
    expected += std::string(expected.empty() ? "one of '" : ", '") + name.text + "'";
  }
  return expected;
}

// Of q.k: as given, or 1/sqrt(head_dim).
[[nodiscard]] double scale_of(const RingOptions& options);

// What the ranks must agree on before they can compute together, except what they choose for
// themselves.
[[nodiscard]] std::vector<Claim> claims_of(const RingOptions& options);

// Everything that makes two executors differ: equal keys mean equal executors.
[[nodiscard]] std::string options_key(const RingOptions& options);

}  // namespace annulus::ring
