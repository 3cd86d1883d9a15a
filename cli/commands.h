#pragma once

#include <functional>
#include <stdexcept>

// Of CLI11, which takes seconds to compile.
namespace CLI {
class App;
}  // namespace CLI

namespace annulus::cli {

// Exit codes of the process, by which scripts distinguish causes.
enum ExitCode : int {
  kOk = 0,
  kFailed = 1,     // verification failed, or an error that has no code of its own
  kUsage = 2,      // arguments, options, files
  kTransport = 3,  // the ring failed
  kDevice = 4,     // out of memory, missing instruction set
};

// Wrong results, or a number of sent bytes that differs from the prediction.
class VerificationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What main() runs after parsing the arguments. Returns an ExitCode; throws errors.
using Action = std::function<int()>;

// Each adds one subcommand: flags, help with examples, and a callback that sets `chosen`.
void add_run(CLI::App& tool, Action& chosen);
void add_verify(CLI::App& tool, Action& chosen);
void add_plan(CLI::App& tool, Action& chosen);
void add_simulate(CLI::App& tool, Action& chosen);
void add_bench(CLI::App& tool, Action& chosen);
void add_doctor(CLI::App& tool, Action& chosen);

}  // namespace annulus::cli
