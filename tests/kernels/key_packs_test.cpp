// Keys that are packed once for several items: what is packed when, and where.

#include "kernels/cpu/key_packs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "core/thread_pool.h"
#include "kernels/cpu/work.h"
#include "support/random_tables.h"

namespace annulus::cpu {
namespace {

// Calls check(phase, work, computation, bytes a row) for every forward phase of random problems.
// Rows are large in some of them, so that memory is used again and again.
template <typename Check>
void for_each_phase(const Check& check) {
  test::Random random(31);
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE("trial " + std::to_string(trial));
    cuda::Case c = cuda::random_case(random);
    c.travel = Travel::keys;
    const Plan plan(cuda::plan_options(c), 0);
    Computation computation = cuda::computation_of(c, 0);
    computation.reproducible = random.coin();
    const std::int64_t row_bytes = random.coin() ? 64 : std::int64_t{1} << 19;
    const Work work({Stage::Kind::forward, &plan, 0, plan.steps()}, computation,
                    static_cast<int>(random.between(1, 8)),
                    [&](std::int64_t rows) { return rows * row_bytes; });
    for (const Phase& phase : work.phases()) check(phase, work, computation, row_bytes);
  }
}

TEST(KeyPacks, EveryItemAndEveryListIsInOneShare) {
  int lists = 0;
  for_each_phase([&](const Phase& phase, const Work&, const Computation&, std::int64_t) {
    if (phase.lists.empty()) {
      EXPECT_TRUE(phase.shares.empty());
      return;
    }
    std::vector<int> shares(phase.lists.size(), 0);
    std::int32_t items = 0;
    for (const KeyShare& share : phase.shares) {
      EXPECT_EQ(share.begin, items);
      items = share.end;
      EXPECT_GE(share.end - share.begin, share.list < 0 ? 1 : 2);
      if (share.list < 0) continue;
      ++shares[static_cast<std::size_t>(share.list)];
      ++lists;
    }
    EXPECT_EQ(items, std::ssize(phase.items));
    EXPECT_EQ(std::count(shares.begin(), shares.end(), 1), std::ssize(shares));
  });
  EXPECT_GT(lists, 200);
}

// What threads make of a phase.
struct Log {
  explicit Log(const Phase& phase)
      : packed(phase.lists.size()), computed(phase.items.size()), left(phase.wave_items.size()) {
    for (std::size_t w = 0; w < left.size(); ++w) left[w] = phase.wave_items[w];
  }
  std::vector<std::atomic<int>> packed;    // pieces, per list
  std::vector<std::atomic<int>> computed;  // per item
  std::vector<std::atomic<int>> left;      // items, per wave
  std::atomic<bool> fails{false};          // something threw: what comes out is void
};
// Calls before(piece or item), which may take its time, or throw.
template <typename Before>
void run_shares(const Phase& phase, ThreadPool& pool, Log& log, const Before& before) {
  ShareRunner runner;
  runner.reserve(phase);
  runner.run(
      pool, phase,
      [&](const KeyList& list, std::int64_t begin, int) {
        EXPECT_EQ(begin % kPackRows, 0);
        EXPECT_LT(begin, list.rows);
        if (list.wave >= 2 && !log.fails) {
          EXPECT_EQ(log.left[static_cast<std::size_t>(list.wave - 2)], 0) << "its memory is in use";
        }
        before(&list);
        ++log.packed[static_cast<std::size_t>(&list - phase.lists.data())];
      },
      [&](const WorkItem& item, const KeyList* list, int) {
        if (list != nullptr && !log.fails) {
          EXPECT_EQ(log.packed[static_cast<std::size_t>(list - phase.lists.data())],
                    (list->rows + kPackRows - 1) / kPackRows);
        }
        before(&item);
        ++log.computed[static_cast<std::size_t>(&item - phase.items.data())];
        if (list != nullptr) --log.left[static_cast<std::size_t>(list->wave)];
      });
}

void expect_all_computed_once(const Log& log) {
  EXPECT_EQ(std::count(log.computed.begin(), log.computed.end(), 1), std::ssize(log.computed));
}

TEST(KeyPacks, ThreadsComputeEveryItemOnceAndBehindItsKeys) {
  ThreadPool one(1);
  ThreadPool many(5);
  for_each_phase([&](const Phase& phase, const Work&, const Computation&, std::int64_t) {
    if (phase.lists.empty()) return;
    for (ThreadPool* const pool : {&one, &many}) {
      Log log(phase);
      run_shares(phase, *pool, log, [](const void*) {});
      expect_all_computed_once(log);
    }
  });
}

// So many lists, each a wave of its own.
Phase phase_of_waves(std::int32_t lists, int pieces, std::int32_t items) {
  Phase phase;
  for (std::int32_t i = 0; i < lists; ++i) {
    KeyList& list = phase.lists.emplace_back();
    list.wave = i;
    list.rows = pieces * kPackRows;
    phase.shares.push_back({i, i * items, (i + 1) * items});
    phase.wave_items.push_back(items);
  }
  phase.items.resize(static_cast<std::size_t>(lists * items));
  return phase;
}

void take_time(const void*) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// For all of a list, and for memory until the items that have it are done.
TEST(KeyPacks, ThreadsWaitForKeysAndForMemory) {
  ThreadPool pool(5);
  for (const Phase& phase : {phase_of_waves(1, 12, 20), phase_of_waves(8, 1, 3)}) {
    Log log(phase);
    run_shares(phase, pool, log, take_time);
    expect_all_computed_once(log);
  }
}

// Others that wait for memory go on when its items will never be computed.
TEST(KeyPacks, AnItemThatThrowsEndsTheWork) {
  ThreadPool pool(5);
  const Phase phase = phase_of_waves(8, 1, 3);
  Log log(phase);
  const auto throw_once = [&](const void* at) {
    if (at != phase.items.data()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they wait already
    log.fails = true;
    throw DeviceError("as asked");
  };
  EXPECT_THROW(run_shares(phase, pool, log, throw_once), DeviceError);
  EXPECT_EQ(log.computed[0], 0);
}

// A thread begins with the share that it had in the call before, of which it has memory in its
// cache.
TEST(KeyPacks, ThreadsBeginWithTheSameShareInEveryCall) {
  constexpr std::int32_t kThreads = 4;
  ThreadPool pool(kThreads);
  Phase phase;
  for (std::int32_t i = 0; i < kThreads; ++i) phase.shares.push_back({-1, i, i + 1});
  phase.items.resize(kThreads);
  ShareRunner runner;
  runner.reserve(phase);
  for (int call = 0; call < 20; ++call) {
    std::barrier<> all_have_one(kThreads);
    std::vector<int> slots(kThreads, -1);
    runner.run(
        pool, phase, [](const KeyList&, std::int64_t, int) {},
        [&](const WorkItem& item, const KeyList*, int slot) {
          slots[static_cast<std::size_t>(&item - phase.items.data())] = slot;
          all_have_one.arrive_and_wait();
        });
    EXPECT_EQ(slots, (std::vector<int>{0, 1, 2, 3}));
  }
}

// Its own share may be of a wave that has no memory before others are done, which nobody else does.
TEST(KeyPacks, AThreadAloneBeginsWithAnyShare) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads);
  const Phase phase = phase_of_waves(8, 2, 3);
  std::barrier<> all_run(kThreads);
  pool.run_parallel(kThreads, [&](std::int64_t, int slot) {
    all_run.arrive_and_wait();
    if (slot != kThreads - 1) return;
    Log log(phase);
    run_shares(phase, pool, log, [](const void*) {});  // inline, on this slot
    expect_all_computed_once(log);
  });
}

