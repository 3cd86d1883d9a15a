#include "core/thread_pool.h"

#include <gtest/gtest.h>

#if defined(__linux__)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "support/asleep.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}

// Counts every allocation of the program. noinline: GCC otherwise sees malloc paired with delete
// and warns.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace annulus {
namespace {

using Body = std::function<void(std::int64_t, int)>;
using std::chrono::microseconds;

void busy(microseconds duration) {
  const auto end = std::chrono::steady_clock::now() + duration;
  while (std::chrono::steady_clock::now() < end) {
  }
}

// Runs `callers` threads that all start at once.
void call_from_threads(int callers, const std::function<void(int caller)>& call) {
  std::atomic<int> missing{callers};
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) {
    threads.emplace_back([&, caller] {
      --missing;
      while (missing > 0) std::this_thread::yield();
      call(caller);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Checks, from inside the bodies, that a slot is never used twice at one time.
class SlotWatch {
 public:
  explicit SlotWatch(int slots) : used_(static_cast<std::size_t>(slots)) {}

  void enter(int slot) {
    ASSERT_GE(slot, 0);
    ASSERT_LT(static_cast<std::size_t>(slot), used_.size());
    EXPECT_FALSE(used_[static_cast<std::size_t>(slot)].exchange(true))
        << "slot " << slot << " is used twice";
    const int now = ++running_;
    int most = most_;
    while (now > most && !most_.compare_exchange_weak(most, now)) {
    }
  }
  void leave(int slot) {
    --running_;
    used_[static_cast<std::size_t>(slot)] = false;
  }
  int most() const { return most_; }

 private:
  std::vector<std::atomic<bool>> used_;
  std::atomic<int> running_{0};
  std::atomic<int> most_{0};
};

class PoolOfThreads : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, PoolOfThreads, testing::Values(1, 2, 3, 8),
                         [](const auto& info) { return "threads" + std::to_string(info.param); });

TEST_P(PoolOfThreads, RunsEveryIndexOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.threads(), GetParam());
  for (const std::int64_t count : {0, 1, 2, 3, 7, 1000}) {
    std::vector<int> calls(
        static_cast<std::size_t>(count));  // not atomic: the pool has to order these accesses
    pool.run_parallel(count,
                      [&](std::int64_t index, int) { ++calls[static_cast<std::size_t>(index)]; });
    EXPECT_EQ(calls, std::vector<int>(static_cast<std::size_t>(count), 1));
  }
  pool.run_parallel(-3, [](std::int64_t, int) { FAIL(); });
}

TEST_P(PoolOfThreads, SlotsAreUniqueAmongTheBodiesOfAllCallers) {
  constexpr int kCallers = 4;
  ThreadPool pool(GetParam());
  SlotWatch watch(pool.threads());
  std::atomic<std::int64_t> sum{0};
  call_from_threads(kCallers, [&](int) {
    for (int job = 0; job < 100; ++job) {
      pool.run_parallel(job % 9, [&](std::int64_t index, int slot) {
        watch.enter(slot);
        sum += index + 1;
        busy(microseconds(5));
        watch.leave(slot);
      });
    }
  });
  EXPECT_LE(watch.most(), GetParam());
  std::int64_t expected = 0;
  for (int job = 0; job < 100; ++job) expected += std::int64_t{job % 9} * (job % 9 + 1) / 2;
  EXPECT_EQ(sum, kCallers * expected);
}

TEST_P(PoolOfThreads, BodyMayWaitForEverySmallerIndex) {
  ThreadPool pool(GetParam());
  call_from_threads(3, [&](int) {
    for (int job = 0; job < 20; ++job) {
      std::atomic<std::int64_t> turn{0};
      pool.run_parallel(40, [&](std::int64_t index, int) {
        while (turn.load() != index) std::this_thread::yield();
        turn.store(index + 1);
      });
      EXPECT_EQ(turn, 40);
    }
  });
}

TEST_P(PoolOfThreads, IndicesOfOneSlotIncrease) {
  ThreadPool pool(GetParam());
  std::vector<std::int64_t> last(static_cast<std::size_t>(GetParam()), -1);
  pool.run_parallel(5000, [&](std::int64_t index, int slot) {
    EXPECT_LT(last[static_cast<std::size_t>(slot)], index);
    last[static_cast<std::size_t>(slot)] = index;
  });
}

TEST_P(PoolOfThreads, ThrowsTheFirstExceptionAndSkipsTheRest) {
  constexpr std::int64_t kYears = std::int64_t{1} << 50;  // to return at all, it has to skip
  ThreadPool pool(GetParam());
  call_from_threads(2, [&](int) {
    for (int job = 0; job < 50; ++job) {
      try {
        pool.run_parallel(kYears, [](std::int64_t index, int) {
          if (index == 10) throw std::runtime_error("index 10");
        });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "index 10");
      }
    }
  });
  std::atomic<int> calls{0};
  pool.run_parallel(100, [&](std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 100) << "the pool has to survive an exception";
}

TEST_P(PoolOfThreads, OneOfManyExceptionsIsThrown) {
  ThreadPool pool(GetParam());
  for (int job = 0; job < 100; ++job) {
    EXPECT_THROW(pool.run_parallel(8, [](std::int64_t, int) { throw ConfigError("all of them"); }),
                 ConfigError);
  }
}

TEST_P(PoolOfThreads, NestedCallRunsInlineOnTheSameSlot) {
  ThreadPool pool(GetParam());
  std::atomic<int> calls{0};
  call_from_threads(2, [&](int) {
    pool.run_parallel(6, [&](std::int64_t, int outer) {
      const auto thread = std::this_thread::get_id();
      std::int64_t expected = 0;
      pool.run_parallel(5, [&](std::int64_t index, int inner) {
        EXPECT_EQ(inner, outer);
        EXPECT_EQ(std::this_thread::get_id(), thread);
        EXPECT_EQ(index, expected++);
        ++calls;
      });
    });
  });
  EXPECT_EQ(calls, 60);
  EXPECT_THROW(pool.run_parallel(2,
                                 [&](std::int64_t, int) {
                                   pool.run_parallel(
                                       2, [](std::int64_t, int) { throw ConfigError("nested"); });
                                 }),
               ConfigError);
}

TEST_P(PoolOfThreads, PoolInsidePoolInsidePoolFindsItsSlot) {
  ThreadPool outer(GetParam());
  ThreadPool inner(1);
  std::atomic<int> calls{0};
  outer.run_parallel(4, [&](std::int64_t, int slot) {
    inner.run_parallel(2, [&](std::int64_t, int inner_slot) {
      EXPECT_EQ(inner_slot, 0);
      outer.run_parallel(3, [&](std::int64_t, int again) {
        EXPECT_EQ(again, slot);
        ++calls;
      });
    });
  });
  EXPECT_EQ(calls, 24);
}

TEST_P(PoolOfThreads, RunningAJobAllocatesNothing) {
  ThreadPool pool(GetParam());
  std::atomic<std::int64_t> sum{0};
  const Body body = [&](std::int64_t index, int) { sum += index; };
  pool.run_parallel(10, body);  // thread-local storage and the like
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::int64_t before = allocations;
  for (int job = 0; job < 200; ++job) {
    pool.run_parallel(job % 20, body);
    if (job % 50 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers fall asleep
  }
  EXPECT_EQ(allocations, before);
  EXPECT_GT(before, 0);
}

TEST_P(PoolOfThreads, ScratchOfSlotsIsAlignedAndApart) {
  ThreadPool pool(GetParam());
  for (int slot = 0; slot < GetParam(); ++slot) {
    const auto scratch = pool.scratch(slot);
    EXPECT_EQ(scratch.size(), ThreadPool::kScratchBytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scratch.data()) % 64, 0U);
    scratch.front() = scratch.back() = static_cast<std::byte>(slot);
  }
  for (int slot = 0; slot < GetParam(); ++slot) {
    EXPECT_EQ(pool.scratch(slot).front(), static_cast<std::byte>(slot));
    EXPECT_EQ(pool.scratch(slot).back(), static_cast<std::byte>(slot));
  }
  EXPECT_THROW((void)pool.scratch(-1), ConfigError);
  EXPECT_THROW((void)pool.scratch(GetParam()), ConfigError);
}

TEST(ThreadPool, EightCallersShareTwoSlots) {
  ThreadPool pool(2);
  SlotWatch watch(2);
  std::atomic<int> calls{0};
  call_from_threads(8, [&](int caller) {
    for (int job = 0; job < 200; ++job) {
      pool.run_parallel(1 + (caller + job) % 4, [&](std::int64_t, int slot) {
        watch.enter(slot);
        ++calls;
        watch.leave(slot);
      });
    }
  });
  EXPECT_EQ(calls, 8 * 50 * (1 + 2 + 3 + 4));
  EXPECT_LE(watch.most(), 2);
}

TEST(ThreadPool, UsesAllSlotsOfOneCaller) {
  ThreadPool pool(4);
  // Returns only if four bodies are under way at the same time.
  std::atomic<int> inside{0};
  pool.run_parallel(4, [&](std::int64_t, int) {
    ++inside;
    while (inside < 4) std::this_thread::yield();
  });
  EXPECT_EQ(inside, 4);
}

TEST(ThreadPool, FreedCallerSlotGoesToAWaitingCaller) {
  ThreadPool pool(2);
  std::atomic<bool> worker_busy{false};
  std::atomic<bool> release_worker{false};
  std::atomic<bool> release_first{false};
  // The first job keeps both slots: index 0 and 1 sit in the worker and the caller.
  std::thread first([&] {
    pool.run_parallel(2, [&](std::int64_t, int slot) {
      if (slot != 0) worker_busy = true;
      while (!(slot != 0 ? release_worker : release_first)) std::this_thread::yield();
    });
  });
  while (!worker_busy) std::this_thread::yield();
  std::atomic<int> calls{0};
  std::thread second([&] {
    pool.run_parallel(3, [&](std::int64_t, int slot) {
      EXPECT_EQ(slot, 0);
      ++calls;
    });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(calls, 0);
  release_first = true;  // its caller now waits for the worker, without a slot
  second.join();
  EXPECT_EQ(calls, 3);
  release_worker = true;
  first.join();
}

TEST(ThreadPool, WorkersServeTheOldestJobFirst) {
  ThreadPool pool(2);
  std::atomic<int> held{0};
  std::atomic<bool> release_worker{false};
  std::atomic<bool> release_caller{false};
  // Both slots are held while the two other jobs queue up. Then only the worker is let go, so that
  // both depend on it.
  std::thread holder([&] {
    pool.run_parallel(2, [&](std::int64_t, int slot) {
      ++held;
      while (!(slot != 0 ? release_worker : release_caller)) std::this_thread::yield();
    });
  });
  while (held < 2) std::this_thread::yield();
  std::vector<int> order;
  const auto queue_job = [&](int job) {
    std::atomic<pid_t> id{0};
    std::thread caller([&, job] {
      id = gettid();
      pool.run_parallel(20, [&, job](std::int64_t, int) { order.push_back(job); });
    });
    // Its job is queued by then: there is nothing before that it could sleep for.
    EXPECT_TRUE(test::comes_true([&] { return id != 0 && test::thread_sleeps(id); }));
    return caller;
  };
  std::thread older = queue_job(0);
  std::thread newer = queue_job(1);
  release_worker = true;
  older.join();
  newer.join();
  release_caller = true;
  holder.join();
  ASSERT_EQ(order.size(), 40U);
  for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(order[i], i < 20 ? 0 : 1);
}

TEST(ThreadPool, RejectsAnImpossibleNumberOfThreads) {
  EXPECT_THROW(ThreadPool(0), ConfigError);
  EXPECT_THROW(ThreadPool(-4), ConfigError);
  EXPECT_THROW(ThreadPool(1'000'000), ConfigError);
}

// One test, because the environment and the shared pool belong to the process: first the values
// that are refused.
TEST(ThreadPool, SharedPoolFollowsTheEnvironment) {
  static bool made = false;  // by an earlier round of --gtest_repeat
  for (const char* const wrong : {"0", "-1", "two", "4x", " 4", "99999999999"}) {
    if (made) break;
    ASSERT_EQ(setenv("ANNULUS_THREADS", wrong, 1), 0);
    try {
      (void)ThreadPool::shared();
      ADD_FAILURE() << "'" << wrong << "' was accepted";
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("ANNULUS_THREADS is '" + std::string(wrong) + "'"), std::string::npos)
          << message;
    }
  }
  ASSERT_EQ(setenv("ANNULUS_THREADS", "3", 1), 0);
  EXPECT_EQ(ThreadPool::shared()->threads(), 3);
  made = true;
  EXPECT_EQ(ThreadPool::shared(), ThreadPool::shared());
}

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)  // TSan does not follow into such a child
TEST(ThreadPool, ForkedChildHasASharedPoolOfItsOwn) {
  const auto work = [] {
    std::atomic<int> done{0};
    ThreadPool::shared()->run_parallel(100, [&](std::int64_t, int) { ++done; });
    return done.load();
  };
  ASSERT_EQ(work(), 100);
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);  // a hang is a failure
    _exit(work() == 100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(work(), 100);
}
#endif

}  // namespace
}  // namespace annulus
