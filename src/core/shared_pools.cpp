#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#endif

#include "annulus/error.h"
#include "core/machine.h"
#include "core/thread_pool.h"

// The pools that the executors of one process share.
namespace annulus {
namespace {

std::shared_ptr<ThreadPool> make_shared_pool() {
  const char* const setting = std::getenv("ANNULUS_THREADS");
  if (setting == nullptr || *setting == '\0') {  // empty is unset, as for ANNULUS_ISA
    return std::make_shared<ThreadPool>(std::min(usable_cpus(), ThreadPool::kMostThreads));
  }
  const std::string_view text(setting);
  int threads = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), threads);
  if (problem != std::errc{} || end != text.data() + text.size() || threads < 1 ||
      threads > ThreadPool::kMostThreads) {
    throw ConfigError("ThreadPool: environment variable ANNULUS_THREADS is '" + std::string(text) +
                      "', expected a whole number from 1 to " +
                      std::to_string(ThreadPool::kMostThreads) + ": correct or unset it");
  }
  return std::make_shared<ThreadPool>(threads);
}

struct SharedPool {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
  std::map<int, std::weak_ptr<ThreadPool>> sized;
};
SharedPool& shared_pool() {
  static SharedPool state;
  return state;
}

// Threads do not survive fork(). The child forgets the pool without destroying it, because the
// destructor would wait for threads that do not exist, and makes a new one when it needs it.
void forget_after_fork() {
#if defined(__linux__)
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { shared_pool().mutex.lock(); }, [] { shared_pool().mutex.unlock(); },
                   [] {
                     new std::shared_ptr<ThreadPool>(std::move(shared_pool().pool));
                     for (auto& [threads, pool] : shared_pool().sized)
                       new std::shared_ptr<ThreadPool>(pool.lock());
                     shared_pool().sized.clear();
                     shared_pool().mutex.unlock();
                   });
  });
#endif
}

}  // namespace

std::shared_ptr<ThreadPool> ThreadPool::shared() {
  SharedPool& state = shared_pool();
  const std::lock_guard lock(state.mutex);
  if (state.pool == nullptr) {
    state.pool = make_shared_pool();
    forget_after_fork();
  }
  return state.pool;
}

std::shared_ptr<ThreadPool> ThreadPool::of(int threads) {
  if (threads == 0) return shared();
  SharedPool& state = shared_pool();
  const std::lock_guard lock(state.mutex);
  std::shared_ptr<ThreadPool> pool = state.sized[threads].lock();
  if (pool == nullptr) {
    pool = std::make_shared<ThreadPool>(threads);
    state.sized[threads] = pool;
    forget_after_fork();
  }
  return pool;
}

}  // namespace annulus
