#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/verdict.h"
#include "cli/world.h"

namespace annulus::cli {
namespace {

constexpr const char* kFooter = R"(Start here:
  annulus doctor            is this machine ready, and what will be used?
  annulus run               attention over a ring of four ranks, forward and backward
  annulus verify            many small configurations against an fp64 oracle
  annulus plan --svg p.svg  a picture of who computes and sends what
  annulus simulate          how long that takes on a cluster that you describe
  annulus COMMAND --help    flags and examples

Environment: ANNULUS_ISA forces an instruction set, ANNULUS_THREADS the number of threads,
             ANNULUS_CUDA_KERNELS the kernels of a GPU (portable or sm90).
MPI:         mpirun -n 4 annulus run | verify | doctor: the ring is MPI's processes.
Exit codes: 0 success, 1 wrong results or another failure, 2 bad arguments or files,
            3 broken ring, 4 out of memory or missing device.)";

// Parsing itself may have failed, so look for the flag by hand.
bool wants_json(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--json") return true;
  }
  return false;
}

// In an MPI job, wrong arguments are usually wrong on all processes: rank 0 reports them, and
// mpirun ends the others. A process that is still alive after two seconds has arguments of its own.
int refuse(std::string message, bool json) {
  const Launch launch = launched();
  if (launch.rank != 0) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    message = fmt::format("[rank {}/{}] {}", launch.rank, launch.size, message);
  }
  return report({.code = kUsage, .kind = "usage", .message = std::move(message)}, json);
}

int main_in_namespace(int argc, char** argv) {
  const bool json = wants_json(argc, argv);
  const Launch launch = launched();
  try {
    CLI::App tool("Exact dilated attention over a ring of ranks", "annulus");
    tool.set_version_flag("--version", std::string("annulus ") + ANNULUS_VERSION);
    tool.footer(kFooter);
    tool.require_subcommand(1);
    Action chosen;
    add_run(tool, chosen);
    add_verify(tool, chosen);
    add_plan(tool, chosen);
    add_simulate(tool, chosen);
    add_bench(tool, chosen);
    add_doctor(tool, chosen);
    if (argc == 1) {
      if (launch.rank == 0) print(tool.help());
      return kUsage;
    }
    const std::string command = argv[1];
    std::vector<std::string> names;
    for (const CLI::App* known : tool.get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(known->get_name());
    }
    if (!command.starts_with('-') &&
        std::find(names.begin(), names.end(), command) == names.end()) {
      return refuse(
          fmt::format("there is no command '{}', expected one of {}; see 'annulus --help'", command,
                      fmt::join(names, ", ")),
          json);
    }
    try {
      tool.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return launch.rank == 0 ? tool.exit(error) : kOk;  // --help
      const std::string help = command.starts_with('-') ? "annulus" : "annulus " + command;
      return refuse(std::string(error.what()) + "; see '" + help + " --help'", json);
    }
    if (launch.size > 1 && (command == "plan" || command == "simulate" || command == "bench")) {
      return refuse(
          fmt::format("'annulus {}' is for one process, found {}: start it without mpirun", command,
                      launch.size),
          json);
    }
    return chosen();
  } catch (...) {
    return report(verdict_of(std::current_exception()), json);
  }
}

}  // namespace
}  // namespace annulus::cli

int main(int argc, char** argv) { return annulus::cli::main_in_namespace(argc, argv); }
