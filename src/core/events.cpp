#include "annulus/events.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>

#include "annulus/error.h"

namespace annulus {
namespace {

constexpr std::array<const char*, kEventKinds> kNames = {"pass",    "step", "compute", "send",
                                                         "receive", "wait", "cache",   "recovery"};

}  // namespace

const char* name_of(EventKind kind) noexcept { return kNames[static_cast<std::size_t>(kind)]; }

EventKind event_kind_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<EventKind>(i);
  }
  throw ConfigError("event kind: found '" + std::string(name) +
                    "', expected pass, step, compute, send, receive, wait, cache or recovery");
}

void EventRecord::set_name(std::string_view name) {
  std::size_t size = std::min(name.size(), text.size() - 1);
  if (size < name.size()) {
    // Continuation bytes belong to the character before them.
    while (size > 0 && (static_cast<unsigned char>(name[size]) & 0xC0U) == 0x80U) --size;
  }
  text.fill('\0');
  std::copy_n(name.begin(), size, text.begin());
}

void EventStream::start(std::size_t capacity) {
  if (capacity < 1) throw ConfigError("event stream: capacity is 0, expected at least 1");
  const std::lock_guard lock(mutex_);
  if (capacity != records_.size()) {
    std::vector<EventRecord> records(capacity);
    first_ = std::max(first_, next_ - std::min<std::uint64_t>(next_, capacity));
    for (std::uint64_t s = first_; s < next_; ++s)
      records[s % capacity] = records_[s % records_.size()];
    records_.swap(records);
  }
  on_.store(true, std::memory_order_relaxed);
}

void EventStream::clear() {
  const std::lock_guard lock(mutex_);
  first_ = cleared_ = next_;
  totals_.clear();
}

void EventStream::add(const EventRecord& record) noexcept {
  if (!on()) return;
  const std::lock_guard lock(mutex_);
  EventRecord& kept = records_[next_ % records_.size()];
  kept = record;
  kept.sequence = next_++;
  if (next_ - first_ > records_.size()) first_ = next_ - records_.size();
  try {
    add_to_totals(record);
  } catch (const std::bad_alloc&) {
    // The event itself is recorded; only the totals miss it.
  }
}

void EventStream::add_to_totals(const EventRecord& record) {
  const bool message = record.kind == EventKind::send || record.kind == EventKind::receive;
  EventRecord like;
  like.kind = record.kind;
  like.rank = record.rank;
  like.peer = message ? record.peer : -1;
  like.text = record.text;
  Key key{like.rank, like.kind, like.peer, like.text};
  auto found = totals_.find(key);
  if (found == totals_.end() && totals_.size() >= kMostTotals) {
    // Further totals are summed per kind only, so that there are few of them.
    like.rank = -1;
    like.peer = -1;
    like.set_name("other");
    key = {like.rank, like.kind, like.peer, like.text};
    found = totals_.find(key);
  }
  if (found == totals_.end()) found = totals_.emplace(key, EventTotal{.like = like}).first;
  EventTotal& total = found->second;
  ++total.count;
  total.failures += record.failed ? 1 : 0;
  total.nanoseconds += record.end_ns - record.begin_ns;
  total.bytes += record.bytes;
}

EventStream::Batch EventStream::read(std::uint64_t from) const {
  Batch batch;
  const std::lock_guard lock(mutex_);
  batch.next = next_;
  const std::uint64_t begin = std::min(std::max(from, first_), next_);
  const std::uint64_t expected = std::max(from, cleared_);
  batch.dropped = begin > expected ? begin - expected : 0;
  batch.events.reserve(next_ - begin);
  for (std::uint64_t s = begin; s < next_; ++s)
    batch.events.push_back(records_[s % records_.size()]);
  return batch;
}

std::vector<EventTotal> EventStream::totals() const {
  std::vector<EventTotal> out;
  const std::lock_guard lock(mutex_);
  out.reserve(totals_.size());
  for (const auto& [key, total] : totals_) out.push_back(total);
  return out;
}

std::uint64_t EventStream::next() const {
  const std::lock_guard lock(mutex_);
  return next_;
}

std::size_t EventStream::capacity() const {
  const std::lock_guard lock(mutex_);
  return records_.size();
}

std::int64_t EventStream::now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

EventStream& event_stream() noexcept {
  // Never destroyed, because threads may still write while the process exits. Constructed in place,
  // so that nothing can fail.
  alignas(EventStream) static std::byte place[sizeof(EventStream)];
  static auto* const stream = [] {
#if defined(__linux__)
    // A forked child starts with its own stream, which is empty and off. It cannot use its
    // parent's: a thread of the parent may have held the lock at the fork.
    pthread_atfork(nullptr, nullptr, [] { ::new (place) EventStream; });
#endif
    return ::new (place) EventStream;
  }();
  return *stream;
}

void EventScope::begin(EventKind kind, std::string_view name, int rank, int step,
                       std::int64_t bytes) noexcept {
  exceptions_ = std::uncaught_exceptions();
  record_.kind = kind;
  record_.set_name(name);
  record_.rank = rank;
  record_.step = step;
  record_.bytes = bytes;
  record_.begin_ns = EventStream::now_ns();
}

void EventScope::end() noexcept {
  record_.end_ns = EventStream::now_ns();
  record_.failed = std::uncaught_exceptions() > exceptions_;
  event_stream().add(record_);
}

void record_event(EventKind kind, std::string_view name, int rank, std::int64_t bytes) noexcept {
  if (!event_stream().on()) return;
  EventRecord record;
  record.kind = kind;
  record.set_name(name);
  record.rank = rank;
  record.bytes = bytes;
  record.begin_ns = record.end_ns = EventStream::now_ns();
  event_stream().add(record);
}

}  // namespace annulus
