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

// A named value of an enumeration. `names_like` lists the names of all values of its argument's
// type, preferred ones first.
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

// A value as users write it.
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

// Parses a value. Returns what was expected ("a whole number from 1 to 4096") if the text is
// invalid, otherwise an empty string.
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

// The factor of q.k: as given, or 1/sqrt(head_dim).
[[nodiscard]] double scale_of(const RingOptions& options);
// A list as text if it is short, otherwise its beginning and a digest.
[[nodiscard]] std::string list_text(std::span<const std::int64_t> values);
// A placement's name and a digest of it.
[[nodiscard]] std::string placement_text(const Placement& placement);

// The options that must be equal on all ranks, as claims.
[[nodiscard]] std::vector<Claim> claims_of(const RingOptions& options);

// The documents as ranks compare them: how many, and a digest.
inline constexpr const char* kDocumentsClaim = "the documents (number and digest)";
inline constexpr const char* kScheduleClaim = "the schedule as chosen (by limits and rates)";
inline constexpr const char* kTravelClaim = "which rows travel in backward";
[[nodiscard]] std::string documents_text(const Pattern& pattern);
// Whether a claim of construction may change with the documents of an executor.
[[nodiscard]] bool depends_on_documents(const Claim& claim);

// A cache key: options with equal keys make equal executors.
[[nodiscard]] std::string options_key(const RingOptions& options);

}  // namespace annulus::ring
