#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

// What the operating system says about the machine. Nothing here fails: what cannot be found out is
// absent.
[[nodiscard]] std::string cpu_name();                   // "AMD EPYC 9B14", or "unknown CPU"
[[nodiscard]] std::vector<std::string> cpu_features();  // of those that matter to the kernels
[[nodiscard]] std::optional<std::int64_t> total_memory_bytes();
// What can be allocated without swapping: MemAvailable, or less where a control group (a container)
// allows less.
[[nodiscard]] std::optional<std::int64_t> available_memory_bytes();

}  // namespace annulus
