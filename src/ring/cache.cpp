#include <algorithm>
#include <list>
#include <mutex>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "ring/option_text.h"

namespace annulus {

struct RingAttentionCache::Impl {
  Transport* transport;
  std::size_t capacity;
  mutable std::mutex mutex;  // of the list only: executors are built outside
  struct Entry {
    std::string key;
    std::shared_ptr<RingAttention> executor;
  };
  std::list<Entry> entries;  // most recently used first
};

RingAttentionCache::RingAttentionCache(Transport& transport, std::size_t capacity)
    : impl_(std::make_unique<Impl>()) {
  if (capacity < 1) throw ConfigError("RingAttentionCache: capacity is 0, expected at least 1");
  impl_->transport = &transport;
  impl_->capacity = capacity;
}

RingAttentionCache::~RingAttentionCache() = default;

std::shared_ptr<RingAttention> RingAttentionCache::get(const RingOptions& options) {
  const std::string key = ring::options_key(options);
  {
    const std::lock_guard lock(impl_->mutex);
    const auto found = std::find_if(impl_->entries.begin(), impl_->entries.end(),
                                    [&](const Impl::Entry& e) { return e.key == key; });
    if (found != impl_->entries.end()) {
      impl_->entries.splice(impl_->entries.begin(), impl_->entries, found);
      return impl_->entries.front().executor;
    }
  }
  // Memory of the executor to be dropped is freed before the new one asks for its own.
  {
    const std::lock_guard lock(impl_->mutex);
    while (impl_->entries.size() >= impl_->capacity) impl_->entries.pop_back();
  }
  auto executor = std::make_shared<RingAttention>(options, *impl_->transport);
  const std::lock_guard lock(impl_->mutex);
  impl_->entries.push_front({key, executor});
  return executor;
}

void RingAttentionCache::clear_cache() {
  const std::lock_guard lock(impl_->mutex);
  impl_->entries.clear();
}

std::size_t RingAttentionCache::size() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->entries.size();
}

MemoryInfo RingAttentionCache::memory_info() const {
  const std::lock_guard lock(impl_->mutex);
  MemoryInfo sum;
  sum.complexity = "sum over the cached executors";
  sum.cached_workspaces = static_cast<std::int64_t>(impl_->entries.size());
  for (const Impl::Entry& entry : impl_->entries) {
    const MemoryInfo info = entry.executor->memory_info();
    sum.workspace_bytes += info.workspace_bytes;
    sum.communication_bytes += info.communication_bytes;
    sum.state_bytes += info.state_bytes;
    sum.scratch_bytes = std::max(sum.scratch_bytes, info.scratch_bytes);
  }
  return sum;
}

}  // namespace annulus
