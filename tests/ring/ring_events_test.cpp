// What a ring tells of itself, over random configurations: every byte that was sent, steps within
// passes, nothing that overlaps on a track.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/events.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "support/late_backend.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

struct Configuration {
  Problem problem;
  RingOptions options;
};

Configuration random_configuration(std::uint64_t seed) {
  Random random(seed);
  const std::int64_t tokens = random.between(1, 64);
  const int ranks = static_cast<int>(random.between(1, 6));
  Problem problem = make_problem("random", any_pattern(random, tokens, 2), 1, tokens, 8, 1,
                                 random.coin() ? MixGradient::full : MixGradient::detached);
  RingOptions options = ring_options(problem, any_placement(random, tokens, ranks));
  options.reproducible = random.between(0, 4) == 0;
  options.schedule = options.reproducible || random.coin() ? Schedule::gather : Schedule::ring;
  options.backward_travel =
      random.one_of<BackwardTravel>({BackwardTravel::keys, BackwardTravel::queries});
  options.blocking = random.between(0, 3) == 0;
  return {problem, options};
}

// Turns the process's stream on for as long as it lives.
class Recording {
 public:
  Recording() : place_(event_stream().next()) { event_stream().start(); }
  ~Recording() { event_stream().stop(); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  [[nodiscard]] std::vector<EventRecord> events() const {
    EventStream::Batch batch = event_stream().read(place_);
    EXPECT_EQ(batch.dropped, 0U);
    return std::move(batch.events);
  }

 private:
  std::uint64_t place_;
};

bool within(const EventRecord& inner, const EventRecord& outer) {
  return inner.rank == outer.rank && inner.begin_ns >= outer.begin_ns &&
         inner.end_ns <= outer.end_ns;
}

void expect_tracks_in_order(const std::vector<EventRecord>& events) {
  const std::vector<int> lanes = event_lanes(events);
  std::map<std::tuple<int, EventKind, int>, std::vector<EventRecord>> tracks;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const EventRecord& event = events[i];
    tracks[{event.rank, event.kind, lanes[i]}].push_back(event);
    // A rank does one thing at a time; only messages are under way together.
    if (event.kind != EventKind::send && event.kind != EventKind::receive) {
      ASSERT_EQ(lanes[i], 0) << name_of(event.kind) << " " << event.name();
    }
  }
  for (auto& [track, list] : tracks) {
    std::sort(list.begin(), list.end(), [](const EventRecord& a, const EventRecord& b) {
      return std::pair(a.begin_ns, a.end_ns) < std::pair(b.begin_ns, b.end_ns);
    });
    for (std::size_t i = 1; i < list.size(); ++i)
      ASSERT_LE(list[i - 1].end_ns, list[i].begin_ns) << name_of(list[i].kind);
  }
}

void expect_whole(const std::vector<EventRecord>& events, const RingOptions& options) {
  const int ranks = options.placement.ranks();
  std::vector<EventRecord> passes;
  std::map<std::pair<int, int>, std::int64_t> sent;
  std::map<std::pair<int, int>, std::int64_t> received;
  for (const EventRecord& event : events) {
    ASSERT_LE(event.begin_ns, event.end_ns);
    ASSERT_FALSE(event.failed);
    ASSERT_TRUE(event.rank >= 0 && event.rank < ranks);
    if (event.kind == EventKind::pass) passes.push_back(event);
    if (event.kind == EventKind::send) sent[{event.rank, event.peer}] += event.bytes;
    if (event.kind == EventKind::receive) received[{event.peer, event.rank}] += event.bytes;
  }
  EXPECT_EQ(sent, received);
  ASSERT_EQ(passes.size(), static_cast<std::size_t>(2 * ranks));
  for (const EventRecord& pass : passes) {
    std::int64_t bytes = 0;
    std::map<EventKind, int> count;
    for (const EventRecord& event : events) {
      if (!within(event, pass)) continue;
      ++count[event.kind];
      if (event.kind == EventKind::send) bytes += event.bytes;
    }
    EXPECT_EQ(bytes, pass.bytes) << "a pass knows what it sends";
    EXPECT_GE(count[EventKind::step], 1);
    EXPECT_GE(count[EventKind::compute], 3);  // begin, at least one stage, finish
    EXPECT_EQ(count[EventKind::wait] > 0, ranks > 1);
  }
  for (const EventRecord& event : events) {
    if (event.kind != EventKind::step) continue;
    EXPECT_EQ(std::count_if(passes.begin(), passes.end(),
                            [&](const EventRecord& pass) { return within(event, pass); }),
              1);
  }
}

TEST(RingEvents, TellOfEveryByteAndNeverOverlap) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Configuration c = random_configuration(seed);
    const Inputs inputs = random_inputs(c.problem, seed);
    const Recording recording;
    (void)run_ring(c.options, inputs);
    const std::vector<EventRecord> events = recording.events();
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_whole(events, c.options);
    expect_tracks_in_order(events);
    if (testing::Test::HasFailure()) return;
  }
}

// The host only enqueues: its events are those of enqueuing, and in order all the same.
TEST(RingEvents, NeverOverlapWhereWorkIsQueued) {
  const LateBackends late;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Configuration c = random_configuration(seed);
    const Inputs inputs = random_inputs(c.problem, seed);
    const Recording recording;
    (void)run_ring(c.options, inputs);
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_whole(recording.events(), c.options);
    expect_tracks_in_order(recording.events());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RingEvents, NothingIsRecordedWhileOff) {
  const Configuration c = random_configuration(1);
  const std::uint64_t before = event_stream().next();
  (void)run_ring(c.options, random_inputs(c.problem, 1));
  EXPECT_EQ(event_stream().next(), before);
}

TEST(RingEvents, ResultsAreTheSameBits) {
  const Configuration c = random_configuration(7);
  const Inputs inputs = random_inputs(c.problem, 7);
  const Results off = run_ring(c.options, inputs);
  const Recording recording;
  EXPECT_EQ(first_difference(off, run_ring(c.options, inputs)), "");
}

TEST(RingEvents, AFailedPassSaysSo) {
  const Problem problem = make_problem("dense", dense(1), 1, 16, 8);
  const RingOptions options = ring_options(problem, Placement::contiguous(problem.shape.tokens, 1));
  const Recording recording;
  run_in_process(1, [&](Transport& transport) {
    RingAttention ring(options, transport);
    EXPECT_THROW(ring.forward({}, {}, {}, {}, {}), ConfigError);
  });
  const std::vector<EventRecord> events = recording.events();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, EventKind::pass);
  EXPECT_TRUE(events[0].failed);
}

}  // namespace
}  // namespace annulus::test
