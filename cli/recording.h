#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "annulus/events.h"
#include "cli/console.h"
#include "cli/world.h"

namespace annulus::cli {

// What is logged on standard error, with the rank in front. Each level includes those before it.
enum class LogLevel : std::uint8_t { off, warning, info, debug };
[[nodiscard]] LogLevel log_level_from_name(const std::string& name);
[[nodiscard]] LogLevel level_of(EventKind kind);  // at which events of this kind are logged
// "[rank 1/4] forward: 12.3 ms, 3.00 MiB sent"
[[nodiscard]] std::string log_line(const EventRecord& event, int ranks);

// Records what the ranks of a run do, for a trace, a report or the log.
class Recording {
 public:
  // Turns the event stream of the process on for its lifetime, if `wanted` or the level needs it.
  Recording(const World& world, bool wanted, LogLevel level, int ranks);
  ~Recording();  // logs the remaining events: those of passes that have failed
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Called on the thread of a rank: logs what it has done since the last call.
  void log(int rank);
  // Collective: gathers all events on rank 0, on one clock. Clocks of different machines are
  // compared when their processes leave a barrier, so they are as exact as the network is fast.
  void collect(World& world);

  [[nodiscard]] const std::vector<EventRecord>& events() const { return events_; }
  [[nodiscard]] std::uint64_t dropped() const { return dropped_; }

 private:
  const LogLevel level_;
  const int ranks_;
  const int first_rank_;     // of this process: also logs events that belong to no rank
  const int end_rank_;       // of this process, beyond the last one
  std::uint64_t begin_ = 0;  // of this recording in the stream
  std::mutex mutex_;         // of the log
  std::vector<std::uint64_t> told_;
  std::vector<EventRecord> events_;
  std::uint64_t dropped_ = 0;
};

}  // namespace annulus::cli
