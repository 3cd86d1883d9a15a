#include "cli/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <compare>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace annulus::cli {
namespace {

// Numbers above all ranks, for events that belong to no rank. Perfetto would take -1 for 0.
constexpr int kNobody = 999'999;
constexpr int kFirstTrack = 1'000'000;

struct Track {
  int rank = -1;
  EventKind kind = EventKind::pass;
  int lane = 0;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy takes the comparison with 0 for a pointer's
  auto operator<=>(const Track&) const = default;
};

int process_of(int rank) { return rank < 0 ? kNobody : rank; }

// Steps are on the track of passes.
EventKind track_kind(const EventRecord& event) {
  return event.kind == EventKind::step ? EventKind::pass : event.kind;
}

double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000.0; }

Json metadata(const char* what, int rank, int track, const char* key, Json value) {
  return {{"ph", "M"},
          {"name", what},
          {"pid", process_of(rank)},
          {"tid", track},
          {"args", {{key, std::move(value)}}}};
}

}  // namespace

std::string chrome_trace(const Recording& recording, const Json& facts) {
  const std::vector<EventRecord>& events = recording.events();
  const std::vector<int> lanes = event_lanes(events);
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const EventRecord& event : events) origin = std::min(origin, event.begin_ns);

  const auto track_of = [&](std::size_t i) {
    return Track{events[i].rank, track_kind(events[i]), lanes[i]};
  };
  // Numbered over all ranks: Perfetto names threads by their number, whatever their process.
  std::map<Track, int> tracks;
  for (std::size_t i = 0; i < events.size(); ++i) tracks.emplace(track_of(i), 0);
  int next = kFirstTrack;
  for (auto& [track, number] : tracks) number = next++;

  Json list = Json::array();
  std::set<int> ranks;
  for (const auto& [track, number] : tracks) ranks.insert(track.rank);
  for (const int rank : ranks) {
    list.push_back(metadata("process_name", rank, process_of(rank), "name",
                            rank < 0 ? "process" : fmt::format("rank {}", rank)));
    list.push_back(metadata("process_sort_index", rank, process_of(rank), "sort_index", rank));
  }
  for (const auto& [track, number] : tracks) {
    const char* kind = name_of(track.kind);
    list.push_back(
        metadata("thread_name", track.rank, number, "name",
                 track.lane == 0 ? std::string(kind) : fmt::format("{} {}", kind, track.lane + 1)));
    list.push_back(metadata("thread_sort_index", track.rank, number, "sort_index", number));
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
                    {"pid", process_of(event.rank)},
                    {"tid", tracks.at(track_of(i))},
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
