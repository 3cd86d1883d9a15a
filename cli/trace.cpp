#include "cli/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

namespace annulus::cli {
namespace {

constexpr int kMostLanes = 10'000;  // of a kind: more than there are ranks to talk to

// Steps are on the track of passes.
EventKind track_kind(const EventRecord& event) {
  return event.kind == EventKind::step ? EventKind::pass : event.kind;
}

double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000.0; }

Json metadata(const char* what, int rank, int track, const char* key, Json value) {
  return {{"ph", "M"},
          {"name", what},
          {"pid", rank},
          {"tid", track},
          {"args", {{key, std::move(value)}}}};
}

}  // namespace

std::string chrome_trace(const Recording& recording, const Json& facts) {
  const std::vector<EventRecord>& events = recording.events();
  const std::vector<int> lanes = event_lanes(events);
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const EventRecord& event : events) origin = std::min(origin, event.begin_ns);

  std::set<int> ranks;
  std::set<std::pair<int, int>> tracks;  // rank and number
  Json list = Json::array();
  const auto track_of = [&](std::size_t i) {
    return static_cast<int>(track_kind(events[i])) * kMostLanes + lanes[i];
  };
  for (std::size_t i = 0; i < events.size(); ++i) {
    ranks.insert(events[i].rank);
    tracks.emplace(events[i].rank, track_of(i));
  }
  for (const int rank : ranks) {
    list.push_back(metadata("process_name", rank, 0, "name",
                            rank < 0 ? "process" : fmt::format("rank {}", rank)));
    list.push_back(metadata("process_sort_index", rank, 0, "sort_index", rank));
  }
  for (const auto& [rank, track] : tracks) {
    const int lane = track % kMostLanes;
    const char* kind = name_of(static_cast<EventKind>(track / kMostLanes));
    list.push_back(metadata("thread_name", rank, track, "name",
                            lane == 0 ? std::string(kind) : fmt::format("{} {}", kind, lane + 1)));
    list.push_back(metadata("thread_sort_index", rank, track, "sort_index", track));
  }
  for (std::size_t i = 0; i < events.size(); ++i) {
    const EventRecord& event = events[i];
    Json arguments = Json::object();
    if (event.step >= 0) arguments["step"] = event.step;
    if (event.peer >= 0) arguments["peer"] = event.peer;
    if (event.bytes > 0) arguments["bytes"] = event.bytes;
    if (event.failed) arguments["failed"] = true;
    list.push_back({{"ph", "X"},
                    {"name", event.kind == EventKind::step ? fmt::format("step {}", event.step)
                                                           : std::string(event.name())},
                    {"cat", name_of(event.kind)},
                    {"pid", event.rank},
                    {"tid", track_of(i)},
                    {"ts", microseconds(event.begin_ns - origin)},
                    {"dur", microseconds(event.end_ns - event.begin_ns)},
                    {"args", std::move(arguments)}});
  }
  Json trace;
  trace["traceEvents"] = std::move(list);
  trace["displayTimeUnit"] = "ms";
  trace["otherData"] = facts;
  trace["otherData"]["dropped_events"] = recording.dropped();
  return to_text(trace) + "\n";
}

}  // namespace annulus::cli
