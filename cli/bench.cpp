#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device_facts.h"
#include "cli/job.h"
#include "cli/limits.h"
#include "cli/options.h"
#include "cli/sample_check.h"
#include "core/machine.h"
#include "draw/plan_text.h"
#include "kernels/cpu/kernel.h"
#include "kernels/head_dim.h"

namespace annulus::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  annulus bench
      dense attention on one rank: 1,024 and 4,096 tokens, head dim 64 and 128, fp32 and bf16
  annulus bench --tokens 512,2048 --head-dim 64 --dtype fp32 --causal yes --repeat 9
      chosen sizes
  annulus bench --suite ring
      LongNet on a ring of four ranks against one rank, taken in turns
  annulus bench --suite scaling --tokens 32k,64k,128k,256k,512k --no-backward
      fixed branches, growing sequence: time should grow in proportion
  annulus bench --suite dilated
      dilations 1 to 16 at equal work, taken in turns
  annulus bench --device cuda
      dense attention on a GPU: 4,096 and 16,384 tokens, bf16; ranks of other suites share it

Every case is compared with fp64 on sampled rows before it is timed. Times are medians, spread is
(slowest - fastest) / median. 'of peak' is relative to fused multiply-adds measured in the same run.
On a GPU a repetition is many passes, enqueued one after the other and waited for at the end.)";

struct BenchFlags {
  std::string suite = "kernels";
  std::vector<std::int64_t> tokens;
  std::vector<int> head_dims;
  std::vector<std::string> dtypes;
  std::string causal;
  Window window;
  int heads = 8;
  int ranks = 4;
  int repeat = 5;
  bool json = false;
  bool progress = false;
  ProblemFlags execution;  // threads, device and backward

  [[nodiscard]] bool on_gpu() const { return execution.options.device.kind != Device::Kind::cpu; }
};

struct Case {
  std::string name;
  RingOptions options;
  // results
  PassReport forward, backward;
  SampledErrors errors;
  std::string kernels;
  int passes = 1;            // of a repetition
  double peak_gflops = 0.0;  // 0: unknown
};

// The cases of a group run in turns, so that noise on the machine affects all of them alike. Ratios
// are relative to the first case.
using Group = std::vector<Case>;

const std::vector<std::int64_t> kSegments = {2048, 4096, 8192, 16384, 32768};
const std::vector<std::int64_t> kDilations = {1, 2, 4, 8, 16};

Case make_case(const BenchFlags& flags, std::string name, Pattern pattern, Placement placement,
               int head_dim, DType dtype) {
  const int heads = pattern.heads;
  Case result{.name = std::move(name),
              .options = {.pattern = std::move(pattern), .placement = std::move(placement)},
              .forward = {},
              .backward = {},
              .errors = {},
              .kernels = "",
              .passes = 1,
              .peak_gflops = 0.0};
  result.options.kv_heads = heads;
  result.options.head_dim = head_dim;
  result.options.dtype = dtype;
  result.options.backward = flags.execution.options.backward;
  result.options.threads = flags.execution.options.threads;
  result.options.device = flags.execution.options.device;
  return result;
}

template <typename T>
std::vector<T> or_default(const std::vector<T>& given, std::vector<T> otherwise) {
  return given.empty() ? std::move(otherwise) : given;
}

