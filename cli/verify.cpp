#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device_facts.h"
#include "cli/options.h"
#include "cli/oracle_check.h"
#include "cli/world.h"

namespace annulus::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  annulus verify
      about 1,620 small configurations, some seconds
  annulus verify --full
      every problem on every ring
  annulus verify --filter longnet_causal --filter bf16
      only configurations whose names contain all of these
  ANNULUS_ISA=avx2 annulus verify
      the kernels of another instruction set
  mpirun -n 4 annulus verify
      on the ring of four processes
  annulus verify --device cuda
      on a GPU; problems that have special kernels also run with the portable ones

A problem (pattern, shape, dtype, gradient) is solved by an fp64 oracle once and then computed on many
rings (ranks, placement, schedule). fp32 must be within 1e-6 (GPU: 2e-6) relative to the terms of the sums (RMS);
16-bit results within twice the error of rounding the exact ones. Predicted bytes must equal counted bytes in every
run.)";

struct VerifyFlags {
  bool full = false;
  bool quick = false;
  bool json = false;
  bool progress = false;
  std::uint64_t seed = 1;
  std::vector<std::string> filters;
  Window window;           // of every problem, unless it is none
  ProblemFlags execution;  // threads, device, transport
};

struct Problem {
  std::string name;
  RingOptions options;  // placement: any with the right number of tokens
};

struct Ring {
  std::string name;
  std::function<void(RingOptions&)> apply;
};

// Lengths are ragged on purpose; 3 tokens leave ranks without any. Segments exceed the sequence,
// and one dilation exceeds its segment.
std::vector<std::pair<std::string, std::function<Pattern(int heads, bool causal)>>> patterns() {
  using Numbers = std::vector<std::int64_t>;
  return {
      {"dense", [](int heads, bool causal) { return dense(heads, causal); }},
      {"dense_window",
       [](int heads, bool causal) {
         Pattern pattern = dense(heads, causal);
         pattern.window = {19, causal ? 0 : 6};
         return pattern;
       }},
      {"head_groups",
       [](int heads, bool causal) {
         return head_groups(heads, Numbers{16, 64}, Numbers{1, 3}, causal, false);
       }},
      {"head_groups_scaled",
       [](int heads, bool causal) {
         return head_groups(heads, Numbers{16, 4, 400}, Numbers{2, 5, 1}, causal, true);
       }},
      {"longnet",
       [](int heads, bool causal) {
         return longnet(heads, Numbers{16, 32, 64}, Numbers{1, 2, 4}, causal, Offsets::blocked);
       }},
      {"longnet_interleaved",
       [](int heads, bool causal) {
         return longnet(heads, Numbers{24, 50, 200}, Numbers{1, 3, 8}, causal,
                        Offsets::interleaved);
       }},
      {"longnet_all_window",
       [](int heads, bool causal) {
         Pattern pattern = longnet(heads, Numbers{24, 200}, Numbers{1, 3}, causal, Offsets::all);
         pattern.window = {37, causal ? 0 : -1};
         return pattern;
       }},
      {"dense_documents", [](int heads, bool causal) { return dense(heads, causal); }},
      {"longnet_documents",
       [](int heads, bool causal) {
         return longnet(heads, Numbers{16, 40}, Numbers{1, 3}, causal, Offsets::blocked);
       }},
  };
}

// Other boundaries for each batch entry. The last token of the first one is padding.
std::vector<Document> packed(std::int64_t tokens, std::int64_t batch) {
  std::vector<std::vector<Document>> entries;
  for (std::int64_t entry = 0; entry < batch; ++entry) {
    entries.push_back(packed_documents(
        std::vector{std::int64_t{0}, tokens / (3 + entry), tokens / 2, tokens - 1 + entry % 2}));
  }
  return documents_of_entries(entries);
}

