#include "ring/option_text.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace annulus::ring {

std::span<const Name<DType>> names_like(DType) {
  static constexpr Name<DType> kNames[] = {
      {"fp32", DType::f32}, {"bf16", DType::bf16}, {"fp16", DType::f16}};
  return kNames;
}

std::span<const Name<MixGradient>> names_like(MixGradient) {
  static constexpr Name<MixGradient> kNames[] = {{"full", MixGradient::full},
                                                 {"detached", MixGradient::detached}};
  return kNames;
}

std::span<const Name<Schedule>> names_like(Schedule) {
  static constexpr Name<Schedule> kNames[] = {
      {"auto", Schedule::automatic}, {"ring", Schedule::ring}, {"gather", Schedule::gather}};
  return kNames;
}

std::span<const Name<BackwardTravel>> names_like(BackwardTravel) {
  static constexpr Name<BackwardTravel> kNames[] = {{"auto", BackwardTravel::automatic},
                                                    {"keys", BackwardTravel::keys},
                                                    {"queries", BackwardTravel::queries}};
  return kNames;
}

std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(int value) { return std::to_string(value); }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(double value) { return fmt::format("{}", value); }
std::string text_of(const std::optional<double>& value) {
  return value.has_value() ? text_of(*value) : "default";
}
std::string text_of(const Device& value) { return name_of(value); }

std::string read_text(const OptionInfo& info, const std::string& text, std::int64_t& value) {
  std::string expected = fmt::format("a whole number from {} to {}", info.least, info.most);
  const char* const end = text.data() + text.size();
  std::int64_t read = 0;
  const auto [stop, problem] = std::from_chars(text.data(), end, read);
  if (problem != std::errc()) return expected;
  // 128k is 131,072. Byte counts may have a unit: 2GiB, 2G.
  std::string unit(stop, end);
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (unit.ends_with("ib")) unit.erase(unit.size() - 2);
  if (unit.ends_with("b")) unit.pop_back();
  constexpr std::string_view kUnits = "kmgt";
  const std::size_t power = unit.empty() ? 0 : kUnits.find(unit) + 1;
  if (unit.size() > 1 || (power == 0 && !unit.empty())) return expected;
  const std::int64_t factor = std::int64_t{1} << (10 * power);
  if (read < info.least / factor || read > info.most / factor) return expected;
  read *= factor;
  if (read < info.least || read > info.most) return expected;
  value = read;
  return "";
}

std::string read_text(const OptionInfo& info, const std::string& text, int& value) {
  std::int64_t wide = 0;
  OptionInfo narrow = info;
  narrow.most = std::min<std::int64_t>(info.most, std::numeric_limits<int>::max());
  std::string expected = read_text(narrow, text, wide);
  if (expected.empty()) value = static_cast<int>(wide);
  return expected;
}

std::string read_text(const OptionInfo& /*info*/, const std::string& text, double& value) {
  const char* const end = text.data() + text.size();
  double read = 0.0;
  const auto [stop, problem] = std::from_chars(text.data(), end, read);
  if (problem != std::errc() || stop != end) return "a number";
  value = read;
  return "";
}

std::string read_text(const OptionInfo& info, const std::string& text,
                      std::optional<double>& value) {
  double read = 0.0;
  std::string expected = read_text(info, text, read);
  if (expected.empty()) value = read;
  return expected;
}

std::string read_text(const OptionInfo& /*info*/, const std::string& text, Device& value) {
  constexpr std::string_view kCuda = "cuda";
  if (text == "cpu") {
    value = {};
    return "";
  }
  int index = 0;
  if (text.starts_with("cuda:")) {
    const char* const end = text.data() + text.size();
    const auto [stop, problem] = std::from_chars(text.data() + kCuda.size() + 1, end, index);
    if (problem != std::errc() || stop != end || index < 0) index = -1;
  } else if (text != kCuda) {
    index = -1;
  }
  if (index < 0) return "'cpu', 'cuda' or 'cuda:1'";
  value = {Device::Kind::cuda, index};
  return "";
}

