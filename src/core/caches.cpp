#include "core/caches.h"

#include <mutex>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace annulus {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Cache>> caches;

  Registry() {
#if defined(__linux__)
    // A forked child must not use pools inherited from its parent: their threads do not exist in
    // the child, and a thread of the parent may have held a pool's lock at the fork.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     new std::vector<std::weak_ptr<Cache>>(std::move(registry().caches));
                     registry().caches.clear();
                     registry().mutex.unlock();
                   });
#endif
  }

  // Never destroyed: pools in other files may outlive this one.
  static Registry& registry() {
    static auto* const state = new Registry;
    return *state;
  }
};

}  // namespace

void register_cache(const std::shared_ptr<Cache>& cache) {
  Registry& state = Registry::registry();
  const std::lock_guard lock(state.mutex);
  std::erase_if(state.caches, [](const std::weak_ptr<Cache>& entry) { return entry.expired(); });
  state.caches.push_back(cache);
}

Dropped drop_caches() {
  std::vector<std::shared_ptr<Cache>> caches;
  {
    Registry& state = Registry::registry();
    const std::lock_guard lock(state.mutex);
    for (const std::weak_ptr<Cache>& entry : state.caches) {
      if (std::shared_ptr<Cache> cache = entry.lock()) caches.push_back(std::move(cache));
    }
  }
  Dropped sum;
  for (const std::shared_ptr<Cache>& cache : caches) {  // unlocked: destroying items may take time
    const Dropped dropped = cache->drop();
    sum.items += dropped.items;
    sum.bytes += dropped.bytes;
  }
  return sum;
}

}  // namespace annulus
