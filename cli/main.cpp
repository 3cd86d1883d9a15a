#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/error.h"
#include "cli/commands.h"
#include "cli/console.h"

namespace annulus::cli {
namespace {

constexpr const char* kFooter = R"(Start here:
  annulus doctor            is this machine ready, and what will be used?
  annulus run               attention over a ring of four ranks, forward and backward
  annulus verify            many small configurations against an fp64 oracle
  annulus plan --svg p.svg  a picture of who computes and sends what
  annulus COMMAND --help    flags and examples

Environment: ANNULUS_ISA forces an instruction set, ANNULUS_THREADS the number of threads,
             ANNULUS_CUDA_KERNELS the kernels of a GPU (portable or sm90).
Exit codes: 0 success, 1 wrong results or another failure, 2 bad arguments or files,
            3 broken ring, 4 out of memory or missing device.)";

// Parsing itself may have failed, so look for the flag by hand.
bool wants_json(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--json") return true;
  }
  return false;
}

int report(const std::string& message, const char* kind, int code, bool json) {
  std::fflush(stdout);
  std::fprintf(stderr, "annulus: error: %s\n", message.c_str());
  if (json) {
    try {
      print_json({{"error", message}, {"kind", kind}});
    } catch (const Error&) {  // standard output is what failed
    }
  }
  return code;
}

int main_in_namespace(int argc, char** argv) {
  const bool json = wants_json(argc, argv);
  try {
    CLI::App tool("Exact dilated attention over a ring of ranks", "annulus");
    tool.set_version_flag("--version", std::string("annulus ") + ANNULUS_VERSION);
    tool.footer(kFooter);
    tool.require_subcommand(1);
    Action chosen;
    add_run(tool, chosen);
    add_verify(tool, chosen);
    add_plan(tool, chosen);
    add_bench(tool, chosen);
    add_doctor(tool, chosen);
    if (argc == 1) {
      print(tool.help());
      return kUsage;
    }
    const std::string command = argv[1];
    std::vector<std::string> names;
    for (const CLI::App* known : tool.get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(known->get_name());
    }
    if (!command.starts_with('-') &&
        std::find(names.begin(), names.end(), command) == names.end()) {
      return report(
          fmt::format("there is no command '{}', expected one of {}; see 'annulus --help'", command,
                      fmt::join(names, ", ")),
          "usage", kUsage, json);
    }
    try {
      tool.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return tool.exit(error);  // --help, --version
      const std::string help = command.starts_with('-') ? "annulus" : "annulus " + command;
      return report(std::string(error.what()) + "; see '" + help + " --help'", "usage", kUsage,
                    json);
    }
    return chosen();
  } catch (const ConfigError& error) {
    return report(error.what(), "config", kUsage, json);
  } catch (const std::filesystem::filesystem_error& error) {
    return report(error.what(), "config", kUsage, json);
  } catch (const TransportError& error) {
    return report(error.what(), "transport", kTransport, json);
  } catch (const DeviceError& error) {
    return report(error.what(), "device", kDevice, json);
  } catch (const std::bad_alloc&) {
    return report("out of memory: use a shorter sequence, fewer heads or a 16-bit --dtype",
                  "device", kDevice, json);
  } catch (const VerificationError& error) {
    return report(error.what(), "verification", kFailed, json);
  } catch (const std::exception& error) {
    return report(error.what(), "internal", kFailed, json);
  }
}

}  // namespace
}  // namespace annulus::cli

int main(int argc, char** argv) { return annulus::cli::main_in_namespace(argc, argv); }
