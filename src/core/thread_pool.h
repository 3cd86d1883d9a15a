#pragma once

#include <cstddef>
#include <cstdint>

#include <memory>
#include <span>

#include "core/function_ref.h"

namespace annulus {

// Runs work in parallel. At most `threads` threads compute at any time, however many callers there
// are: ranks are threads too, and would otherwise oversubscribe the cores. A caller works on its
// own job while a slot is free and sleeps otherwise. A body may block only on indices of its own
// job that have started (see run_parallel).
//
// Own code instead of oneTBB: ThreadSanitizer cannot instrument the packaged libtbb, and slots with
// numbers give every running thread its scratch memory without allocation.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // >= 1; ConfigError otherwise
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const;

  // Calls body(index, slot) once for every index in [0, count), starting them in increasing order,
  // and returns when all have finished. `slot` in [0, threads()) is unique among the bodies that
  // run at the same time in this pool, over all jobs. The first exception of a body is rethrown
  // here; the remaining indices are skipped.
  // An index starts only after all smaller indices of its job have started, so a body may wait for
  // a smaller index (spin, do not sleep long). A body that others wait for must release them even
  // when it throws.
  // A call from inside a body of the same pool runs inline on the same slot, and both share its
  // scratch memory. Does nothing if count <= 0. Allocates nothing.
  void run_parallel(std::int64_t count, FunctionRef<void(std::int64_t index, int slot)> body);

  // kScratchBytes of 64-byte aligned memory that belongs to a slot. Its contents do not survive a
  // body.
  [[nodiscard]] std::span<std::byte> scratch(int slot);
  static constexpr std::size_t kScratchBytes = std::size_t{8} << 20;
  // Guards against typing errors: more would be 32 GiB of address space and thousands of threads.
  static constexpr int kMostThreads = 4096;

  // The default pool: one thread per CPU that this process may use (usable_cpus), or
  // ANNULUS_THREADS.
  [[nodiscard]] static std::shared_ptr<ThreadPool> shared();
  // The process's pool with exactly this number of threads, so that ranks that ask for the same
  // number share it. It ends with its last user. 0: the default pool.
  [[nodiscard]] static std::shared_ptr<ThreadPool> of(int threads);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace annulus
