#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

// For tests that need a waiting thread or process: the kernel tells whether it sleeps.
namespace annulus::test {

// 'S': sleeping, 'R': running or runnable, 'T': stopped, 'Z': zombie; '?': it does not exist.
inline char kernel_state(const std::string& proc_folder) {
  std::ifstream file(proc_folder + "/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = stat.rfind(") ");
  return name_end == std::string::npos ? '?' : stat[name_end + 2];
}

// Waits until the condition is true. False: it stayed false for two minutes, far longer than
// anything in a test takes.
template <typename Question>
[[nodiscard]] bool comes_true(const Question& question) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!question()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

[[nodiscard]] inline bool thread_sleeps(pid_t thread) {
  return kernel_state("/proc/self/task/" + std::to_string(thread)) == 'S';
}

}  // namespace annulus::test
