#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "annulus/device.h"

namespace annulus {

// Total and free memory of a device in bytes, as this process sees them.
struct MemoryState {
  std::int64_t total = 0;
  std::int64_t free = 0;
};
[[nodiscard]] std::optional<MemoryState> memory_state(const Device& device);
// The same, up to 0.1 s old. Cheap enough for every call.
[[nodiscard]] std::optional<MemoryState> recent_memory_state(const Device& device);

// Registers how to query devices of one kind; a backend does this when it is made, tests set their
// own. Forgets recent results and returns the previous probe. The CPU's default is null: ask the
// operating system.
using MemoryProbe = std::optional<MemoryState> (*)(const Device& device);
MemoryProbe set_memory_probe(Device::Kind kind, MemoryProbe probe);

// The idle memory that a pool of `capacity` items may keep between calls:
//
//   free memory         items      bytes
//   above half          capacity   a quarter of all memory
//   10 % to half        capacity   an eighth
//   below 10 %          a quarter  a thirty-second
//
// A `most_bytes` other than kShareOfMemory replaces the eighth. At least one item is kept. If the
// device reports no memory state, the middle row applies without a limit on bytes.
struct Allowance {
  std::size_t items = 0;
  std::int64_t bytes = 0;
};
inline constexpr std::int64_t kShareOfMemory = -1;
[[nodiscard]] Allowance idle_allowance(std::size_t capacity, std::int64_t most_bytes,
                                       const std::optional<MemoryState>& state);

}  // namespace annulus
