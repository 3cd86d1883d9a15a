#include "cli/report.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

namespace annulus::cli {

extern const char* const kReportPage;  // report.html, put there by CMake

namespace {

// A page with more events takes seconds to open. The latest ones are shown; sums include all.
constexpr std::size_t kMostDrawn = 60'000;

struct RankTimes {
  std::int64_t pass = 0;
  std::int64_t compute = 0;
  std::int64_t wait = 0;
};

// Counts only events inside passes; making an executor records some, too.
std::vector<RankTimes> times_of(const std::vector<EventRecord>& events, int ranks) {
  std::vector<RankTimes> times(static_cast<std::size_t>(ranks));
  std::vector<std::map<std::int64_t, std::int64_t>> passes(times.size());  // begin to end
  for (const EventRecord& event : events) {
    if (event.kind != EventKind::pass) continue;
    const auto rank = static_cast<std::size_t>(event.rank);
    passes[rank][event.begin_ns] = event.end_ns;
    times[rank].pass += event.end_ns - event.begin_ns;
  }
  for (const EventRecord& event : events) {
    if (event.kind != EventKind::compute && event.kind != EventKind::wait) continue;
    const auto rank = static_cast<std::size_t>(event.rank);
    const auto after = passes[rank].upper_bound(event.begin_ns);
    if (after == passes[rank].begin() || std::prev(after)->second < event.end_ns) continue;
    (event.kind == EventKind::compute ? times[rank].compute : times[rank].wait) +=
        event.end_ns - event.begin_ns;
  }
  return times;
}

double seconds(std::int64_t nanoseconds) { return 1e-9 * static_cast<double>(nanoseconds); }

Json drawn_events(const std::vector<EventRecord>& events) {
  std::vector<EventRecord> latest = events;
  std::sort(latest.begin(), latest.end(),
            [](const EventRecord& a, const EventRecord& b) { return a.begin_ns < b.begin_ns; });
  if (latest.size() > kMostDrawn)
    latest.erase(latest.begin(), latest.end() - static_cast<std::ptrdiff_t>(kMostDrawn));
  const std::int64_t origin = latest.empty() ? 0 : latest.front().begin_ns;
  const std::vector<int> lanes = event_lanes(latest);
  Json list = Json::array();
  for (std::size_t i = 0; i < latest.size(); ++i) {
    const EventRecord& event = latest[i];
    // In the order in which report.html reads them.
    list.push_back({event.rank, static_cast<int>(event.kind), lanes[i],
                    static_cast<double>(event.begin_ns - origin) / 1000.0,
                    static_cast<double>(event.end_ns - event.begin_ns) / 1000.0,
                    std::string(event.name()), event.step, event.peer, event.bytes,
                    event.failed ? 1 : 0});
  }
  return list;
}

}  // namespace

Json report_data(const Recording& recording, const JobReport& job, const Json& facts) {
  const std::vector<EventRecord>& events = recording.events();
  const auto ranks = static_cast<int>(job.peak_bytes.size());
  Json data;
  data["facts"] = facts;
  data["dropped"] = recording.dropped();
  data["events_recorded"] = events.size();

  double computed = 0.0;
  double most = 0.0;
  RankTimes all;
  data["ranks"] = Json::array();
  for (const RankTimes& rank : times_of(events, ranks)) {
    data["ranks"].push_back({{"pass_seconds", seconds(rank.pass)},
                             {"compute_seconds", seconds(rank.compute)},
                             {"wait_seconds", seconds(rank.wait)}});
    computed += seconds(rank.compute);
    most = std::max(most, seconds(rank.compute));
    all.pass += rank.pass;
    all.wait += rank.wait;
  }
  // 1: all ranks compute equally long. The others wait for the slowest one.
  data["balance"] = most > 0.0 ? Json(computed / ranks / most) : Json();
  data["waited"] = all.pass > 0 ? Json(seconds(all.wait) / seconds(all.pass)) : Json();

  std::map<std::pair<int, int>, std::pair<std::int64_t, std::int64_t>> links;
  for (const EventRecord& event : events) {
    if (event.kind != EventKind::send) continue;
    auto& [bytes, messages] = links[{event.rank, event.peer}];
    bytes += event.bytes;
    ++messages;
  }
  data["links"] = Json::array();
  for (const auto& [link, sums] : links)
    data["links"].push_back({link.first, link.second, sums.first, sums.second});

  data["memory"] = Json::array();
  for (std::size_t rank = 0; rank < job.peak_bytes.size(); ++rank) {
    data["memory"].push_back({{"workspace", job.workspace_bytes[rank]},
                              {"tensors", job.peak_bytes[rank] - job.workspace_bytes[rank]}});
  }
  data["scratch_bytes"] = job.scratch_bytes;
  data["kinds"] = Json::array();
  for (int kind = 0; kind < kEventKinds; ++kind)
    data["kinds"].push_back(name_of(static_cast<EventKind>(kind)));
  data["events"] = drawn_events(events);
  return data;
}

std::string report_page(const Recording& recording, const JobReport& job, const Json& facts) {
  std::string text = to_text(report_data(recording, job, facts));
  // Within a script element "</" would end it, and "<!--" begin a comment.
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  std::string page = kReportPage;
  constexpr std::string_view kPlace = "\"ANNULUS_DATA\"";
  page.replace(page.find(kPlace), kPlace.size(), safe);
  return page;
}

}  // namespace annulus::cli
