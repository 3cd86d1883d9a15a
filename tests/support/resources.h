#pragma once

#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <thread>

// Resources that this process holds. Long runs must not accumulate any.
namespace annulus::test {

inline std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  std::int64_t resident = 0;
  file >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

inline std::int64_t entries_of(const char* directory) {
  DIR* const dir = opendir(directory);
  if (dir == nullptr) return -1;
  std::int64_t count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// A joined thread may take a moment to disappear from /proc.
inline std::int64_t settled_threads(std::int64_t expected) {
  std::int64_t now = entries_of("/proc/self/task");
  for (int tries = 0; tries < 6000 && now != expected; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    now = entries_of("/proc/self/task");
  }
  return now;
}

}  // namespace annulus::test