std::vector<Group> make_groups(const BenchFlags& flags) {
  std::vector<Group> groups;
  std::vector<DType> dtypes;
  const bool kernels = flags.suite == "kernels";
  for (const std::string& name :
       or_default(flags.dtypes, flags.on_gpu() ? std::vector<std::string>{"bf16"}
                                : kernels      ? std::vector<std::string>{"fp32", "bf16"}
                                               : std::vector<std::string>{"fp32"})) {
    dtypes.push_back(dtype_from_name(name));
  }
  std::vector<bool> causal = {false};
  const bool both = kernels && flags.window == Window{};
  const std::string wish = flags.causal.empty() ? (both ? "both" : "no") : flags.causal;
  if (wish == "yes") causal = {true};
  if (wish == "both") causal = {false, true};

  const std::vector<std::int64_t> tokens = or_default(
      flags.tokens, kernels && flags.on_gpu()  ? std::vector<std::int64_t>{4096, 16384}
                    : kernels                  ? std::vector<std::int64_t>{1024, 4096}
                    : flags.suite == "ring"    ? std::vector<std::int64_t>{32768}
                    : flags.suite == "scaling" ? std::vector<std::int64_t>{32768, 65536, 131072}
                                               : std::vector<std::int64_t>{4096});
  for (const int head_dim :
       or_default(flags.head_dims, kernels ? std::vector<int>{64, 128} : std::vector<int>{64})) {
    for (const DType dtype : dtypes) {
      for (const bool mask : causal) {
        const auto add = [&](Group& group, const std::string& name, Pattern pattern,
                             Placement placement) {
          pattern.window = flags.window;
          pattern.validate();
          group.push_back(
              make_case(flags, name, std::move(pattern), std::move(placement), head_dim, dtype));
        };
        for (const std::int64_t n : tokens) {
          Group group;
          if (kernels) {
            add(group, "dense", dense(flags.heads, mask), Placement::contiguous(n, 1));
          } else if (flags.suite == "scaling") {
            add(group, "longnet", longnet(flags.heads, kSegments, kDilations, mask),
                Placement::contiguous(n, flags.ranks));
          } else if (flags.suite == "ring") {
            for (const int ranks : {1, flags.ranks}) {
              add(group, fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"),
                  longnet(flags.heads, kSegments, kDilations, mask),
                  mask ? Placement::zigzag(n, ranks) : Placement::contiguous(n, ranks));
            }
          } else {
            // Segments with n/2 selected rows: the sequence grows with the dilation, the work does
            // not.
            for (const std::int64_t r : {1, 2, 4, 8, 16}) {
              const std::vector<std::int64_t> segment = {n / 2 * r};
              const std::vector<std::int64_t> dilation = {r};
              add(group, fmt::format("dilation {}", r),
                  longnet(flags.heads, segment, dilation, mask), Placement::contiguous(n * r, 1));
            }
          }
          groups.push_back(std::move(group));
        }
      }
    }
  }
  return groups;
}

double peak_of(const RingOptions& options) {
  if (options.device.kind != Device::Kind::cpu) return 0.0;
  const bool native = options.dtype == DType::bf16 && cpu::chosen_kernels().native_bf16;
  return cpu::measure_fma_peak_gflops(native) * ThreadPool::of(options.threads)->threads();
}

// Rejects a group whose tensors do not fit into memory together.
void apply_limits(Group& group) {
  for (Case& one : group) {
    RingOptions& options = one.options;
    ProblemFlags ring;
    ring.ranks = options.placement.ranks();
    ring.options.device = options.device;
    const Shape shape{.batch = static_cast<std::int64_t>(group.size()),
                      .tokens = options.placement.tokens(),
                      .heads = options.pattern.heads,
                      .kv_heads = options.kv_heads,
                      .head_dim = options.head_dim};
    options.limits = choose_limits(ring, shape, options.dtype, options.backward).limits;
  }
}

// On a GPU, starting a pass and waiting for it may take longer than the pass. So a repetition runs
// as many passes as fit into a tenth of a second.
int passes_of(const JobReport& warm) {
  constexpr double kSeconds = 0.1;
  constexpr double kMost = 200;
  const double fastest =
      *std::min_element(warm.forward.seconds.begin(), warm.forward.seconds.end());
  return static_cast<int>(std::clamp(kSeconds / std::max(fastest, 1e-9), 1.0, kMost));
}

