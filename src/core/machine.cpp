#include "core/machine.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>

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

std::optional<std::int64_t> read_integer(const char* path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return parse_integer(line);
}

// Room left in this process's control group. Its file cache counts as used there but is given up
// under pressure.
std::optional<std::int64_t> control_group_bytes() {
  const std::optional<std::int64_t> most = read_integer("/sys/fs/cgroup/memory.max");
  const std::optional<std::int64_t> used = read_integer("/sys/fs/cgroup/memory.current");
  if (!most || !used) return std::nullopt;
  const std::int64_t cache =
      parse_integer(find_value("/sys/fs/cgroup/memory.stat", "inactive_file")).value_or(0);
  return std::max<std::int64_t>(0, *most - *used + cache);
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

std::optional<std::int64_t> total_memory_bytes() { return meminfo_bytes("MemTotal"); }

std::optional<std::int64_t> available_memory_bytes() {
  const std::optional<std::int64_t> machine = meminfo_bytes("MemAvailable");
  const std::optional<std::int64_t> group = control_group_bytes();
  if (machine && group) return std::min(*machine, *group);
  return machine ? machine : group;
}

}  // namespace annulus
