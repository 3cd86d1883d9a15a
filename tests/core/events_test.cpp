// The stream of events itself: bounded, readable by several, off until started.

#include "annulus/events.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

EventRecord record_of(EventKind kind, std::string_view name, int rank, std::int64_t begin,
                      std::int64_t end, std::int64_t bytes = 0, int peer = -1) {
  EventRecord record;
  record.kind = kind;
  record.set_name(name);
  record.rank = rank;
  record.begin_ns = begin;
  record.end_ns = end;
  record.bytes = bytes;
  record.peer = peer;
  return record;
}

TEST(Events, NothingIsKeptUntilStarted) {
  EventStream stream;
  stream.add(record_of(EventKind::pass, "forward", 0, 1, 2));
  EXPECT_FALSE(stream.on());
  EXPECT_TRUE(stream.read().events.empty());
  EXPECT_TRUE(stream.totals().empty());
  EXPECT_EQ(stream.capacity(), 0U) << "memory is taken by start()";
}

TEST(Events, OverwritesTheOldestAndSaysHowMany) {
  EventStream stream;
  stream.start(4);
  for (int i = 0; i < 10; ++i) stream.add(record_of(EventKind::step, "step", 0, i, i + 1, 1));
  const EventStream::Batch batch = stream.read();
  ASSERT_EQ(batch.events.size(), 4U);
  EXPECT_EQ(batch.events.front().sequence, 6U);
  EXPECT_EQ(batch.events.front().begin_ns, 6);
  EXPECT_EQ(batch.dropped, 6U);
  EXPECT_EQ(batch.next, 10U);
  // Totals have seen all of them.
  ASSERT_EQ(stream.totals().size(), 1U);
  EXPECT_EQ(stream.totals()[0].count, 10U);
  EXPECT_EQ(stream.totals()[0].bytes, 10);
  EXPECT_EQ(stream.totals()[0].nanoseconds, 10);
}

TEST(Events, EveryReaderHasItsOwnPlace) {
  EventStream stream;
  stream.start(8);
  stream.add(record_of(EventKind::pass, "a", 0, 0, 1));
  const std::uint64_t first = stream.read().next;
  stream.add(record_of(EventKind::pass, "b", 0, 1, 2));
  EXPECT_EQ(stream.read(first).events.size(), 1U);
  EXPECT_EQ(stream.read(first).events[0].name(), "b");
  EXPECT_EQ(stream.read(first).dropped, 0U);
  EXPECT_EQ(stream.read(0).events.size(), 2U);
  EXPECT_TRUE(stream.read(1000).events.empty()) << "a place that is yet to come";
}

TEST(Events, AnotherCapacityKeepsTheLatest) {
  EventStream stream;
  stream.start(8);
  for (int i = 0; i < 6; ++i) stream.add(record_of(EventKind::step, "step", 0, i, i + 1));
  stream.start(3);
  ASSERT_EQ(stream.read().events.size(), 3U);
  EXPECT_EQ(stream.read().events[0].sequence, 3U);
  stream.start(100);
  for (int i = 6; i < 50; ++i) stream.add(record_of(EventKind::step, "step", 0, i, i + 1));
  ASSERT_EQ(stream.read().events.size(), 47U);
  for (const EventRecord& event : stream.read().events)
    EXPECT_EQ(static_cast<std::uint64_t>(event.begin_ns), event.sequence);
  EXPECT_THROW(stream.start(0), ConfigError);
}

TEST(Events, ClearForgetsAndIsNoLoss) {
  EventStream stream;
  stream.start(4);
  for (int i = 0; i < 10; ++i) stream.add(record_of(EventKind::cache, "evict", 0, i, i));
  stream.clear();
  stream.add(record_of(EventKind::cache, "miss", 0, 10, 10));
  const EventStream::Batch batch = stream.read();
  ASSERT_EQ(batch.events.size(), 1U);
  EXPECT_EQ(batch.events[0].sequence, 10U);
  EXPECT_EQ(batch.dropped, 0U);
  ASSERT_EQ(stream.totals().size(), 1U);
  EXPECT_EQ(stream.totals()[0].like.name(), "miss");
}

TEST(Events, TotalsAreBoundedToo) {
  EventStream stream;
  stream.start(2);
  const std::size_t many = EventStream::kMostTotals + 100;
  for (std::size_t i = 0; i < many; ++i)
    stream.add(record_of(EventKind::recovery, "r" + std::to_string(i), 0, 0, 1));
  const std::vector<EventTotal> totals = stream.totals();
  EXPECT_EQ(totals.size(), EventStream::kMostTotals + 1);
  std::uint64_t count = 0;
  for (const EventTotal& total : totals) count += total.count;
  EXPECT_EQ(count, many);
}