// One pass to warm up, whose results are checked, then the timed ones.
void measure(Group& group, const BenchFlags& flags, Progress& progress) {
  apply_limits(group);
  std::vector<std::unique_ptr<JobTensors>> tensors;
  const int rounds = group.size() == 1 ? 1 : flags.repeat;
  const int repeat = group.size() == 1 ? flags.repeat : 1;
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < group.size(); ++i) {
      Case& one = group[i];
      progress.phase(fmt::format("{}, {} tokens, head dim {}, {}{} ({}/{})", one.name,
                                 with_commas(one.options.placement.tokens()), one.options.head_dim,
                                 name_of(one.options.dtype), mask_text(one.options.pattern),
                                 round + 1, rounds));
      JobSettings settings;
      settings.repeat = repeat + 1;
      if (round == 0) {
        tensors.push_back(std::make_unique<JobTensors>(one.options));
        settings.prepare = [&](int rank, ThreadPool& pool) {
          fill_synthetic(*tensors[i], rank, 1, pool);
          touch_outputs(*tensors[i], rank, pool);
        };
        if (flags.on_gpu()) {  // the first pass loads the kernels, so the second one is timed
          settings.repeat = 2;
          one.passes = passes_of(run_job(one.options, *tensors[i], settings));
          settings.repeat = repeat + 1;
          settings.prepare = nullptr;
        }
      }
      settings.passes = one.passes;
      const JobReport job = run_job(one.options, *tensors[i], settings);
      const auto keep = [](PassReport& into, const PassReport& from) {
        std::vector<double> seconds = into.seconds;
        if (!from.seconds.empty()) {
          seconds.insert(seconds.end(), from.seconds.begin() + 1, from.seconds.end());
        }
        into = from;
        into.seconds = std::move(seconds);
      };
      keep(one.forward, job.forward);
      keep(one.backward, job.backward);
      if (round > 0) continue;
      one.errors =
          check_sampled_rows(one.options, *tensors[i], *ThreadPool::of(one.options.threads));
      if (const std::string complaint = one.errors.complaint(); !complaint.empty()) {
        throw VerificationError(
            fmt::format("{}: results differ from the definition: {}; run 'annulus verify'",
                        one.name, complaint));
      }
      one.kernels = job.kernels;
      one.peak_gflops = peak_of(one.options);
    }
  }
}

double spread(const PassReport& pass) {
  if (pass.seconds.empty()) return 0.0;
  const auto [least, most] = std::minmax_element(pass.seconds.begin(), pass.seconds.end());
  return (*most - *least) / pass.median_seconds();
}

// Time over the baseline's, the first of the group's.
double ratio(const PassReport& pass, const PassReport& first) {
  return first.median_seconds() > 0.0 ? pass.median_seconds() / first.median_seconds() : 0.0;
}

std::string pass_columns(const PassReport& pass, double peak, const PassReport& first, bool grouped,
                         bool on_gpu) {
  if (pass.seconds.empty()) return "";
  std::string text =
      fmt::format(" {:>10} {:>7} ", format_seconds(pass.median_seconds()), percent(spread(pass)));
  text +=
      on_gpu ? fmt::format("{:>8.1f} {:>8}", pass.gflops() / 1e3, format_bytes(pass.measured_bytes))
             : fmt::format("{:>8.0f} {:>8}", pass.gflops(),
                           peak > 0.0 ? percent(pass.gflops() / peak) : "-");
  if (grouped) text += fmt::format(" {:>6.3f}", ratio(pass, first));
  return text;
}

std::string header(bool grouped, bool backward, bool on_gpu) {
  const auto pass = [&](const char* name) {
    return fmt::format(" {:>10} {:>7} {:>8} {:>8}", name, "spread", on_gpu ? "TFLOP/s" : "GFLOP/s",
                       on_gpu ? "sent" : "of peak") +
           (grouped ? fmt::format(" {:>6}", "ratio") : "");
  };
  return fmt::format("{:<12} {:>9} {:>4} {:>5} {:>6}", "case", "tokens", "dim", "dtype", "causal") +
         pass("forward") + (backward ? pass("backward") : "") + (on_gpu ? "  kernels" : "") + "\n";
}

std::string table_row(const Case& one, const Case& first, bool grouped, bool on_gpu) {
  return fmt::format("{:<12} {:>9} {:>4} {:>5} {:>6}", one.name,
                     with_commas(one.options.placement.tokens()), one.options.head_dim,
                     name_of(one.options.dtype), one.options.pattern.causal ? "yes" : "no") +
         pass_columns(one.forward, one.peak_gflops, first.forward, grouped, on_gpu) +
         pass_columns(one.backward, one.peak_gflops, first.backward, grouped, on_gpu) +
         (on_gpu ? "  " + one.kernels : "") + "\n";
}