namespace {

// Appends the bytes of a value to a cache key.
template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

std::string bytes_of(const std::vector<Document>& documents) {
  std::string key;
  append(key, documents.size());
  for (const Document& document : documents) append(key, document);
  return key;
}

std::string bytes_of(const std::vector<Branch>& branches) {
  std::string key;
  append(key, branches.size());
  for (const Branch& branch : branches) {
    append(key, branch.segment_length);
    append(key, branch.dilation);
    for (const std::int64_t offset : branch.offset) append(key, offset);
  }
  return key;
}

std::string bytes_of(const Pattern& pattern) {
  std::string key;
  append(key, pattern.heads);
  append(key, pattern.causal);
  append(key, pattern.window);
  append(key, pattern.output_scale);
  key += bytes_of(pattern.documents);
  key += bytes_of(pattern.branches);
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

template <typename Value>
std::string list_text(const std::vector<Branch>& branches, const Value& value) {
  std::vector<std::int64_t> values;
  for (const Branch& branch : branches) values.push_back(value(branch));
  return ring::list_text(values);
}

}  // namespace

std::string list_text(std::span<const std::int64_t> values) {
  const std::string text = fmt::format("{}", fmt::join(values, ","));
  constexpr std::size_t kReadable = 40;
  return text.size() <= kReadable ? text : text.substr(0, 20) + "... " + digest_text(text);
}

std::string placement_text(const Placement& placement) {
  return fmt::format("{} {}", placement.name().substr(0, 20), digest_text(bytes_of(placement)));
}

std::string documents_text(const Pattern& pattern) {
  return fmt::format("{} {}", pattern.documents.size(), digest_text(bytes_of(pattern.documents)));
}

bool depends_on_documents(const Claim& claim) {
  return claim.name == kDocumentsClaim || claim.name == kScheduleClaim ||
         claim.name == kTravelClaim;
}

double scale_of(const RingOptions& options) {
  return options.scale.value_or(1.0 / std::sqrt(static_cast<double>(options.head_dim)));
}

std::vector<Claim> claims_of(const RingOptions& options) {
  std::vector<Claim> claims;
  for_each_option(options, [&](const OptionInfo& info, const auto& value) {
    if (info.shared == Shared::same) claims.push_back({info.name, text_of(value)});
  });
  // An explicit value that equals the default is equal to the default.
  for (Claim& claim : claims) {
    if (claim.name == "scale") claim.value = text_of(scale_of(options));
  }
  const Pattern& pattern = options.pattern;
  claims.push_back({"the pattern's heads", text_of(pattern.heads)});
  claims.push_back({"whether the pattern is causal", text_of(pattern.causal)});
  claims.push_back({"the pattern's window",
                    fmt::format("({}, {})", pattern.window.before, pattern.window.after)});
  claims.push_back({kDocumentsClaim, documents_text(pattern)});
  claims.push_back({"the pattern's number of branches", std::to_string(pattern.branches.size())});
  claims.push_back(
      {"the pattern's segment lengths",
       list_text(pattern.branches, [](const Branch& branch) { return branch.segment_length; })});
  claims.push_back(
      {"the pattern's dilations",
       list_text(pattern.branches, [](const Branch& branch) { return branch.dilation; })});
  claims.push_back({"the pattern's output_scale", text_of(pattern.output_scale)});
  claims.push_back({"the pattern's offsets (digest)", digest_text(bytes_of(pattern.branches))});
  claims.push_back({"the placement's tokens", text_of(options.placement.tokens())});
  claims.push_back({"the placement", placement_text(options.placement)});
  claims.push_back({"the keys' tokens", text_of(options.keys().tokens())});
  claims.push_back({"the keys' placement", placement_text(options.keys())});
  return claims;
}

std::string options_key(const RingOptions& options) {
  std::string key = bytes_of(options.pattern) + bytes_of(options.placement);
  if (options.key_placement) key += "keys" + bytes_of(*options.key_placement);
  for_each_option(options, [&](const OptionInfo&, const auto& value) {
    key += '|';
    key += text_of(value);
  });
  return key;
}

}  // namespace annulus::ring
