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

// What is said on standard error, with the rank in front. Each level includes those before it.
enum class LogLevel : std::uint8_t { off, warning, info, debug };
[[nodiscard]] LogLevel log_level_from_name(const std::string& name);
[[nodiscard]] LogLevel level_of(EventKind kind);  // at which events of this kind are told
// "[rank 1/4] forward: 12.3 ms, 3.00 MiB sent"
[[nodiscard]] std::string log_line(const EventRecord& event, int ranks);

// What the ranks of a run do, recorded for a trace, a report or the log.
class Recording {
 public:
  // The stream of the process is on as long as this lives, if `wanted` or the level asks for it.
  Recording(const World& world, bool wanted, LogLevel level, int ranks);
  ~Recording();  // says what was not said yet: passes that have failed
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // On the thread of a rank: says what it has done since it was last asked.
  void log(int rank);
  // Collective: all events are then on rank 0, on one clock. Clocks of different machines are
  // compared by when their processes leave a meeting of all: as good as the network is fast.
  void collect(World& world);

  [[nodiscard]] const std::vector<EventRecord>& events() const { return events_; }
  [[nodiscard]] std::uint64_t dropped() const { return dropped_; }

 private:
  const LogLevel level_;
  const int ranks_;
  const int first_rank_;     // of this process: it also tells of what is nobody's in particular
  const int end_rank_;       // of this process, beyond the last one
  std::uint64_t begin_ = 0;  // of this recording in the stream
  std::mutex mutex_;         // of the log
  std::vector<std::uint64_t> told_;
  std::vector<EventRecord> events_;
  std::uint64_t dropped_ = 0;
};

}  // namespace annulus::cli