// The list that an item gets has the keys of its head, batch entry and rows.
TEST(KeyPacks, ItemsThatShareAListShareItsKeys) {
  for_each_phase([&](const Phase& phase, const Work& work, const Computation& computation,
                     std::int64_t) {
    const int ratio = computation.heads() / computation.kv_heads;
    for (std::int32_t i = 0, at = 0; i < std::ssize(phase.items); ++i) {
      if (phase.shares.empty()) break;
      while (phase.shares[static_cast<std::size_t>(at)].end <= i) ++at;
      const KeyShare& share = phase.shares[static_cast<std::size_t>(at)];
      if (share.list < 0) continue;
      const KeyList& list = phase.lists[static_cast<std::size_t>(share.list)];
      const WorkItem& item = phase.items[static_cast<std::size_t>(i)];
      EXPECT_EQ(list.batch, item.batch);
      EXPECT_EQ(work.q_head(list) / ratio, work.member(item).q_head / ratio);
      std::vector<RowRun> all;
      std::vector<RowRun> some;
      work.expand(list, {}, 0, all);
      work.expand(item, false, {}, 0, some);
      const auto has = [&](std::int32_t index) {
        return std::any_of(all.begin(), all.end(), [&](const RowRun& run) {
          const std::int32_t row = (index - run.index) / run.index_stride;
          return index >= run.index && row < run.count &&
                 run.index + row * run.index_stride == index;
        });
      };
      std::int64_t places = 0;
      for (const RowRun& run : all) {
        places = computation.reproducible
                     ? std::max<std::int64_t>(
                           places, run.index + std::int64_t{run.count - 1} * run.index_stride + 1)
                     : places + run.count;
      }
      EXPECT_EQ(list.rows, places);
      for (const RowRun& run : some)
        for (std::int32_t i = 0; i < run.count; ++i)
          EXPECT_TRUE(has(run.index + i * run.index_stride));
    }
  });
}

// Shares of a wave wait for the last but one, so only neighbours must not overlap.
TEST(KeyPacks, MemoryIsBoundedAndNeighbouringWavesDoNotShareIt) {
  int waves = 0;
  for_each_phase([&](const Phase& phase, const Work&, const Computation&, std::int64_t row_bytes) {
    std::int64_t largest = 0;
    for (std::size_t i = 0; i < phase.lists.size(); ++i) {
      const KeyList& a = phase.lists[i];
      const std::int64_t end = a.offset + a.rows * row_bytes;
      EXPECT_LE(end, phase.packed_bytes);
      largest = std::max(largest, a.rows * row_bytes);
      waves = std::max(waves, a.wave + 1);
      for (std::size_t j = 0; j < i; ++j) {
        const KeyList& b = phase.lists[j];
        EXPECT_LE(b.wave, a.wave);
        if (a.wave - b.wave > 1) continue;
        EXPECT_TRUE(end <= b.offset || b.offset + b.rows * row_bytes <= a.offset);
      }
    }
    EXPECT_LE(phase.packed_bytes, 2 * std::max(kWaveBytes, largest));
    std::int32_t last = 0;
    for (const KeyShare& share : phase.shares) {
      if (share.list < 0) continue;
      const std::int32_t wave = phase.lists[static_cast<std::size_t>(share.list)].wave;
      EXPECT_GE(wave, last) << "a wave that others wait for would come behind them";
      last = wave;
    }
  });
  EXPECT_GT(waves, 3);
}

}  // namespace
}  // namespace annulus::cpu
