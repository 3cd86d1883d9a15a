#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>

namespace annulus::cli {

// What the process returns. Scripts tell "I asked for nonsense" from "the machine cannot" from "the
// numbers are wrong".
enum ExitCode : int {
  kOk = 0,
  kFailed = 1,     // verification failed, or anything that has no code of its own
  kUsage = 2,      // arguments, options, files
  kTransport = 3,  // the ring broke
  kDevice = 4,     // out of memory, missing instruction set
};

// A result that contradicts what was promised: wrong numbers, or other bytes than predicted.
class VerificationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What main() runs once all arguments have been understood. Returns an ExitCode; errors are thrown.
using Action = std::function<int()>;

// Each adds one subcommand: flags, help with examples, and a callback that sets `chosen`.
void add_run(CLI::App& tool, Action& chosen);
void add_verify(CLI::App& tool, Action& chosen);
void add_plan(CLI::App& tool, Action& chosen);
void add_simulate(CLI::App& tool, Action& chosen);
void add_bench(CLI::App& tool, Action& chosen);
void add_doctor(CLI::App& tool, Action& chosen);

}  // namespace annulus::cli
