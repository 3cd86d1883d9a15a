#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

namespace annulus {

// Kinds of events that a process records. A pass has steps; a step computes and exchanges messages.
// `send` and `receive` last from posting a message until the host knows that it has arrived, `wait`
// as long as the host is blocked. `cache` events come from caches of executors, `recovery` events
// from attempts to save memory.
enum class EventKind : std::uint8_t { pass, step, compute, send, receive, wait, cache, recovery };
inline constexpr int kEventKinds = 8;
[[nodiscard]] const char* name_of(EventKind kind) noexcept;
[[nodiscard]] EventKind event_kind_from_name(std::string_view name);  // ConfigError

// Of fixed size. Times are the host's. On a device with queued work (CUDA), `compute` is the time
// that enqueuing took; the device computes later.
struct EventRecord {
  std::uint64_t sequence = 0;  // given by the stream: 0, 1, 2, ...
  std::int64_t begin_ns = 0;   // of std::chrono::steady_clock
  std::int64_t end_ns = 0;
  std::int64_t bytes = 0;
  std::int32_t rank = -1;  // -1: not known; so are step and peer
  std::int32_t step = -1;
  std::int32_t peer = -1;
  EventKind kind = EventKind::pass;
  bool failed = false;  // it ended with an exception
  std::array<char, 26> text{};

  [[nodiscard]] std::string_view name() const { return text.data(); }
  void set_name(std::string_view name);  // truncated to what fits, between UTF-8 characters
  [[nodiscard]] double seconds() const { return 1e-9 * static_cast<double>(end_ns - begin_ns); }
};
static_assert(sizeof(EventRecord) == 72);

// Sums over all events since clear(), including those that the stream has overwritten. `peer` is
// set for messages, else -1.
struct EventTotal {
  EventRecord like;  // kind, rank, peer and name
  std::uint64_t count = 0;
  std::uint64_t failures = 0;
  std::int64_t nanoseconds = 0;
  std::int64_t bytes = 0;
};

// The latest events of a process. Bounded, and off until started. Any thread may write and read;
// every reader keeps its own position. When the stream is full the oldest events are overwritten,
// and readers learn how many they missed.
class EventStream {
 public:
  static constexpr std::size_t kCapacity = 65'536;    // 4.5 MiB
  static constexpr std::size_t kMostTotals = 16'384;  // further ones are summed as "other"

  // Check this first: recording costs nothing while it is false.
  [[nodiscard]] bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  // Starting again with another capacity keeps the latest events. ConfigError for 0.
  void start(std::size_t capacity = kCapacity);
  void stop() noexcept { on_.store(false, std::memory_order_relaxed); }  // what it has stays
  void clear();  // events and totals; sequence numbers go on

  // Does nothing while the stream is off.
  void add(const EventRecord& record) noexcept;

  struct Batch {
    std::vector<EventRecord> events;
    std::uint64_t next = 0;     // where to continue reading
    std::uint64_t dropped = 0;  // overwritten since `from`
  };
  [[nodiscard]] Batch read(std::uint64_t from = 0) const;
  [[nodiscard]] std::vector<EventTotal> totals() const;
  [[nodiscard]] std::uint64_t next() const;  // sequence number of the next event
  [[nodiscard]] std::size_t capacity() const;

  [[nodiscard]] static std::int64_t now_ns() noexcept;

 private:
  using Key = std::tuple<std::int32_t, EventKind, std::int32_t, std::array<char, 26>>;
  void add_to_totals(const EventRecord& record);

  std::atomic<bool> on_{false};
  mutable std::mutex mutex_;          // innermost: no other lock is taken under it
  std::vector<EventRecord> records_;  // event s is at s mod capacity
  std::uint64_t first_ = 0;           // oldest that is kept
  std::uint64_t cleared_ = 0;         // earlier ones were cleared, not overwritten
  std::uint64_t next_ = 0;
  std::map<Key, EventTotal> totals_;
};

// The process's event stream, to which the whole library writes. A forked child has its own, which
// is off.
[[nodiscard]] EventStream& event_stream() noexcept;

// An event that lasts as long as this object. It has failed if an exception ends it.
class EventScope {
 public:
  EventScope(EventKind kind, std::string_view name, int rank, int step = -1,
             std::int64_t bytes = 0) noexcept
      : on_(event_stream().on()) {
    if (on_) begin(kind, name, rank, step, bytes);
  }
  ~EventScope() {
    if (on_) end();
  }
  EventScope(const EventScope&) = delete;
  EventScope& operator=(const EventScope&) = delete;

  void set_bytes(std::int64_t bytes) { record_.bytes = bytes; }

 private:
  void begin(EventKind kind, std::string_view name, int rank, int step,
             std::int64_t bytes) noexcept;
  void end() noexcept;

  const bool on_;
  int exceptions_ = 0;
  EventRecord record_;
};

// An event without duration: record_event(EventKind::cache, "evict", rank, bytes).
void record_event(EventKind kind, std::string_view name, int rank, std::int64_t bytes = 0) noexcept;

// For drawing: lanes 0, 1, ... on the track of each rank and kind, so that no two events overlap.
// Passes and their steps share a track, on which steps lie within passes.
[[nodiscard]] std::vector<int> event_lanes(std::span<const EventRecord> events);

}  // namespace annulus
