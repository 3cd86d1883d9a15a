#include "cli/limits.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "cli/console.h"
#include "core/machine.h"
#include "ring/limits.h"

namespace annulus::cli {

ChosenLimits choose_limits(const ProblemFlags& flags, const Shape& shape, DType dtype,
                           bool backward) {
  ChosenLimits chosen;
  std::optional<std::int64_t> available = available_memory_bytes();
  std::string whose = "available memory";
  const Device& device = flags.options.device;
  if (device.kind == Device::Kind::cuda) {
    // Tensors are in both memories, so the smaller one is the limit.
    const std::int64_t free = cuda_device(device.index).free_bytes;
    if (!available || free < *available) {
      available = free;
      whose = "free memory of " + name_of(device);
    }
  }
  chosen.origin = "the library's defaults: the memory of this machine is unknown";
  if (available) {
    // Any placement will do here, and the real one may take long to make.
    RingOptions options{.pattern = pattern_from(flags, shape.heads),
                        .placement = Placement::contiguous(shape.tokens, flags.ranks)};
    options.kv_heads = shape.kv_heads;
    options.dtype = dtype;
    options.backward = backward;
    options.mix_gradient = flags.options.mix_gradient;
    chosen.limits = ring::limits_for_memory(options, *available, ring::Missing::all_tensors);
    chosen.origin = "derived from " + format_bytes(*available) + " of " + whose;
  }
  const bool bytes_given = flags.has("max_communication_bytes");
  const bool elements_given = flags.has("max_qkv_elements");
  if (bytes_given) chosen.limits.communication_bytes = flags.options.limits.communication_bytes;
  if (elements_given) chosen.limits.qkv_elements = flags.options.limits.qkv_elements;
  if (bytes_given && elements_given) {
    chosen.origin = "as given";
  } else if (bytes_given || elements_given) {
    chosen.origin = std::string(elements_given ? "messages " : "elements ") + chosen.origin +
                    ", the other as given";
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
