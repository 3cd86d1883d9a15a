// Keys that are packed once for several items: what is packed when, and where.

#include "kernels/cpu/key_packs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
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
  EXPECT_GT(lists, 300);
}

// What threads make of a phase: who throws at which call, if anybody does.
struct Log {
  std::vector<std::atomic<int>> packed;    // pieces, per list
  std::vector<std::atomic<int>> computed;  // per item
  std::atomic<int> calls{0};
};
void run_shares(const Phase& phase, ThreadPool& pool, int throw_at, Log& log) {
  log.packed = std::vector<std::atomic<int>>(phase.lists.size());
  log.computed = std::vector<std::atomic<int>>(phase.items.size());
  std::vector<std::atomic<int>> left(phase.wave_items.size());  // items, per wave
  for (std::size_t w = 0; w < left.size(); ++w) left[w] = phase.wave_items[w];
  const auto call = [&] {
    if (log.calls++ == throw_at) throw DeviceError("as asked");
  };
  ShareRunner runner;
  runner.reserve(phase);
  runner.run(
      pool, phase,
      [&](const KeyList& list, std::int64_t begin, int) {
        EXPECT_EQ(begin % kPackRows, 0);
        EXPECT_LT(begin, list.rows);
        if (list.wave >= 2 && throw_at < 0) {
          EXPECT_EQ(left[static_cast<std::size_t>(list.wave - 2)], 0) << "its memory is in use";
        }
        call();
        ++log.packed[static_cast<std::size_t>(&list - phase.lists.data())];
      },
      [&](const WorkItem& item, const KeyList* list, int) {
        if (list != nullptr && throw_at < 0) {
          EXPECT_EQ(log.packed[static_cast<std::size_t>(list - phase.lists.data())],
                    (list->rows + kPackRows - 1) / kPackRows);
        }
        call();
        ++log.computed[static_cast<std::size_t>(&item - phase.items.data())];
        if (list != nullptr) --left[static_cast<std::size_t>(list->wave)];
      });
}

TEST(KeyPacks, ThreadsComputeEveryItemOnceAndBehindItsKeys) {
  ThreadPool one(1);
  ThreadPool many(5);
  for_each_phase([&](const Phase& phase, const Work&, const Computation&, std::int64_t) {
    if (phase.lists.empty()) return;
    for (ThreadPool* const pool : {&one, &many}) {
      Log log;
      run_shares(phase, *pool, -1, log);
      EXPECT_EQ(std::count(log.computed.begin(), log.computed.end(), 1), std::ssize(log.computed));
    }
  });
}

// Others that wait for its keys, its items or their memory go on.
TEST(KeyPacks, AStepThatThrowsEndsTheWork) {
  ThreadPool pool(5);
  int throw_at = 0;
  for_each_phase([&](const Phase& phase, const Work&, const Computation&, std::int64_t) {
    if (phase.lists.empty()) return;
    Log log;
    EXPECT_THROW(run_shares(phase, pool, throw_at++ % 3, log), DeviceError);
    for (const std::atomic<int>& times : log.computed) EXPECT_LE(times, 1);
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
