#include "core/machine.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

#include <cstring>
#endif
#if defined(__linux__)
#include <sched.h>

#include <cerrno>
#endif

namespace annulus {
namespace {

// The value behind "key" in a file of "key: value" or "key value" lines.
std::optional<std::string> find_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(" \t:", key.size());
    if (begin == key.size() || begin == std::string::npos) continue;
    return line.substr(begin);
  }
  return std::nullopt;
}

std::optional<std::int64_t> parse_integer(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  std::istringstream stream(*text);
  std::int64_t value = 0;
  if (!(stream >> value)) return std::nullopt;  // "max": no limit
  return value;
}

std::optional<std::int64_t> meminfo_bytes(std::string_view key) {
  const std::optional<std::int64_t> kibibytes = parse_integer(find_value("/proc/meminfo", key));
  if (!kibibytes) return std::nullopt;
  return *kibibytes * 1024;
}

std::optional<std::int64_t> read_integer(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return parse_integer(line);
}

// Memory left in this process's control group. The file cache counts as used there, but the kernel
// frees it under pressure.
std::optional<std::int64_t> control_group_bytes() {
  const std::optional<std::int64_t> most = read_integer("/sys/fs/cgroup/memory.max");
  const std::optional<std::int64_t> used = read_integer("/sys/fs/cgroup/memory.current");
  if (!most || !used) return std::nullopt;
  const std::int64_t cache =
      parse_integer(find_value("/sys/fs/cgroup/memory.stat", "inactive_file")).value_or(0);
  return std::max<std::int64_t>(0, *most - *used + cache);
}

// CPUs that the calling thread may run on.
std::optional<int> affinity_cpus() {
#if defined(__linux__)
  // The kernel refuses a mask shorter than its own, which may have more than the 1,024 CPUs of
  // cpu_set_t.
  for (int most = 1024; most <= (1 << 20); most *= 2) {
    cpu_set_t* const mask = CPU_ALLOC(static_cast<std::size_t>(most));
    if (mask == nullptr) return std::nullopt;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(most));
    const bool known = sched_getaffinity(0, bytes, mask) == 0;
    const bool too_short = !known && errno == EINVAL;
    const int count = known ? CPU_COUNT_S(bytes, mask) : 0;
    CPU_FREE(mask);
    if (known) return count;
    if (!too_short) return std::nullopt;
  }
#endif
  return std::nullopt;
}

// The CPU limit in one control group's directory. Version 2: cpu.max holds "50000 100000" (or "max
// 100000"). Version 1: two files; a quota of -1 means no limit.
std::optional<int> quota_of(const std::filesystem::path& group) {
  std::optional<std::int64_t> quota;
  std::optional<std::int64_t> period;
  if (std::ifstream file(group / "cpu.max"); file) {
    std::string first;
    std::string second;
    file >> first >> second;
    quota = parse_integer(first);
    period = parse_integer(second);
  } else {
    quota = read_integer(group / "cpu.cfs_quota_us");
    period = read_integer(group / "cpu.cfs_period_us");
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  const std::int64_t cpus = *quota / *period + (*quota % *period != 0 ? 1 : 0);
  return static_cast<int>(std::min<std::int64_t>(cpus, std::numeric_limits<int>::max()));
}

}  // namespace

std::string cpu_name() { return find_value("/proc/cpuinfo", "model name").value_or("unknown CPU"); }

std::vector<std::string> cpu_features() {
  // As Linux spells them: x86 "flags", Arm "Features".
  constexpr std::array<std::string_view, 14> kInteresting = {
      "sse2",        "sse4_2",   "avx",      "avx2",  "fma",     "f16c", "avx512f",
      "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "asimdhp", "bf16", "sve"};
  std::optional<std::string> line = find_value("/proc/cpuinfo", "flags");
  if (!line) line = find_value("/proc/cpuinfo", "Features");
  std::vector<std::string> found;
  std::istringstream words(line.value_or(""));
  for (std::string word; words >> word;) {
    if (std::find(kInteresting.begin(), kInteresting.end(), word) != kInteresting.end()) {
      found.push_back(word);
    }
  }
  return found;
}

CpuIdentity decode_cpu_identity(std::string vendor, std::uint32_t signature) {
  const auto field = [&](int first, int bits) {
    return static_cast<int>((signature >> first) & ((1U << bits) - 1));
  };
  CpuIdentity cpu{.vendor = std::move(vendor),
                  .family = field(8, 4),
                  .model = field(4, 4),
                  .stepping = field(0, 4)};
  // Family 15 adds the extended family. Families 6 and 15 and later add the extended model.
  if (cpu.family == 6 || cpu.family == 15) cpu.model += field(16, 4) << 4;
  if (cpu.family == 15) cpu.family += field(20, 8);
  return cpu;
}

CpuIdentity cpu_identity() {
#if defined(__x86_64__) || defined(__i386__)
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return {};
  const std::array<unsigned, 3> words = {ebx, edx, ecx};
  std::string vendor(sizeof(words), '\0');
  std::memcpy(vendor.data(), words.data(), sizeof(words));
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return {};
  return decode_cpu_identity(std::move(vendor), eax);
#else
  return {};
#endif
}

std::optional<std::int64_t> total_memory_bytes() { return meminfo_bytes("MemTotal"); }

std::optional<std::int64_t> available_memory_bytes() {
  const std::optional<std::int64_t> machine = meminfo_bytes("MemAvailable");
  const std::optional<std::int64_t> group = control_group_bytes();
  if (machine && group) return std::min(*machine, *group);
  return machine ? machine : group;
}

std::optional<std::int64_t> usable_memory_bytes() {
  const std::optional<std::int64_t> machine = total_memory_bytes();
  const std::optional<std::int64_t> group = read_integer("/sys/fs/cgroup/memory.max");
  if (machine && group) return std::min(*machine, *group);
  return machine ? machine : group;
}

std::optional<int> control_group_cpus(const std::filesystem::path& root) {
  std::optional<int> least;
  const auto limit = [&](const std::filesystem::path& group) {
    const std::optional<int> cpus = quota_of(group);
    if (cpus) least = std::min(*cpus, least.value_or(*cpus));
  };
  // Lines are "hierarchy:controllers:/path"; version 2 is hierarchy 0 and names no controllers. A
  // container may see the path that its group has outside, which is not mounted inside. The
  // directory mounted at the top is then its own group, so look at every directory on the way up.
  std::ifstream memberships(root / "proc/self/cgroup");
  for (std::string line; std::getline(memberships, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::filesystem::path below =
        std::filesystem::path(line.substr(second + 1)).relative_path();
    const auto limit_along = [&](std::filesystem::path group) {
      limit(group);
      for (const std::filesystem::path& name : below) limit(group /= name);
    };
    const std::filesystem::path mounts = root / "sys/fs/cgroup";
    if (controllers.empty()) {
      limit_along(mounts);
    } else if ((',' + controllers + ',').find(",cpu,") != std::string::npos) {
      limit_along(mounts / controllers);
      limit_along(mounts / "cpu");  // a symbolic link if the names are mounted in another order
    }
  }
  return least;
}

int usable_cpus() {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());  // 0: unknown
  for (const std::optional<int>& limit : {affinity_cpus(), control_group_cpus()}) {
    if (limit && (cpus == 0 || *limit < cpus)) cpus = *limit;
  }
  return std::max(1, cpus);
}

}  // namespace annulus
