#include "ring/limits.h"

#include <algorithm>
#include <chrono>

namespace annulus::ring {
namespace {

// Detached mixing keeps the selected rows of every branch.
double kept_rows_per_token(const RingOptions& options) {
  double rows = 0.0;
  for (const Branch& branch : options.pattern.branches) {
    const std::int64_t length =
        std::clamp<std::int64_t>(options.placement.tokens(), 1, branch.segment_length);
    const auto selected = static_cast<double>((length - 1) / branch.dilation + 1);
    for (const std::int64_t offset : branch.offset) {
      if (offset >= 0) rows += selected / static_cast<double>(length);
    }
  }
  return rows;
}

}  // namespace

Limits limits_for_memory(const RingOptions& options, std::int64_t available_bytes,
                         Missing missing) {
  // Queries and keys may differ in their number of rows and of heads. Bytes per query row and
  // element of a head:
  const double keys_per_query =
      static_cast<double>(options.keys().tokens()) /
      static_cast<double>(std::max<std::int64_t>(1, options.placement.tokens()));
  const double q = options.pattern.heads;
  const double kv = 2.0 * options.kv_heads * keys_per_query;
  const auto element = static_cast<double>(size_of(options.dtype));
  const double gradients = options.backward ? q + kv : 0.0;
  const double every_tensor = (2.0 * q + kv) * (options.backward ? 2.0 : 1.0);
  double bytes = 0.0;
  if (missing == Missing::all_tensors) {
    bytes = every_tensor * element;
  } else {
    bytes = (options.backward ? gradients : q) * element;
    for (int rank = 0; rank < options.placement.ranks(); ++rank) {
      if (options.placement.ranges(rank).size() <= 1 && options.keys().ranges(rank).size() <= 1)
        continue;
      bytes += every_tensor * element;  // shards that are not views are copied
      break;
    }
  }
  if (options.dtype != DType::f32) bytes += 4.0 * (options.backward ? gradients : q);
  if (options.backward && options.mix_gradient == MixGradient::detached) {
    bytes += element * kept_rows_per_token(options);
  }
  const double share = static_cast<double>(available_bytes) / options.placement.ranks();
  Limits limits;
  limits.communication_bytes = static_cast<std::int64_t>(0.2 * share);
  limits.qkv_elements = static_cast<std::int64_t>(0.8 * share * (q + kv) / bytes);
  return limits;
}

InProcessOptions patient_ring(const RingOptions& options) {
  constexpr double kLongest = 1e9;  // seconds
  const double flops =
      allowed_pairs(options.pattern, options.placement.tokens(), options.keys().tokens()) * 14.0 *
      static_cast<double>(options.pattern.times_in(options.batch)) * options.head_dim;
  InProcessOptions settings;
  settings.deadline +=
      std::chrono::seconds(static_cast<std::int64_t>(std::min(kLongest, flops / 1e9)));
  return settings;
}

}  // namespace annulus::ring