Json to_json(const Case& one, const Case& first) {
  const auto pass = [&](const PassReport& report, const PassReport& base) -> Json {
    if (report.seconds.empty()) return nullptr;
    return {
        {"seconds", report.median_seconds()},
        {"seconds_all", report.seconds},
        {"spread", spread(report)},
        {"gflops", report.gflops()},
        {"share_of_peak", one.peak_gflops > 0.0 ? Json(report.gflops() / one.peak_gflops) : Json()},
        {"ratio", ratio(report, base)},
        {"bytes_sent", report.measured_bytes}};
  };
  return {{"name", one.name},
          {"tokens", one.options.placement.tokens()},
          {"heads", one.options.pattern.heads},
          {"head_dim", one.options.head_dim},
          {"dtype", name_of(one.options.dtype)},
          {"causal", one.options.pattern.causal},
          {"window", window_json(one.options.pattern)},
          {"ranks", one.options.placement.ranks()},
          {"pattern", describe(one.options.pattern)},
          {"sampled_relative_error", one.errors.worst() ? Json(*one.errors.worst()) : Json()},
          {"kernels", one.kernels},
          {"passes_per_repetition", one.passes},
          {"peak_gflops", one.peak_gflops > 0.0 ? Json(one.peak_gflops) : Json()},
          {"forward", pass(one.forward, first.forward)},
          {"backward", pass(one.backward, first.backward)}};
}

int bench(const BenchFlags& flags) {
  const DeviceFacts device = device_facts(flags.execution.options.device);
  std::vector<Group> groups = make_groups(flags);
  const int threads = ThreadPool::of(groups[0][0].options.threads)->threads();
  const bool grouped = groups[0].size() > 1;
  Progress progress(flags.progress);
  Json json = {{"command", "bench"}, {"suite", flags.suite}};
  add_device(json, device);
  json["kernels"] = device.kernels;
  json["cpu"] = cpu_name();
  json["threads"] = threads;
  json["heads"] = flags.heads;
  json["repeat"] = flags.repeat;
  json["rows"] = Json::array();
  if (!flags.json) {
    const std::string where =
        device.on_cpu()
            ? fmt::format("{}, {}, {} threads", device.name, device.kernels, threads)
            : fmt::format("{}, {}, driver {}", device.text(), device.kernels, device.driver);
    Pattern window;
    window.window = flags.window;
    print(fmt::format("{}, {} heads{}, medians of {}{}\n\n", where, flags.heads, mask_text(window),
                      flags.repeat,
                      grouped ? "; ratio: time over that of the first of a group" : "") +
          header(grouped, flags.execution.options.backward, flags.on_gpu()));
  }
  for (Group& group : groups) {
    measure(group, flags, progress);
    progress.finish();
    for (const Case& one : group) {
      json["rows"].push_back(to_json(one, group[0]));
      if (!flags.json) print(table_row(one, group[0], grouped, flags.on_gpu()));
    }
  }
  if (flags.json) print_json(json);
  return kOk;
}

}  // namespace

void add_bench(CLI::App& tool, Action& chosen) {
  CLI::App* command =
      tool.add_subcommand("bench", "Measure speed; on the CPU also as a share of its peak");
  const auto flags = std::make_shared<BenchFlags>();
  add_choice(*command, "--suite", flags->suite, {"kernels", "ring", "scaling", "dilated"},
             "What to measure (default kernels)");
  command->add_option("--tokens", flags->tokens, "Sequence lengths, such as 4096 or 128k")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->transform(token_count())
      ->check(whole_number(2, 1000000000))
      ->type_name("N,N");
  command->add_option("--head-dim", flags->head_dims, "Head dims")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(whole_number(1, kMaxHeadDim))
      ->type_name("D,D");
  command->add_option("--dtype", flags->dtypes, "Element types")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}).description(""))
      ->type_name("fp32,bf16");
  add_choice(*command, "--causal", flags->causal, {"no", "yes", "both"},
             "Mask (default: both for kernels without a window, else no)");
  add_window_flag(*command, flags->window);
  command->add_option("--heads", flags->heads, "Heads (default 8)")
      ->check(whole_number(1, 1024))
      ->type_name("H");
  command->add_option("--ranks", flags->ranks, "Ranks of suites ring and scaling (default 4)")
      ->check(whole_number(1, 256))
      ->type_name("P");
  command->add_option("--repeat", flags->repeat, "Timed repetitions (default 5)")
      ->check(whole_number(1, 10000))
      ->type_name("R");
  add_option_flag(*command, flags->execution, "backward");
  add_output_flags(*command, flags->json, &flags->progress);
  add_machine_flags(*command, flags->execution);
  command->footer(kExamples);
  command->callback([flags, &chosen] { chosen = [flags] { return bench(*flags); }; });
}

}  // namespace annulus::cli
