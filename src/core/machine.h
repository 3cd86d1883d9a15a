#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

// What the operating system reports about the machine. None of these functions fail: what is
// unknown is absent.
[[nodiscard]] std::string cpu_name();                   // "AMD EPYC 9B14", or "unknown CPU"
[[nodiscard]] std::vector<std::string> cpu_features();  // only those that matter to the kernels

// Which CPU this is, as CPUID tells it: {"GenuineIntel", 6, 143, 8} is a Sapphire Rapids. Empty and
// zero where there is no CPUID.
struct CpuIdentity {
  std::string vendor;
  int family = 0;
  int model = 0;
  int stepping = 0;
};
[[nodiscard]] CpuIdentity cpu_identity();
// `signature` is EAX of CPUID leaf 1: extended fields and all.
[[nodiscard]] CpuIdentity decode_cpu_identity(std::string vendor, std::uint32_t signature);

[[nodiscard]] std::optional<std::int64_t> total_memory_bytes();
// Memory that can be allocated without swapping: MemAvailable, or less if a control group (a
// container) allows less.
[[nodiscard]] std::optional<std::int64_t> available_memory_bytes();

// Memory that this process may use in total: the machine's, or less if a control group allows less.
[[nodiscard]] std::optional<std::int64_t> usable_memory_bytes();

// The number of threads that can compute at the same time: the hardware threads, or fewer if this
// thread's affinity mask (taskset, a batch system) or a control group (a container) allows fewer.
// At least 1.
[[nodiscard]] int usable_cpus();
// The CPU time that the control groups of this process and their ancestors allow, in CPUs and
// rounded up; absent if there is no limit. Reads version 2 (cpu.max) or 1 (cpu.cfs_quota_us). Tests
// pass another `root`, which contains proc/self/cgroup and sys/fs/cgroup.
[[nodiscard]] std::optional<int> control_group_cpus(const std::filesystem::path& root = "/");

}  // namespace annulus
