#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "annulus/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device_facts.h"
#include "cli/job.h"
#include "cli/limits.h"
#include "cli/options.h"
#include "cli/recording.h"
#include "cli/run_output.h"
#include "cli/sample_check.h"
#include "cli/shard_exchange.h"
#include "cli/tensor_files.h"
#include "cli/world.h"

namespace annulus::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  annulus run
      LongNet attention over 32,768 synthetic tokens on a ring of four ranks
  annulus run --tokens 128k --causal --placement zigzag --dtype bf16 --repeat 5
      causal, with a placement that balances it; medians over five repetitions
  annulus run --pattern dense --tokens 8k --heads 16 --kv-heads 4 --head-dim 128
      plain ring attention with grouped key/value heads
  annulus run --input data --output results --ranks 3 --segments 512,2048 --dilations 1,4
      q.npy, k.npy, v.npy, do.npy from data; o, lse, dq, dk, dv.npy into results
  annulus run --device cuda --tokens 256k --dtype bf16 --repeat 5
      on a GPU: all ranks share it; tensors are copied to it first and back at the end
  mpirun -n 4 annulus run --input data --output results
      the ring is four processes: rank 0 reads, writes and prints
  annulus run --tokens 64k --trace trace.json --report report.html
      a timeline of all ranks: for ui.perfetto.dev, and as a page for any browser
  annulus run --tokens 64k --reproducible --json | jq .forward_gflops
      one JSON object for scripts

Results do not depend on the ring, to the last bit with --reproducible. 'sent' is predicted from the plan and counted
by the transport; the run fails if the two differ. 'error' is the largest of about 64 rows against an
evaluation of the definition in fp64, relative to the size of the terms that were added.)";

// What rank 0 learns from files and its machine and shares with all ranks.
struct Setup {
  std::optional<InputFiles> files;  // on rank 0
  Shape shape;
  DType dtype = DType::f32;
  ChosenLimits limits;
};

// Finds errors before any work is done.
Setup set_up(World& world, const RunFlags& flags) {
  const bool backward = flags.problem.options.backward;
  Setup setup;
  const std::string shared = world.share([&] {
    if (!flags.input.empty()) setup.files = inspect_inputs(flags.input, backward, flags.problem);
    if (!flags.output.empty()) check_output_folder(flags.output, backward);
    check_recording_files(flags);
    const Shape shape = setup.files ? setup.files->shape : shape_from(flags.problem);
    const DType dtype = setup.files && !flags.problem.has("dtype") ? setup.files->dtype
                                                                   : flags.problem.options.dtype;
    const ChosenLimits limits = choose_limits(flags.problem, shape, dtype, backward);
    return to_text(Json{shape.batch, shape.tokens, shape.heads, shape.kv_heads, shape.head_dim,
                        static_cast<int>(dtype), limits.limits.qkv_elements,
                        limits.limits.communication_bytes, limits.origin});
  });
  const Json json = Json::parse(shared);
  setup.shape = {.batch = json[0].get<std::int64_t>(),
                 .tokens = json[1].get<std::int64_t>(),
                 .heads = json[2].get<int>(),
                 .kv_heads = json[3].get<int>(),
                 .head_dim = json[4].get<int>()};
  setup.dtype = static_cast<DType>(json[5].get<int>());
  setup.limits.limits.qkv_elements = json[6].get<std::int64_t>();
  setup.limits.limits.communication_bytes = json[7].get<std::int64_t>();
  setup.limits.origin = json[8].get<std::string>();
  return setup;
}