std::vector<Problem> all_problems(const Window& window) {
  constexpr std::int64_t kTokens[] = {97, 64, 131, 3, 50, 112};
  // 64 and 128 have kernels of their own on GPUs, those above 256 everywhere.
  constexpr int kHeadDims[] = {16, 64, 24, 128, 40, 33, 300};
  std::vector<Problem> problems;
  for (const auto& [pattern_name, make_pattern] : patterns()) {
    for (const bool causal : {false, true}) {
      for (const int ratio : {1, 2, 8}) {
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
          for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
            const std::size_t number = problems.size();
            const int heads = ratio == 8 ? 8 : 4;
            const std::int64_t tokens = kTokens[number / 2 % std::size(kTokens)];
            Problem problem{
                .name = fmt::format("{}{}_gqa{}_{}_{}_n{}", pattern_name, causal ? "_causal" : "",
                                    ratio, mix == MixGradient::full ? "full" : "detached",
                                    name_of(dtype), tokens),
                .options = {.pattern = make_pattern(heads, causal),
                            .placement = Placement::contiguous(tokens, 1)}};
            if (window != Window{}) {
              problem.options.pattern.window = {window.before, causal ? 0 : window.after};
            }
            problem.options.batch = number % 3 == 2 ? 2 : 1;
            if (pattern_name.ends_with("documents"))
              problem.options.pattern.documents = packed(tokens, problem.options.batch);
            problem.options.kv_heads = heads / ratio;
            problem.options.head_dim = kHeadDims[number % std::size(kHeadDims)];
            problem.options.dtype = dtype;
            problem.options.mix_gradient = mix;
            problems.push_back(std::move(problem));
          }
        }
      }
    }
  }
  return problems;
}

std::vector<Ring> all_rings(const std::vector<int>& sizes) {
  struct Movement {
    const char* name;
    Schedule schedule;
    bool reproducible;
    BackwardTravel travel;
  };
  constexpr Movement kMovements[] = {
      {"ring_keys", Schedule::ring, false, BackwardTravel::keys},
      {"ring_queries", Schedule::ring, false, BackwardTravel::queries},
      {"gather", Schedule::gather, false, BackwardTravel::automatic},
      {"reproducible", Schedule::automatic, true, BackwardTravel::automatic},
  };
  std::vector<Ring> rings;
  for (const int ranks : sizes) {
    for (const std::string& placement : placement_names()) {
      for (const Movement& movement : kMovements) {
        rings.push_back({.name = fmt::format("ranks{}_{}_{}", ranks, placement, movement.name),
                         .apply = [ranks, placement, movement](RingOptions& options) {
                           const std::int64_t tokens = options.placement.tokens();
                           options.placement =
                               placement == "balanced"
                                   ? Placement::balanced(options.pattern, tokens, ranks)
                                   : Placement::named(placement, tokens, ranks);
                           options.schedule = movement.schedule;
                           options.reproducible = movement.reproducible;
                           options.backward_travel = movement.travel;
                         }});
      }
    }
  }
  return rings;
}

struct Failure {
  std::string name;
  std::string reason;
};

struct Summary {
  int configurations = 0;
  std::map<std::string, int> by_kernels;  // configurations that ran to the end
  int left_out = 0;  // configurations that the kernels forced by the environment cannot compute
  std::vector<Failure> failures;
  // Largest error by "dtype tensor" and, on GPUs, kernels, with what was allowed there.
  std::map<std::string, Deviation> worst;
  double seconds = 0.0;
};

bool matches(const std::string& name, const std::vector<std::string>& filters) {
  return std::all_of(filters.begin(), filters.end(), [&](const std::string& filter) {
    return name.find(filter) != std::string::npos;
  });
}

