#include "cli/recording.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <new>
#include <utility>

namespace annulus::cli {
namespace {

// 18 MiB: a pass of a ring of 64 leaves 30,000.
constexpr std::size_t kCapacity = 262'144;

// Processes that read the same text share a clock.
std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

Json to_json(const EventRecord& event) {
  return {static_cast<int>(event.kind),
          std::string(event.name()),
          event.begin_ns,
          event.end_ns,
          event.bytes,
          event.rank,
          event.step,
          event.peer,
          event.failed};
}

EventRecord event_from(const Json& json, std::int64_t shift) {
  EventRecord event;
  event.kind = static_cast<EventKind>(json[0].get<int>());
  event.set_name(json[1].get<std::string>());
  event.begin_ns = json[2].get<std::int64_t>() + shift;
  event.end_ns = json[3].get<std::int64_t>() + shift;
  event.bytes = json[4].get<std::int64_t>();
  event.rank = json[5].get<int>();
  event.step = json[6].get<int>();
  event.peer = json[7].get<int>();
  event.failed = json[8].get<bool>();
  return event;
}

}  // namespace

LogLevel log_level_from_name(const std::string& name) {
  if (name == "debug") return LogLevel::debug;
  if (name == "info") return LogLevel::info;
  return name == "warning" ? LogLevel::warning : LogLevel::off;
}

LogLevel level_of(EventKind kind) {
  switch (kind) {
    case EventKind::recovery:
      return LogLevel::warning;
    case EventKind::pass:
    case EventKind::cache:
      return LogLevel::info;
    default:
      return LogLevel::debug;
  }
}

std::string log_line(const EventRecord& event, int ranks) {
  std::string line = event.rank >= 0 ? fmt::format("[rank {}/{}] ", event.rank, ranks) : "";
  if (event.kind != EventKind::pass) line += fmt::format("{} ", name_of(event.kind));
  if (event.kind != EventKind::step) line += event.name();
  if (event.step >= 0)
    line += fmt::format("{}{}", event.kind == EventKind::step ? "" : ", step ", event.step);
  if (event.kind == EventKind::send) line += fmt::format(" to rank {}", event.peer);
  if (event.kind == EventKind::receive) line += fmt::format(" from rank {}", event.peer);
  line += ": " + format_seconds(event.seconds());
  if (event.bytes > 0) {
    line += ", " + format_bytes(event.bytes) + (event.kind == EventKind::pass ? " sent" : "");
  }
  return line + (event.failed ? ", failed" : "");
}

Recording::Recording(const World& world, bool wanted, LogLevel level, int ranks)
    : level_(level),
      ranks_(ranks),
      first_rank_(world.rank()),
      end_rank_(world.is_mpi() ? first_rank_ + 1 : ranks),
      told_(static_cast<std::size_t>(ranks)) {
  if (!wanted && level == LogLevel::off) return;
  begin_ = event_stream().next();
  std::fill(told_.begin(), told_.end(), begin_);
  event_stream().start(kCapacity);
}

Recording::~Recording() {
  event_stream().stop();
  try {
    for (int rank = first_rank_; rank < end_rank_; ++rank) log(rank);
  } catch (const std::bad_alloc&) {
    // The error that ended the run is reported elsewhere.
  }
}

void Recording::log(int rank) {
  if (level_ == LogLevel::off) return;
  std::uint64_t& told = told_[static_cast<std::size_t>(rank)];
  const EventStream::Batch batch = event_stream().read(told);
  told = batch.next;
  std::string text;
  if (batch.dropped > 0) {
    text += fmt::format(
        "annulus: [rank {}/{}] {} events were overwritten before this rank's were told\n", rank,
        ranks_, batch.dropped);
  }
  for (const EventRecord& event : batch.events) {
    const bool mine = event.rank == rank || (event.rank < 0 && rank == first_rank_);
    if (mine && level_of(event.kind) <= level_)
      text += "annulus: " + log_line(event, ranks_) + "\n";
  }
  // In one call, so that lines of different ranks do not mix.
  const std::lock_guard lock(mutex_);
  std::fputs(text.c_str(), stderr);
}

void Recording::collect(World& world) {
  EventStream::Batch batch = event_stream().read(begin_);
  events_ = std::move(batch.events);
  dropped_ = batch.dropped;
  if (!world.is_mpi()) return;
  world.meet();
  const std::int64_t met_ns = EventStream::now_ns();
  Json mine = {boot_id(), met_ns, dropped_, Json::array()};
  for (const EventRecord& event : events_) mine[3].push_back(to_json(event));
  const std::vector<std::string> all = world.gather(to_text(mine));
  events_.clear();
  dropped_ = 0;
  for (const std::string& text : all) {
    const Json json = Json::parse(text);
    const bool same_clock = json[0] == mine[0] && !json[0].get<std::string>().empty();
    const std::int64_t shift = same_clock ? 0 : met_ns - json[1].get<std::int64_t>();
    dropped_ += json[2].get<std::uint64_t>();
    for (const Json& event : json[3]) events_.push_back(event_from(event, shift));
  }
}

}  // namespace annulus::cli
