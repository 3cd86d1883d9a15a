#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace annulus::cli {

// Keeps the order in which members are added, for readers.
using Json = nlohmann::ordered_json;

[[nodiscard]] std::string format_bytes(std::int64_t bytes);  // "48.0 MiB"
[[nodiscard]] std::string format_seconds(double seconds);    // "1.23 s", "45.6 ms"
[[nodiscard]] std::string format_flops(double gflops);       // "213 GFLOP/s"
[[nodiscard]] std::string format_list(const std::vector<std::int64_t>& values);  // "1, 2, 4"

[[nodiscard]] double median(std::vector<double> values);  // 0 for none

// Write to standard output. ConfigError if not everything could be written (full disk, closed
// pipe).
void print(const std::string& text);
void print_json(const Json& value);
// As text. Bytes that are not UTF-8, such as in the name of a file, become U+FFFD.
[[nodiscard]] std::string to_text(const Json& value, int indent = -1);

// Shows progress on standard error. On a terminal it is one line that counts the seconds. Otherwise
// it prints nothing, or one line per phase if `forced`.
class Progress {
 public:
  explicit Progress(bool forced);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // From any thread. `expected_seconds` above 0 is shown beside the seconds passed.
  void phase(const std::string& text, double expected_seconds = 0.0);
  void finish();  // clears the line; phase() may follow

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace annulus::cli
