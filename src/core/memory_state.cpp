#include "core/memory_state.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>

#include "core/machine.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kRecent(100);

std::atomic<MemoryProbe> probes[2];  // by Device::Kind

struct Recent {
  std::mutex mutex;
  struct Entry {
    Clock::time_point asked;
    std::optional<MemoryState> state;
  };
  std::map<std::pair<int, int>, Entry> entries;
};
// Never destroyed: executors may be dropped when a program ends.
Recent& recent() {
  static auto* const states = new Recent;
  return *states;
}

}  // namespace

std::optional<MemoryState> memory_state(const Device& device) {
  const MemoryProbe probe = probes[static_cast<std::size_t>(device.kind)].load();
  if (probe != nullptr) return probe(device);
  if (device.kind != Device::Kind::cpu) return std::nullopt;
  const std::optional<std::int64_t> total = usable_memory_bytes();
  const std::optional<std::int64_t> free = available_memory_bytes();
  if (!total || !free) return std::nullopt;
  return MemoryState{*total, *free};
}

std::optional<MemoryState> recent_memory_state(const Device& device) {
  const std::pair<int, int> key{static_cast<int>(device.kind), device.index};
  const Clock::time_point now = Clock::now();
  {
    const std::lock_guard lock(recent().mutex);
    const auto found = recent().entries.find(key);
    if (found != recent().entries.end() && now - found->second.asked < kRecent)
      return found->second.state;
  }
  const std::optional<MemoryState> state = memory_state(device);  // unlocked: the probe may block
  const std::lock_guard lock(recent().mutex);
  recent().entries[key] = {now, state};
  return state;
}

MemoryProbe set_memory_probe(Device::Kind kind, MemoryProbe probe) {
  const MemoryProbe before = probes[static_cast<std::size_t>(kind)].exchange(probe);
  const std::lock_guard lock(recent().mutex);
  recent().entries.clear();
  return before;
}

Allowance idle_allowance(std::size_t capacity, std::int64_t most_bytes,
                         const std::optional<MemoryState>& state) {
  constexpr std::int64_t kShare = 8;
  constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
  if (!state || state->total <= 0) {
    return {capacity, most_bytes == kShareOfMemory ? kNoLimit : most_bytes};
  }
  const std::int64_t usual = most_bytes == kShareOfMemory ? state->total / kShare : most_bytes;
  const double free = static_cast<double>(state->free) / static_cast<double>(state->total);
  if (free < 0.1) return {std::max<std::size_t>(1, capacity / 4), usual / 4};
  if (free > 0.5) return {capacity, usual > kNoLimit / 2 ? kNoLimit : 2 * usual};
  return {capacity, usual};
}

}  // namespace annulus
