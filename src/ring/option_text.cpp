#include "ring/option_text.h"

#include <cmath>
#include <cstdint>
#include <optional>

#include <fmt/format.h>

#include "ring/option_list.h"

namespace annulus::ring {
namespace {

std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(int value) { return std::to_string(value); }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(double value) { return fmt::format("{}", value); }
std::string text_of(const std::optional<double>& value) {
  return value.has_value() ? text_of(*value) : "default";
}
std::string text_of(DType value) { return name_of(value); }
std::string text_of(Schedule value) { return name_of(value); }
std::string text_of(const Device& value) { return name_of(value); }
std::string text_of(MixGradient value) { return value == MixGradient::full ? "full" : "detached"; }
std::string text_of(BackwardTravel value) {
  return value == BackwardTravel::automatic ? "auto"
         : value == BackwardTravel::keys    ? name_of(Travel::keys)
                                            : name_of(Travel::queries);
}

// Bytes of a value, for keys that nobody reads.
template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

std::string bytes_of(const Pattern& pattern) {
  std::string key;
  append(key, pattern.heads);
  append(key, pattern.causal);
  append(key, pattern.output_scale);
  append(key, pattern.branches.size());
  for (const Branch& branch : pattern.branches) {
    append(key, branch.segment_length);
    append(key, branch.dilation);
    for (const std::int64_t offset : branch.offset) append(key, offset);
  }
  return key;
}

std::string bytes_of(const Placement& placement) {
  std::string key;
  append(key, placement.tokens());
  append(key, placement.ranks());
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    append(key, placement.ranges(rank).size());
    for (const RowSet& range : placement.ranges(rank)) append(key, range);
  }
  return key;
}

std::string digest_text(const std::string& bytes) {
  const Claim claim{"", bytes};
  return fmt::format("{:016x}", digest_of(std::span(&claim, 1)));
}

// Lists are short enough to be read, or else told apart by a digest.
template <typename Value>
std::string list_text(const std::vector<Branch>& branches, const Value& value) {
  std::string text;
  for (const Branch& branch : branches)
    text += (text.empty() ? "" : ",") + std::to_string(value(branch));
  constexpr std::size_t kReadable = 40;
  return text.size() <= kReadable ? text : text.substr(0, 20) + "... " + digest_text(text);
}

}  // namespace

double scale_of(const RingOptions& options) {
  return options.scale.value_or(1.0 / std::sqrt(static_cast<double>(options.head_dim)));
}

std::vector<Claim> claims_of(const RingOptions& options) {
  std::vector<Claim> claims;
  for_each_option(options, [&](const OptionInfo& info, const auto& value) {
    if (info.agreed) claims.push_back({info.name, text_of(value)});
  });
  // A default that is spelled out is the same value.
  for (Claim& claim : claims) {
    if (claim.name == "scale") claim.value = text_of(scale_of(options));
  }
  const Pattern& pattern = options.pattern;
  claims.push_back({"the pattern's heads", text_of(pattern.heads)});
  claims.push_back({"whether the pattern is causal", text_of(pattern.causal)});
  claims.push_back({"the pattern's number of branches", std::to_string(pattern.branches.size())});
  claims.push_back(
      {"the pattern's segment lengths",
       list_text(pattern.branches, [](const Branch& branch) { return branch.segment_length; })});
  claims.push_back(
      {"the pattern's dilations",
       list_text(pattern.branches, [](const Branch& branch) { return branch.dilation; })});
  claims.push_back({"the pattern's output_scale", text_of(pattern.output_scale)});
  claims.push_back({"the pattern's offsets (digest)", digest_text(bytes_of(pattern))});
  claims.push_back({"the placement's tokens", text_of(options.placement.tokens())});
  claims.push_back({"the placement", fmt::format("{} {}", options.placement.name().substr(0, 20),
                                                 digest_text(bytes_of(options.placement)))});
  return claims;
}

std::string options_key(const RingOptions& options) {
  std::string key = bytes_of(options.pattern) + bytes_of(options.placement);
  for_each_option(options, [&](const OptionInfo&, const auto& value) {
    key += '|';
    key += text_of(value);
  });
  return key;
}

}  // namespace annulus::ring