// The kernels that ran; empty: none did.
std::string check(const World& world, const OracleCheck& oracle, const std::string& name,
                  const RingOptions& options, Summary& summary) {
  ++summary.configurations;
  std::string reason;
  std::string kernels;
  try {
    const OracleCheck::Outcome outcome = oracle.run(options);
    kernels = outcome.kernels;
    ++summary.by_kernels[kernels];
    for (const Deviation& deviation : outcome.deviations) {
      std::string key = fmt::format("{} {}", name_of(options.dtype), deviation.tensor);
      if (options.device.kind != Device::Kind::cpu) key += ", " + kernels;
      Deviation& worst = summary.worst[key];
      if (worst.tensor.empty() ||
          deviation.found * worst.allowed > worst.found * deviation.allowed) {
        worst = deviation;
      }
      if (deviation.ok()) continue;
      reason += fmt::format("{}{} off by {:.2e}, at most {:.2e}", reason.empty() ? "" : "; ",
                            deviation.tensor, deviation.found, deviation.allowed);
    }
  } catch (const ConfigError& error) {  // on all ranks
    reason = error.what();
  } catch (const VerificationError& error) {  // rank 0 has reported it once all others were done
    reason = error.what();
  } catch (const std::exception& error) {  // any error counts as a failure of this configuration
    if (world.is_mpi()) throw;  // MPI processes would continue with different configurations
    reason = error.what();
  }
  if (!reason.empty()) summary.failures.push_back({name, reason});
  return kernels;
}

// Executors made during its lifetime use the portable kernels of their GPU. No other thread reads
// the environment then: ranks have ended between two configurations, and thread pools do not read
// it.
class PortableKernels {
 public:
  PortableKernels() { ::setenv("ANNULUS_CUDA_KERNELS", "portable", 1); }
  ~PortableKernels() { ::unsetenv("ANNULUS_CUDA_KERNELS"); }
  PortableKernels(const PortableKernels&) = delete;
  PortableKernels& operator=(const PortableKernels&) = delete;
};

// The quick run takes a few rings per problem. Steps of 23 through 80 rings reach all of them, and
// every ring gets different dtypes and gradients.
constexpr std::size_t kQuickRings = 5;
constexpr std::size_t kQuickStride = 23;

Summary verify_all(World& world, const VerifyFlags& flags, const DeviceFacts& device,
                   Progress& progress) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Problem> problems = all_problems(flags.window);
  const std::vector<Ring> rings = all_rings(world.is_mpi() ? std::vector<int>{flags.execution.ranks}
                                                           : std::vector<int>{1, 2, 3, 5, 8});
  const int threads = flags.execution.options.threads;
  const bool forced = !device.on_cpu() && !forced_cuda_kernels().empty();
  const auto pool = ThreadPool::of(threads);  // kept from one ring to the next
  Summary summary;
  std::size_t next_ring = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    Problem problem = problems[i];
    problem.options.device = device.device;  // limits of errors depend on it
    problem.options.threads = threads;
    progress.phase(fmt::format("problem {}/{}, {} configurations, {} failed: {}", i + 1,
                               problems.size(), summary.configurations, summary.failures.size(),
                               problem.name));
    std::unique_ptr<OracleCheck> oracle;
    for (std::size_t j = 0; j < (flags.full ? rings.size() : kQuickRings); ++j) {
      const Ring& ring = rings[flags.full ? j : (next_ring += kQuickStride) % rings.size()];
      const std::string name = problem.name + "_" + ring.name;
      if (!matches(name, flags.filters)) continue;
      RingOptions options = problem.options;
      ring.apply(options);
      if (forced && !device_complaint(options).empty()) {
        ++summary.left_out;
        continue;
      }
      if (oracle == nullptr) {
        oracle = std::make_unique<OracleCheck>(problem.options, flags.seed, &world);
      }
      const std::string kernels = check(world, *oracle, name, options, summary);
      if (device.on_cpu() || forced || device.kernels == "portable" || kernels == "portable") {
        continue;
      }
      const PortableKernels portable;
      check(world, *oracle, name + " (portable kernels)", options, summary);
    }
  }
  summary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return summary;
}

