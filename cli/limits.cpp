#include "cli/limits.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "annulus/error.h"
#include "cli/console.h"
#include "core/machine.h"

namespace annulus::cli {

ChosenLimits choose_limits(const ProblemFlags& flags, const Shape& shape, DType dtype,
                           bool backward) {
  ChosenLimits chosen;
  const std::optional<std::int64_t> available = available_memory_bytes();
  chosen.origin = "the library's defaults: the memory of this machine is unknown";
  if (available) {
    // Every rank lives in this process and gets its share. A fifth of it may be messages; the rest
    // are tensors, their fp32 accumulators where the dtype is narrower, and what detached mixing
    // keeps per branch. Rows of queries and of keys count alike only if there are as many heads.
    const double q = shape.heads;
    const double kv = 2.0 * shape.kv_heads;
    const auto element = static_cast<double>(size_of(dtype));
    const double passes = backward ? 2.0 : 1.0;
    double bytes = passes * (2.0 * q + kv) * element;  // q, k, v, o and their gradients
    if (dtype != DType::f32) bytes += 4.0 * (backward ? q + kv : q);
    if (backward && flags.mix_gradient == "detached") {
      const std::size_t branches = pattern_from(flags, shape.heads).branches.size();
      bytes += 4.0 * q * static_cast<double>(branches);
    }
    const double share = static_cast<double>(*available) / flags.ranks;
    chosen.limits.communication_bytes = static_cast<std::int64_t>(0.2 * share);
    chosen.limits.qkv_elements = static_cast<std::int64_t>(0.8 * share * (q + kv) / bytes);
    chosen.origin = "derived from " + format_bytes(*available) + " of available memory";
  }
  if (flags.max_communication_bytes) {
    chosen.limits.communication_bytes = *flags.max_communication_bytes;
  }
  if (flags.max_qkv_elements) chosen.limits.qkv_elements = *flags.max_qkv_elements;
  if (flags.max_communication_bytes && flags.max_qkv_elements) {
    chosen.origin = "as given";
  } else if (flags.max_communication_bytes || flags.max_qkv_elements) {
    chosen.origin = std::string(flags.max_qkv_elements ? "messages " : "elements ") +
                    chosen.origin + ", the other as given";
  }

  // The executor counts the rows of its shard exactly.
  const std::int64_t longest = (shape.tokens - 1) / flags.ranks + 1;
  const double elements = static_cast<double>(shape.batch) * static_cast<double>(longest) *
                          (shape.heads + 2.0 * shape.kv_heads) * shape.head_dim;
  if (elements > static_cast<double>(chosen.limits.qkv_elements)) {
    throw ConfigError(fmt::format(
        "q, k and v of one rank have {:.4g} elements, at most {:.4g} are allowed ({}): choose a "
        "shorter sequence, fewer heads or a 16-bit --dtype, or raise --max-qkv-elements",
        elements, static_cast<double>(chosen.limits.qkv_elements), chosen.origin));
  }
  return chosen;
}

}  // namespace annulus::cli