int run(World& world, const RunFlags& flags) {
  const DeviceFacts device = device_facts(flags.problem.options.device);
  const Setup setup = set_up(world, flags);
  const bool from_files = !flags.input.empty();
  RunResult result{.options = ring_options_from(flags.problem, setup.shape, setup.dtype),
                   .limits = setup.limits,
                   .device = device,
                   .transport = world.name(),
                   .job = {},
                   .errors = {},
                   .removed = {},
                   .dropped = 0};
  RingOptions& options = result.options;
  options.limits = setup.limits.limits;

  const bool recorded = !flags.trace.empty() || !flags.report.empty();
  Recording recording(world, recorded, log_level_from_name(flags.log_level),
                      options.placement.ranks());
  Progress progress(flags.progress && world.leads());
  JobTensors tensors(options);
  if (from_files) {
    progress.phase("reading " + flags.input);
    if (setup.files) read_inputs(*setup.files, tensors);
    send_inputs(world, tensors);
  } else {
    progress.phase("planning, and generating data");
  }
  tensors.dropout_seed = flags.problem.seed;
  JobSettings settings;
  settings.world = &world;
  settings.repeat = flags.repeat;
  settings.prepare = [&](int rank, ThreadPool& pool) {
    if (!from_files) fill_synthetic(tensors, rank, flags.problem.seed, pool);
    touch_outputs(tensors, rank, pool);
  };
  settings.on_phase = [&](const std::string& phase, double expected) {
    progress.phase(phase, expected);
  };
  settings.after_pass = [&](int rank) { recording.log(rank); };
  result.job = run_job(options, tensors, settings);
  if (recorded) recording.collect(world);
  result.dropped = recording.dropped();
  if (!world.leads()) return kOk;
  for (int rank = 1; world.is_mpi() && !from_files && rank < options.placement.ranks(); ++rank) {
    fill_synthetic(tensors, rank, flags.problem.seed, *ThreadPool::of(options.threads));
  }
  progress.phase("comparing sampled rows with the definition");
  result.errors = check_sampled_rows(options, tensors, *ThreadPool::of(options.threads));
  const std::string complaint = result.errors.complaint();
  // If fp32 cannot even hold the scores, any error is allowed, even an infinite one.
  const bool infinite = std::isinf(result.errors.worst().value_or(0.0));
  if (infinite || result.errors.overflowed()) {
    if (const std::string products = overflowing_products(options, tensors); !products.empty()) {
      throw ConfigError(
          fmt::format("the inputs overflow fp32: {}, exceed 3.4e38; nothing was written. Divide "
                      "them by a power "
                      "of two",
                      products));
    }
  }
  if (!complaint.empty()) {
    throw VerificationError(fmt::format(
        "results differ from the definition on sampled rows: {}; nothing was written. This is a "
        "bug in annulus: please report the command line and the output of 'annulus doctor'",
        complaint));
  }
  if (!flags.output.empty()) {
    progress.phase("writing " + flags.output);
    result.removed = write_outputs(flags.output, tensors);
  }
  if (recorded) {
    progress.phase("writing what was recorded");
    write_recording(flags, result, recording);
  }
  progress.finish();
  if (flags.json) {
    print_json(to_json(flags, result));
  } else {
    print_table(flags, result);
  }
  return kOk;
}

}  // namespace

void add_run(CLI::App& tool, Action& chosen) {
  CLI::App* command =
      tool.add_subcommand("run", "Compute forward and backward over a ring of ranks");
  const auto flags = std::make_shared<RunFlags>();
  command
      ->add_option("--input", flags->input,
                   "Folder with q.npy, k.npy, v.npy and do.npy, [B, N, H, D]")
      ->check(not_empty("a folder"))
      ->type_name("DIR");
  command
      ->add_option("--output", flags->output, "Folder for o.npy, lse.npy, dq.npy, dk.npy, dv.npy")
      ->check(not_empty("a folder"))
      ->type_name("DIR");
  command
      ->add_option("--repeat", flags->repeat,
                   "Repetitions; times are medians (default 1; use 5 to compare speeds)")
      ->check(whole_number(1, 1000000))
      ->type_name("R");
  command
      ->add_option("--trace", flags->trace,
                   "Write a timeline of all ranks, for ui.perfetto.dev or chrome://tracing")
      ->check(not_empty("a file"))
      ->type_name("FILE");
  command
      ->add_option(
          "--report", flags->report,
          "Write a page with timeline, balance, bytes per link and memory, for any browser")
      ->check(not_empty("a file"))
      ->type_name("FILE.html");
  command
      ->add_option(
          "--log-level", flags->log_level,
          "Log on standard error what each rank does: off (default), warning (recoveries), "
          "info (also passes), debug (everything)")
      ->check(CLI::IsMember({"off", "warning", "info", "debug"}))
      ->type_name("LEVEL");
  add_output_flags(*command, flags->json, &flags->progress);
  add_execution_flags(*command, flags->problem);
  add_problem_flags(*command, flags->problem);
  add_transport_flag(*command, flags->problem)->group("Ring");
  add_limit_flags(*command, flags->problem);
  command->footer(kExamples);
  run_in_world(*command, flags->problem, chosen,
               [flags](World& world) { return run(world, *flags); });
}

}  // namespace annulus::cli
