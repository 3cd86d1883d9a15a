#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "annulus/events.h"

namespace annulus {
namespace {

struct Lane {
  std::int64_t busy_until = 0;  // end of the last event in this lane
  std::int64_t pass_until = 0;  // end of the pass that contains it
  bool empty = true;

  [[nodiscard]] bool takes(const EventRecord& event) const {
    if (empty) return true;
    const std::int64_t free =
        event.kind == EventKind::pass ? std::max(busy_until, pass_until) : busy_until;
    if (event.begin_ns < free) return false;
    // A step either lies within the lane's pass or does not overlap it.
    return event.kind != EventKind::step || event.begin_ns >= pass_until ||
           event.end_ns <= pass_until;
  }
  void put(const EventRecord& event) {
    if (event.kind == EventKind::pass) {
      pass_until = event.end_ns;
      busy_until = event.begin_ns;
    } else {
      busy_until = event.end_ns;
    }
    empty = false;
  }
};

// Passes and their steps share one track.
std::pair<std::int32_t, EventKind> track_of(const EventRecord& event) {
  return {event.rank, event.kind == EventKind::step ? EventKind::pass : event.kind};
}

}  // namespace

std::vector<int> event_lanes(std::span<const EventRecord> events) {
  std::vector<std::size_t> order(events.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Earlier events first. Of those that begin together: passes before their steps, then shorter
  // ones first, because an event without duration may begin where the next one does.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const auto key = [&](std::size_t i) {
      return std::tuple(events[i].begin_ns, events[i].kind != EventKind::pass, events[i].end_ns);
    };
    return key(a) < key(b);
  });
  std::map<std::pair<std::int32_t, EventKind>, std::vector<Lane>> tracks;
  std::vector<int> lanes(events.size());
  for (const std::size_t i : order) {
    std::vector<Lane>& track = tracks[track_of(events[i])];
    auto lane = std::find_if(track.begin(), track.end(),
                             [&](const Lane& one) { return one.takes(events[i]); });
    if (lane == track.end()) lane = track.insert(track.end(), Lane());
    lane->put(events[i]);
    lanes[i] = static_cast<int>(lane - track.begin());
  }
  return lanes;
}

}  // namespace annulus
