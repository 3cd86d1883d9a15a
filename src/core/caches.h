#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "annulus/error.h"

namespace annulus {

struct Dropped {
  std::int64_t items = 0;
  std::int64_t bytes = 0;  // as far as they are known
};

// What is kept only because it may be used again.
class Cache {
 public:
  virtual ~Cache() = default;
  // From any thread; what is in use is not touched.
  virtual Dropped drop() = 0;
};

// For as long as it lives, drop_caches() reaches it.
void register_cache(const std::shared_ptr<Cache>& cache);

// Everything idle that this process keeps between calls, when memory has run out.
Dropped drop_caches();

// body(), and once more without caches if it runs out of memory.
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
