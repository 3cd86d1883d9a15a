#pragma once

#include <cstddef>
#include <cstdint>

#include <memory>
#include <span>

#include "core/function_ref.h"

namespace annulus {

// The one place where work becomes threads. At most `threads` threads compute at any time, however
// many callers there are: ranks are threads too, and would otherwise oversubscribe the cores. A
// caller works on its own job while a slot is free and sleeps otherwise. Bodies must not block on
// anything but what has begun of their own job (see run_parallel).
//
// Own code instead of oneTBB: ThreadSanitizer cannot see through the packaged, uninstrumented
// libtbb; and slots with ids give every running thread its scratch without allocation.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // >= 1; ConfigError otherwise
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const;

  // Calls body(index, slot) once for every index in [0, count), in increasing order of start, and
  // returns when all are done. `slot` in [0, threads()) is unique among the calls running at one
  // time in this pool, over all jobs. The first exception of a body is thrown here after the job's
  // remaining indices were skipped. An index starts only after all smaller ones of the job have
  // started, so a body may wait for a smaller index (spinning, not sleeping long); one that others
  // wait for has to let them go on even when it throws. Called from inside a body of this pool, it
  // runs inline on the same slot, whose scratch the two bodies then share. A count of 0 or less
  // does nothing. Allocates nothing.
  void run_parallel(std::int64_t count, FunctionRef<void(std::int64_t index, int slot)> body);

  // kScratchBytes of 64-byte aligned memory that belongs to a slot: contents do not survive a body.
  [[nodiscard]] std::span<std::byte> scratch(int slot);
  static constexpr std::size_t kScratchBytes = std::size_t{8} << 20;
  // A typing error should not become 32 GiB of address space and a fork bomb.
  static constexpr int kMostThreads = 4096;

  // The pool shared by everything that is not told otherwise: one thread per CPU that this process
  // may use (usable_cpus), or ANNULUS_THREADS.
  [[nodiscard]] static std::shared_ptr<ThreadPool> shared();
  // The process's pool of exactly this many threads, for as long as somebody has it: ranks that ask
  // for the same number share it. 0: the shared one.
  [[nodiscard]] static std::shared_ptr<ThreadPool> of(int threads);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace annulus
