#include "core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#endif

#include "annulus/error.h"
#include "core/machine.h"

namespace annulus {
namespace {

// Callers compete for slot 0. Workers own slots 1 to threads - 1 permanently.
constexpr int kCallerSlot = 0;

// Waking a sleeping thread takes 5-50 us, as long as a short job. Two jobs of one forward call are
// a few us apart, so a short spin nearly always catches the next one. A longer spin would only take
// cores from other ranks.
constexpr std::chrono::microseconds kSpinTime{20};

// Slots start on huge page boundaries, so that no page is shared and first touch places each one
// near its thread.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
static_assert(ThreadPool::kScratchBytes % kHugePage == 0);

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as ready() is; false after kSpinTime.
template <typename Ready>
bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 8; ++i) {
      if (ready()) return true;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// The slots that this thread holds, innermost first. A chain, because a body of pool A may use pool
// B whose body uses pool A again: that call must find A's slot instead of waiting for one.
struct HeldSlot {
  HeldSlot(const void* held_pool, int held_slot)
      : pool(held_pool), slot(held_slot), outer(innermost) {
    innermost = this;
  }
  ~HeldSlot() { innermost = outer; }
  HeldSlot(const HeldSlot&) = delete;
  HeldSlot& operator=(const HeldSlot&) = delete;

  [[nodiscard]] static const HeldSlot* find(const void* pool) {
    const HeldSlot* held = innermost;
    while (held != nullptr && held->pool != pool) held = held->outer;
    return held;
  }

  const void* const pool;
  const int slot;
  const HeldSlot* const outer;
  static thread_local const HeldSlot* innermost;
};
thread_local const HeldSlot* HeldSlot::innermost = nullptr;

// One run_parallel in progress. It lives on the caller's stack. Workers may touch it only while
// they are counted in `active` or hold the pool's mutex. The caller leaves only after it has seen,
// under that mutex, that `active` is 0.
struct Job {
  Job(std::int64_t job_count, FunctionRef<void(std::int64_t, int)> job_body)
      : count(job_count), body(job_body) {}

  [[nodiscard]] bool has_indices() const {
    return next_index.load(std::memory_order_relaxed) < count;
  }

  const std::int64_t count;
  FunctionRef<void(std::int64_t, int)> body;
  std::atomic<std::int64_t> next_index{0};  // may exceed count by one per thread

  // Guarded by State::mutex. `active` is atomic only so that the caller can spin on it.
  std::atomic<int> active{0};  // workers between taking this job and leaving it
  bool queued = false;
  bool wants_slot = false;    // the caller sleeps until it gets slot 0
  bool slot_granted = false;  // slot 0 was handed to the sleeping caller
  std::exception_ptr error;
  std::condition_variable caller_wake;
  Job* previous = nullptr;
  Job* next = nullptr;
};

struct FreeScratch {
  void operator()(std::byte* memory) const {
    ::operator delete (memory, std::align_val_t{kHugePage});
  }
};

std::unique_ptr<std::byte, FreeScratch> allocate_scratch(int threads) {
  const std::size_t bytes = static_cast<std::size_t>(threads) * ThreadPool::kScratchBytes;
  try {
    std::unique_ptr<std::byte, FreeScratch> memory(
        static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kHugePage})));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // A hint: 8 MiB in 4 KiB pages would need 2,048 TLB entries. Kernels without huge pages refuse
    // it, which is fine.
    (void)madvise(memory.get(), bytes, MADV_HUGEPAGE);
#endif
    return memory;
  } catch (const std::bad_alloc&) {
    throw DeviceError("ThreadPool: cannot allocate " + std::to_string(bytes) +
                      " bytes of scratch for " + std::to_string(threads) +
                      " threads: use fewer threads (ANNULUS_THREADS)");
  }
}

}  // namespace

// One mutex guards the list of jobs, slot 0 and the sleepers. It is taken a few times per job and
// thread, never per index, and never while a body runs.
struct ThreadPool::State {
  explicit State(int thread_count)
      : threads(thread_count),
        spins(thread_count <= usable_cpus()),
        scratch(allocate_scratch(thread_count)) {}

  void work(int slot);
  void run(std::int64_t count, FunctionRef<void(std::int64_t, int)> body);
  void stop();

  void run_indices(Job& job, int slot);

