#include "cli/console.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>

#include "annulus/error.h"

namespace annulus::cli {

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 10.0 ? 2 : value < 100.0 ? 1 : 0, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  const double shown = seconds < 0.9995 ? seconds * 1e3 : seconds;
  const char* unit = seconds < 0.9995 ? "ms" : "s";
  return fmt::format("{:.{}f} {}", shown, shown < 10.0 ? 2 : shown < 100.0 ? 1 : 0, unit);
}

std::string format_flops(double gflops) {
  return gflops < 9995.0 ? fmt::format("{:.{}f} GFLOP/s", gflops, gflops < 100.0 ? 1 : 0)
                         : fmt::format("{:.1f} TFLOP/s", gflops / 1e3);
}

std::string format_list(const std::vector<std::int64_t>& values) {
  return fmt::format("{}", fmt::join(values, ", "));
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

void print(const std::string& text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw ConfigError("standard output cannot be written: " +
                      std::generic_category().message(errno));
  }
}

void print_json(const Json& value) { print(to_text(value, 2) + "\n"); }

std::string to_text(const Json& value, int indent) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

// A thread of its own redraws the line, because the threads that report phases are busy computing.
struct Progress::State {
  bool terminal = false;
  bool forced = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::string text;  // empty: nothing to show
  double expected = 0.0;
  std::chrono::steady_clock::time_point begin;
  bool stopping = false;
  std::thread ticker;

  void draw() const {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::string line = "\r\033[K" + text;
    if (seconds >= 0.5) line += fmt::format("  {:.0f} s", seconds);
    if (expected >= 2.0) line += fmt::format(" of about {:.0f} s", expected);
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);
  }

  void tick() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      if (!text.empty()) draw();
      changed.wait_for(lock, std::chrono::milliseconds(500));
    }
  }
};

Progress::Progress(bool forced) : state_(std::make_unique<State>()) {
  state_->terminal = ::isatty(STDERR_FILENO) == 1;
  state_->forced = forced;
  if (state_->terminal) state_->ticker = std::thread([state = state_.get()] { state->tick(); });
}

Progress::~Progress() {
  finish();
  if (!state_->ticker.joinable()) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  state_->ticker.join();
}

void Progress::phase(const std::string& text, double expected_seconds) {
  if (!state_->terminal) {
    if (state_->forced) std::fputs(("annulus: " + text + "\n").c_str(), stderr);
    return;
  }
  const std::lock_guard lock(state_->mutex);
  state_->text = text;
  state_->expected = expected_seconds;
  state_->begin = std::chrono::steady_clock::now();
  state_->changed.notify_all();
}

void Progress::finish() {
  if (!state_->terminal) return;
  const std::lock_guard lock(state_->mutex);
  if (state_->text.empty()) return;
  state_->text.clear();
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

}  // namespace annulus::cli