TEST(Events, NamesAreCutBetweenCharacters) {
  EventRecord record;
  record.set_name("abcdefghijklmnopqrstuvwxyz");  // 26 letters, 25 fit
  EXPECT_EQ(record.name(), "abcdefghijklmnopqrstuvwxy");
  record.set_name(std::string(24, 'a') + "\xc3\xa9");  // e with an accent would be cut in two
  EXPECT_EQ(record.name(), std::string(24, 'a'));
  record.set_name("ab");
  EXPECT_EQ(record.name(), "ab");
}

TEST(Events, KindsHaveNames) {
  for (int i = 0; i < kEventKinds; ++i) {
    const auto kind = static_cast<EventKind>(i);
    EXPECT_EQ(event_kind_from_name(name_of(kind)), kind);
  }
  EXPECT_THROW((void)event_kind_from_name("snack"), ConfigError);
}

TEST(Events, ScopesTellDurationAndFailure) {
  EventStream& stream = event_stream();
  stream.start(64);
  stream.clear();
  try {
    const EventScope scope(EventKind::recovery, "split heads", 3, 2, 100);
    throw std::runtime_error("still out of memory");
  } catch (const std::runtime_error&) {
  }
  record_event(EventKind::cache, "evict", 1, 4096);
  stream.stop();
  record_event(EventKind::cache, "evict", 1, 4096);
  const std::vector<EventRecord> events = stream.read().events;
  stream.clear();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, EventKind::recovery);
  EXPECT_EQ(events[0].name(), "split heads");
  EXPECT_TRUE(events[0].failed);
  EXPECT_EQ(events[0].rank, 3);
  EXPECT_EQ(events[0].step, 2);
  EXPECT_EQ(events[0].bytes, 100);
  EXPECT_GE(events[0].end_ns, events[0].begin_ns);
  EXPECT_FALSE(events[1].failed);
  EXPECT_EQ(events[1].bytes, 4096);
  EXPECT_EQ(events[1].begin_ns, events[1].end_ns);
}

TEST(Events, ThreadsWriteWhileOthersRead) {
  EventStream stream;
  stream.start(128);
  constexpr int kThreads = 4;
  constexpr int kEach = 5000;
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([&stream, t] {
      for (int i = 0; i < kEach; ++i)
        stream.add(record_of(EventKind::compute, "work", t, i, i + 1, 2));
    });
  }
  std::uint64_t seen = 0;
  std::uint64_t place = 0;
  while (place < kThreads * kEach) {
    const EventStream::Batch batch = stream.read(place);
    std::uint64_t expected = place + batch.dropped;
    for (const EventRecord& event : batch.events) ASSERT_EQ(event.sequence, expected++);
    ASSERT_EQ(expected, batch.next);
    seen += batch.events.size() + batch.dropped;
    place = batch.next;
    std::this_thread::yield();
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(seen, static_cast<std::uint64_t>(kThreads) * kEach);
  std::uint64_t count = 0;
  for (const EventTotal& total : stream.totals()) count += total.count;
  EXPECT_EQ(count, static_cast<std::uint64_t>(kThreads) * kEach);
}

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)  // TSan does not follow into such a child
TEST(EventStream, AForkedChildBeginsWithOneOfItsOwn) {
  event_stream().start();
  record_event(EventKind::cache, "hit", 0);
  const std::uint64_t next = event_stream().next();
  // Somebody else is always writing when the process is forked: the lock is mostly held.
  std::atomic<bool> done{false};
  std::thread writer([&] {
    while (!done) record_event(EventKind::cache, "hit", 1);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a hang is a failure
      const bool empty = !event_stream().on() && event_stream().read().events.empty();
      event_stream().start(8);
      record_event(EventKind::cache, "evict", 0);
      _exit(empty && event_stream().totals().size() == 1 ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  done = true;
  writer.join();
  EXPECT_GT(event_stream().next(), next);
  event_stream().stop();
  event_stream().clear();
}
#endif

TEST(EventLanes, StepsLieWithinPassesAndMessagesBesideEachOther) {
  const std::vector<EventRecord> events = {
      record_of(EventKind::pass, "forward", 0, 0, 100),
      record_of(EventKind::step, "step", 0, 10, 50),
      record_of(EventKind::step, "step", 0, 50, 100),
      record_of(EventKind::pass, "backward", 0, 100, 200),
      record_of(EventKind::step, "step", 0, 100, 200),
      record_of(EventKind::send, "rows", 0, 10, 50, 8, 1),
      record_of(EventKind::send, "rows", 0, 10, 50, 8, 2),
      record_of(EventKind::send, "rows", 0, 50, 60, 8, 1),
      record_of(EventKind::pass, "forward", 1, 0, 100),
      // Another thread calls on the same rank: a pass is never within a pass.
      record_of(EventKind::pass, "forward", 0, 20, 60),
      record_of(EventKind::cache, "evict", 0, 5, 5),
      record_of(EventKind::cache, "evict", 0, 5, 5),
  };
  EXPECT_EQ(event_lanes(events), (std::vector<int>{0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0}));
}

}  // namespace
}  // namespace annulus
