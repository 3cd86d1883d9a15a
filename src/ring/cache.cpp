#include <algorithm>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "core/lease_pool.h"
#include "ring/option_text.h"

namespace annulus {

struct RingAttentionCache::Impl {
  Impl(Transport& link, std::size_t capacity) : transport(&link), pool(capacity) {}
  Transport* transport;
  LeasePool<std::shared_ptr<RingAttention>> pool;  // may be in use: callers share the executors
};

RingAttentionCache::RingAttentionCache(Transport& transport, std::size_t capacity) {
  if (capacity < 1) throw ConfigError("RingAttentionCache: capacity is 0, expected at least 1");
  impl_ = std::make_unique<Impl>(transport, capacity);
}

RingAttentionCache::~RingAttentionCache() = default;

std::shared_ptr<RingAttention> RingAttentionCache::get(const RingOptions& options) {
  const std::string key = ring::options_key(options);
  auto kept = impl_->pool.take(key);
  // Ranks drop executors by their own memory, so some may lack one that others have.
  constexpr std::uint16_t kMissing = 1;
  {
    const Transport::Use use(*impl_->transport, "RingAttentionCache::get");
    const ring::Claim claim{ring::kTheCall, "asking a cache for an executor"};
    if (ring::agree(*impl_->transport, "RingAttentionCache::get", {}, std::span(&claim, 1),
                    kept.has_value() ? 0 : kMissing) == kMissing)
      kept.reset();
  }
  if (kept.has_value()) {
    (*kept)->set_documents(options.pattern.documents);  // a caller may have set others
  } else {
    impl_->pool.make_room();
    kept = std::make_shared<RingAttention>(options, *impl_->transport);
  }
  // Returned at once but still held by the caller: the next caller on this rank shares the
  // executor.
  const MemoryInfo info = (*kept)->memory_info();
  impl_->pool.give_back(key, *kept, info.workspace_bytes, info.device);
  return *kept;
}

void RingAttentionCache::clear_cache() { impl_->pool.clear(); }

std::size_t RingAttentionCache::size() const { return impl_->pool.size(); }

MemoryInfo RingAttentionCache::memory_info() const {
  MemoryInfo sum;
  sum.complexity = "sum over the cached executors";
  impl_->pool.for_each([&](const std::shared_ptr<RingAttention>& executor) {
    const MemoryInfo info = executor->memory_info();
    ++sum.cached_workspaces;
    sum.device = info.device;
    sum.workspace_bytes += info.workspace_bytes;
    sum.communication_bytes += info.communication_bytes;
    sum.state_bytes += info.state_bytes;
    sum.scratch_bytes = std::max(sum.scratch_bytes, info.scratch_bytes);
  });
  return sum;
}

}  // namespace annulus