  // These require the mutex.
  void keep_workers_off_this_cpu();
  void enqueue(Job& job);
  void dequeue(Job& job);
  [[nodiscard]] Job* oldest_job_with_indices() const;
  void release_caller_slot();

  const int threads;
  const bool spins;  // with more threads than cores, spinning would take cores from workers
  const std::unique_ptr<std::byte, FreeScratch> scratch;
  std::vector<std::thread> workers;
#if defined(__linux__)
  cpu_set_t allowed_cpus{};  // CPU mask of the thread that made the pool
  int avoided_cpu = -1;      // guarded by mutex
#endif

  std::mutex mutex;
  std::condition_variable worker_wake;
  Job* first_job =
      nullptr;  // oldest first; exhausted jobs may stay until one of their threads removes them
  Job* last_job = nullptr;
  std::int64_t sleeping = 0;  // workers in worker_wake
  bool stopping = false;
  // Written under the mutex; spinning threads read them without it.
  std::atomic<bool> caller_slot_taken{false};
  std::atomic<std::uint64_t> submissions{0};
};

void ThreadPool::State::enqueue(Job& job) {
  job.queued = true;
  job.previous = last_job;
  (last_job != nullptr ? last_job->next : first_job) = &job;
  last_job = &job;
  submissions.fetch_add(1, std::memory_order_relaxed);
}

void ThreadPool::State::dequeue(Job& job) {
  if (!job.queued) return;
  job.queued = false;
  (job.previous != nullptr ? job.previous->next : first_job) = job.next;
  (job.next != nullptr ? job.next->previous : last_job) = job.previous;
}

Job* ThreadPool::State::oldest_job_with_indices() const {
  Job* job = first_job;
  while (job != nullptr && !job->has_indices()) job = job->next;
  return job;
}

// Hands slot 0 directly to the oldest caller that can still use it. If it were merely freed, new
// callers could take it again and again while that caller wakes up.
void ThreadPool::State::release_caller_slot() {
  for (Job* job = first_job; job != nullptr; job = job->next) {
    if (job->wants_slot && job->has_indices()) {
      job->wants_slot = false;
      job->slot_granted = true;
      job->caller_wake.notify_one();
      return;
    }
  }
  caller_slot_taken.store(false, std::memory_order_relaxed);
}

// Relaxed is enough for the counter: it only hands out numbers. The job itself was published by the
// mutex, and results are published by the mutex when this thread leaves the job.
void ThreadPool::State::run_indices(Job& job, int slot) {
  for (;;) {
    const std::int64_t index = job.next_index.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.count) return;
    try {
      job.body(index, slot);
    } catch (...) {
      job.next_index.store(job.count, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      if (!job.error) job.error = std::current_exception();
    }
  }
}

void ThreadPool::State::work(int slot) {
  const HeldSlot held(this, slot);
  std::unique_lock lock(mutex);
  for (;;) {
    if (Job* const job = oldest_job_with_indices()) {
      // No older job can gain indices, so staying with this one until it is exhausted preserves
      // FIFO order.
      job->active.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      run_indices(*job, slot);
      lock.lock();
      dequeue(*job);
      if (job->active.fetch_sub(1, std::memory_order_relaxed) == 1) job->caller_wake.notify_one();
      continue;
    }
    if (stopping) return;
    if (spins) {
      // Spins on the number of submissions, not on the list: the list may hold exhausted jobs for
      // as long as their last bodies run.
      const std::uint64_t seen = submissions.load(std::memory_order_relaxed);
      lock.unlock();
      const bool submitted =
          spin_until([&] { return submissions.load(std::memory_order_relaxed) != seen; });
      lock.lock();
      if (submitted) continue;
    }
    ++sleeping;
    worker_wake.wait(lock, [&] { return stopping || oldest_job_with_indices() != nullptr; });
    --sleeping;
  }
}

