// What the tool keeps, says and draws of the events of a run.

#include "cli/recording.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "annulus/events.h"
#include "cli/options.h"
#include "cli/trace.h"
#include "cli/world.h"

namespace annulus::cli {
namespace {

// Perfetto takes a negative process for 0, and names threads by their number, whatever their
// process.
TEST(Trace, ProcessesAndTracksHaveNumbersOfTheirOwn) {
  ProblemFlags flags;
  World world(flags, "");
  Recording recording(world, true, LogLevel::off, 2);
  for (const int rank : {-1, 0, 1}) {
    record_event(EventKind::pass, "forward", rank);
    record_event(EventKind::cache, "evict", rank);
  }
  recording.collect(world);
  const Json trace = Json::parse(chrome_trace(recording, Json::object()));
  std::map<std::string, int> processes;
  std::set<int> named;
  std::set<int> drawn;
  for (const Json& event : trace["traceEvents"]) {
    const int track = event["tid"].get<int>();
    if (event["name"] == "process_name")
      processes[event["args"]["name"].get<std::string>()] = event["pid"].get<int>();
    if (event["name"] == "thread_name") {
      EXPECT_TRUE(named.insert(track).second) << track;
    }
    if (event["ph"] == "X") drawn.insert(track);
  }
  EXPECT_EQ(processes["rank 0"], 0);
  EXPECT_EQ(processes["rank 1"], 1);
  EXPECT_GT(processes["process"], 1);
  EXPECT_EQ(named.size(), 6U);
  EXPECT_EQ(named, drawn);
  for (const auto& [name, process] : processes) EXPECT_FALSE(named.contains(process)) << name;
}

TEST(Recording, SaysWhatWasLost) {
  ProblemFlags flags;
  World world(flags, "");
  testing::internal::CaptureStderr();
  {
    Recording recording(world, true, LogLevel::warning, 2);
    event_stream().start(16);  // of 262,144: a recording has room for more than a test should write
    for (int i = 0; i < 16 + 7; ++i) record_event(EventKind::cache, "hit", 1);
    recording.collect(world);
    EXPECT_EQ(recording.dropped(), 7U);
    const Json trace = Json::parse(chrome_trace(recording, Json::object()));
    EXPECT_EQ(trace["otherData"]["dropped_events"], 7);
    recording.log(1);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("[rank 1/2] 7 events were overwritten"), std::string::npos) << said;
}

TEST(Recording, SaysInTheEndWhichPassHasFailed) {
  ProblemFlags flags;
  World world(flags, "");
  testing::internal::CaptureStderr();
  try {
    const Recording recording(world, false, LogLevel::info, 2);
    const EventScope pass(EventKind::pass, "forward", 1);
    throw std::runtime_error("a rank is gone");
  } catch (const std::runtime_error&) {
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(said.starts_with("annulus: [rank 1/2] forward: ")) << said;
  EXPECT_TRUE(said.ends_with(", failed\n")) << said;
}

}  // namespace
}  // namespace annulus::cli
