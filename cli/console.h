#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace annulus::cli {

// Objects keep the order in which they are filled: people read them, too.
using Json = nlohmann::ordered_json;

[[nodiscard]] std::string format_bytes(std::int64_t bytes);  // "48.0 MiB"
[[nodiscard]] std::string format_seconds(double seconds);    // "1.23 s", "45.6 ms"
[[nodiscard]] std::string format_flops(double gflops);       // "213 GFLOP/s"
[[nodiscard]] std::string format_list(const std::vector<std::int64_t>& values);  // "1, 2, 4"

[[nodiscard]] double median(std::vector<double> values);  // 0 for none

// To standard output, whole: a full disk or a closed pipe is a ConfigError rather than half a
// result.
void print(const std::string& text);
void print_json(const Json& value);
// As text. What is no UTF-8, in the name of a file for example, becomes U+FFFD: JSON has nothing
// else for it.
[[nodiscard]] std::string to_text(const Json& value, int indent = -1);

// Says on standard error what is going on. On a terminal it is one line that counts the seconds;
// otherwise it is silent, or one line per phase if `forced`.
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