void print_summary(const DeviceFacts& device, const Summary& summary) {
  std::string text;
  for (const Failure& failure : summary.failures) {
    text += fmt::format("FAILED {}: {}\n", failure.name, failure.reason);
  }
  text += fmt::format("\n  largest error relative to what is allowed, kernels {}{}\n\n",
                      device.kernels, device.on_cpu() ? "" : " on " + device.text());
  std::size_t width = 10;
  for (const auto& [name, worst] : summary.worst) width = std::max(width, name.size());
  for (const auto& [name, worst] : summary.worst) {
    text += fmt::format("  {:<{}} {:>9.2e}   at most {:.2e}\n", name, width, worst.found,
                        worst.allowed);
  }
  if (!device.on_cpu()) {
    text += "\n";
    for (const auto& [name, count] : summary.by_kernels) {
      text += fmt::format("  {} configurations with {}\n", count, name);
    }
  }
  if (summary.left_out > 0) {
    text += fmt::format(
        "  {} left out: {} kernels, which ANNULUS_CUDA_KERNELS asks for, cannot do them\n",
        summary.left_out, device.kernels);
  }
  text += fmt::format("\n  {} of {} configurations passed in {}\n",
                      summary.configurations - static_cast<int>(summary.failures.size()),
                      summary.configurations, format_seconds(summary.seconds));
  print(text);
}

Json to_json(const VerifyFlags& flags, const DeviceFacts& device, const Summary& summary) {
  Json json;
  json["command"] = "verify";
  json["passed"] = summary.failures.empty();
  json["configurations"] = summary.configurations;
  json["failures"] = Json::array();
  for (const Failure& failure : summary.failures) {
    json["failures"].push_back({{"name", failure.name}, {"reason", failure.reason}});
  }
  for (const auto& [name, worst] : summary.worst) {
    json["worst"][name] = {{"found", worst.found}, {"allowed", worst.allowed}};
  }
  json["seconds"] = summary.seconds;
  add_device(json, device);
  json["kernels"] = device.kernels;
  json["configurations_by_kernels"] = summary.by_kernels;
  json["left_out"] = summary.left_out;
  json["seed"] = flags.seed;
  json["full"] = flags.full;
  return json;
}

int verify(World& world, const VerifyFlags& flags) {
  const DeviceFacts device = device_facts(flags.execution.options.device);
  Progress progress(flags.progress && world.leads());
  const Summary summary = verify_all(world, flags, device, progress);
  progress.finish();
  if (summary.configurations == 0) {
    throw ConfigError("--filter: no configuration has a name that contains all of them");
  }
  if (world.leads() && flags.json) {
    print_json(to_json(flags, device, summary));
  } else if (world.leads()) {
    print_summary(device, summary);
  }
  return summary.failures.empty() ? kOk : kFailed;
}

}  // namespace

void add_verify(CLI::App& tool, Action& chosen) {
  CLI::App* command =
      tool.add_subcommand("verify", "Check many small configurations against an fp64 oracle");
  const auto flags = std::make_shared<VerifyFlags>();
  CLI::Option* quick =
      command->add_flag("--quick", flags->quick, "A few rings for every problem (default)");
  command->add_flag("--full", flags->full, "Every problem on every ring")->excludes(quick);
  command->add_option("--filter", flags->filters, "Only configurations whose name contains this")
      ->allow_extra_args(false)
      ->type_name("TEXT");
  add_window_flag(*command, flags->window)
      ->description("Give every problem this window (causal ones have AFTER = 0); -1: no limit");
  command->add_option("--seed", flags->seed, "Seed of the data (default 1)")->type_name("S");
  add_output_flags(*command, flags->json, &flags->progress);
  add_machine_flags(*command, flags->execution);
  command->footer(kExamples);
  add_transport_flag(*command, flags->execution);
  run_in_world(*command, flags->execution, chosen,
               [flags](World& world) { return verify(world, *flags); });
}

}  // namespace annulus::cli
