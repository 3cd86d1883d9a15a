#include "ring/option_check.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include <fmt/format.h>

#include "annulus/error.h"
#include "ring/option_list.h"
#include "ring/option_text.h"

namespace annulus::ring {
namespace {

// Kernels divide by it in fp32.
constexpr double kLeastSoftcap = 1e-6;
// Of 2^32 numbers a pair keeps its probability with one at least.
constexpr double kMostDropout = 1 - 0x1p-32;

// Whole numbers have their bounds in the list of options.
template <typename Value>
void check(const OptionInfo& info, const Value& value) {
  if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
    if (value >= info.least && value <= info.most) return;
    throw ConfigError(
        info.most == INT64_MAX
            ? fmt::format("{} is {}, expected at least {}", info.name, value, info.least)
            : fmt::format("{} is {}, expected {} to {}", info.name, value, info.least, info.most));
  }
}

}  // namespace

void check_values(const RingOptions& options) {
  options.pattern.validate();
  for_each_option(options, [](const OptionInfo& info, const auto& value) { check(info, value); });
  if (options.pattern.heads % options.kv_heads != 0) {
    throw ConfigError(fmt::format("kv_heads is {}, expected a divisor of the {} query heads",
                                  options.kv_heads, options.pattern.heads));
  }
  if (!(options.rates.flops_per_second > 0) || !(options.rates.bytes_per_second > 0)) {
    throw ConfigError(fmt::format("rates are {} FLOP/s and {} bytes/s, expected more than 0",
                                  options.rates.flops_per_second, options.rates.bytes_per_second));
  }
  if (options.scale.has_value() &&
      !(std::isfinite(static_cast<float>(*options.scale)) && *options.scale > 0)) {
    throw ConfigError(
        fmt::format("scale is {}, expected a number above 0 that fp32 can hold", *options.scale));
  }
  if (!(options.softcap >= 0) || !std::isfinite(static_cast<float>(options.softcap)) ||
      (options.softcap > 0 && options.softcap < kLeastSoftcap)) {
    throw ConfigError(fmt::format("softcap is {}, expected 0 (none) or a number from {} on",
                                  options.softcap, kLeastSoftcap));
  }
  if (!(options.dropout_p >= 0 && options.dropout_p <= kMostDropout)) {
    throw ConfigError(
        fmt::format("dropout_p is {}, expected a number from 0 to less than 1", options.dropout_p));
  }
  if (options.reproducible && options.schedule == Schedule::ring) {
    throw ConfigError(
        "reproducible needs every row's keys in one order: use schedule gather or auto instead of "
        "ring");
  }
}

Computation computation_of(const RingOptions& options, const Backend& backend,
                           std::int64_t query_tokens, std::int64_t key_tokens) {
  Computation computation;
  computation.pattern = &options.pattern;
  computation.query_tokens = query_tokens;
  computation.key_tokens = key_tokens;
  computation.batch = options.batch;
  computation.kv_heads = options.kv_heads;
  computation.head_dim = options.head_dim;
  computation.dtype = options.dtype;
  computation.scale = scale_of(options);
  computation.softcap = options.softcap;
  computation.dropout = DropoutRate::of(options.dropout_p);
  computation.mix_gradient = options.mix_gradient;
  computation.reproducible = options.reproducible;
  computation.deterministic = options.deterministic || options.reproducible;
  computation.backward = options.backward;
  const std::string complaint = backend.complaint(computation);
  if (!complaint.empty()) throw ConfigError(complaint);
  return computation;
}

}  // namespace annulus::ring
