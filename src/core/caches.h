#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "annulus/error.h"

namespace annulus {

struct Dropped {
  std::int64_t items = 0;
  std::int64_t bytes = 0;  // of items whose size is known
};

// Idle objects that are kept only for possible reuse.
class Cache {
 public:
  virtual ~Cache() = default;
  // Drops idle items; leaves items in use alone. Callable from any thread.
  virtual Dropped drop() = 0;
};

// drop_caches() includes the cache for as long as it lives.
void register_cache(const std::shared_ptr<Cache>& cache);

// Frees everything idle that this process keeps between calls. Called when memory runs out.
Dropped drop_caches();

// Runs body(). If it runs out of memory, drops all caches and runs it once more.
template <typename Body>
auto with_caches_dropped(const Body& body) {
  try {
    return body();
  } catch (const OutOfMemory&) {
  } catch (const std::bad_alloc&) {
  }
  drop_caches();
  return body();
}

}  // namespace annulus
