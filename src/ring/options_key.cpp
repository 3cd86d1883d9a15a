#include "ring/options_key.h"

#include <cstdint>

namespace annulus::ring {
namespace {

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

}  // namespace

std::string options_key(const RingOptions& options) {
  std::string key;
  append(key, options.pattern.heads);
  append(key, options.pattern.causal);
  append(key, options.pattern.output_scale);
  append(key, options.pattern.branches.size());
  for (const Branch& branch : options.pattern.branches) {
    append(key, branch.segment_length);
    append(key, branch.dilation);
    for (std::int64_t offset : branch.offset) append(key, offset);
  }
  append(key, options.placement.tokens());
  for (int rank = 0; rank < options.placement.ranks(); ++rank) {
    append(key, options.placement.ranges(rank).size());
    for (const RowSet& range : options.placement.ranges(rank)) append(key, range);
  }
  append(key, options.batch);
  append(key, options.kv_heads);
  append(key, options.head_dim);
  append(key, options.dtype);
  append(key, options.scale.has_value());
  append(key, options.scale.value_or(0.0));
  append(key, options.mix_gradient);
  append(key, options.schedule);
  append(key, options.min_tokens_for_ring);
  append(key, options.reproducible);
  append(key, options.backward);
  append(key, options.backward_travel);
  append(key, options.blocking);
  append(key, options.limits.communication_bytes);
  append(key, options.limits.qkv_elements);
  append(key, reinterpret_cast<std::uintptr_t>(options.pool.get()));
  return key;
}

}  // namespace annulus::ring