void ThreadPool::State::run(std::int64_t count, FunctionRef<void(std::int64_t, int)> body) {
  if (const HeldSlot* const held = HeldSlot::find(this)) {
    for (std::int64_t index = 0; index < count; ++index) body(index, held->slot);
    return;
  }
  if (count <= 0) return;

  Job job(count, body);
  std::unique_lock lock(mutex);
  bool has_slot = !caller_slot_taken.load(std::memory_order_relaxed);
  if (has_slot) caller_slot_taken.store(true, std::memory_order_relaxed);
  job.wants_slot = !has_slot;
  // A job of one index is finished before a worker could wake up. If the caller already holds a
  // slot, do not announce it.
  const std::int64_t for_workers = has_slot ? count - 1 : count;
  std::int64_t to_wake = 0;
  if (for_workers > 0) {
    enqueue(job);
    to_wake = std::min(for_workers, sleeping);
  }
  if (to_wake > 0 && has_slot && spins) keep_workers_off_this_cpu();
  lock.unlock();
  for (; to_wake > 0; --to_wake) worker_wake.notify_one();

  const auto finished = [&] {
    return !job.has_indices() && job.active.load(std::memory_order_relaxed) == 0;
  };
  if (!has_slot) {
    lock.lock();
    job.caller_wake.wait(lock, [&] { return job.slot_granted || finished(); });
    has_slot = job.slot_granted;
    lock.unlock();
  }
  if (has_slot) {
    {
      const HeldSlot held(this, kCallerSlot);
      run_indices(job, kCallerSlot);
    }
    lock.lock();
    dequeue(job);
    release_caller_slot();
    lock.unlock();
    // The last bodies of the workers end at about the same time as ours. Stop spinning once another
    // caller has the slot, because this thread would be one too many.
    if (spins) {
      spin_until([&] { return finished() || caller_slot_taken.load(std::memory_order_relaxed); });
    }
  }
  // Even when finished() is already true: the mutex orders the results of the workers before our
  // return, and the last worker out of our stack.
  lock.lock();
  job.caller_wake.wait(lock, finished);
  lock.unlock();
  if (job.error) std::rethrow_exception(job.error);
}

// Linux tends to wake a thread on the CPU of its waker. After an idle spell of 20 ms, a worker then
// shared the caller's CPU for several milliseconds while another CPU was idle: a job of 5 ms took
// twice its time (2-core Zen 4 guest). So the caller's CPU is removed from the workers' affinity
// masks before they are woken.
void ThreadPool::State::keep_workers_off_this_cpu() {
#if defined(__linux__)
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu == avoided_cpu || CPU_COUNT(&allowed_cpus) < 2) return;
  cpu_set_t others = allowed_cpus;
  CPU_CLR(static_cast<std::size_t>(cpu), &others);
  if (CPU_COUNT(&others) == 0) return;
  for (std::thread& worker : workers) {
    // Only a hint: without permission the kernel's placement stays.
    pthread_setaffinity_np(worker.native_handle(), sizeof(others), &others);
  }
  avoided_cpu = cpu;
#endif
}

void ThreadPool::State::stop() {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
    submissions.fetch_add(1, std::memory_order_relaxed);  // wakes spinning workers
  }
  worker_wake.notify_all();
  for (std::thread& worker : workers) worker.join();
}

ThreadPool::ThreadPool(int threads) {
  if (threads < 1 || threads > kMostThreads) {
    throw ConfigError("ThreadPool: " + std::to_string(threads) + " threads, expected 1 to " +
                      std::to_string(kMostThreads));
  }
  state_ = std::make_unique<State>(threads);
#if defined(__linux__)
  // Unknown: no CPU is avoided.
  if (sched_getaffinity(0, sizeof(cpu_set_t), &state_->allowed_cpus) != 0) {
    CPU_ZERO(&state_->allowed_cpus);
  }
#endif
  state_->workers.reserve(static_cast<std::size_t>(threads) - 1);
  try {
    for (int slot = 1; slot < threads; ++slot) {
      state_->workers.emplace_back([state = state_.get(), slot] { state->work(slot); });
    }
  } catch (const std::system_error& error) {
    state_->stop();
    throw DeviceError("ThreadPool: cannot start thread " +
                      std::to_string(state_->workers.size() + 2) + " of " +
                      std::to_string(threads) + ": " + error.what());
  }
}

ThreadPool::~ThreadPool() { state_->stop(); }

int ThreadPool::threads() const { return state_->threads; }

void ThreadPool::run_parallel(std::int64_t count, FunctionRef<void(std::int64_t, int)> body) {
  state_->run(count, body);
}

std::span<std::byte> ThreadPool::scratch(int slot) {
  if (slot < 0 || slot >= state_->threads) {
    throw ConfigError("ThreadPool::scratch: slot is " + std::to_string(slot) + ", expected 0.." +
                      std::to_string(state_->threads - 1));
  }
  return {state_->scratch.get() + static_cast<std::size_t>(slot) * kScratchBytes, kScratchBytes};
}

}  // namespace annulus
