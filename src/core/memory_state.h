#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "annulus/device.h"

namespace annulus {

// What a device has, in bytes: for this process, whoever uses the rest.
struct MemoryState {
  std::int64_t total = 0;
  std::int64_t free = 0;
};
[[nodiscard]] std::optional<MemoryState> memory_state(const Device& device);
// The same, up to a tenth of a second old: for what is asked with every call.
[[nodiscard]] std::optional<MemoryState> recent_memory_state(const Device& device);

// Who is asked about devices of a kind: a backend says so when it is made. Tests set their own.
// Forgets what is recent; returns who was asked before. Null for the CPU: the operating system.
using MemoryProbe = std::optional<MemoryState> (*)(const Device& device);
MemoryProbe set_memory_probe(Device::Kind kind, MemoryProbe probe);

// How much may lie idle between calls, in a pool that may have `capacity` items:
//
//   free memory         items      bytes
//   above half          capacity   a quarter of all memory
//   10 % to half        capacity   an eighth
//   below 10 %          a quarter  a thirty-second
//
// `most_bytes` stands for the eighth where it is not kShareOfMemory. At least one item. Where the
// device does not tell, the row in the middle, without a limit to a share.
struct Allowance {
  std::size_t items = 0;
  std::int64_t bytes = 0;
};
inline constexpr std::int64_t kShareOfMemory = -1;
[[nodiscard]] Allowance idle_allowance(std::size_t capacity, std::int64_t most_bytes,
                                       const std::optional<MemoryState>& state);

}  // namespace annulus
