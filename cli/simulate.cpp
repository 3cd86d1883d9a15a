#include "annulus/simulate.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "cli/cluster_file.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/options.h"

namespace annulus::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  annulus simulate --ranks 1024 --tokens 1000000000 --heads 16 --head-dim 128 --dtype bf16
      LongNet over a billion tokens on 128 hosts of eight H200s
  annulus simulate --pattern dense --causal --tokens 1M --ranks 64 --dtype bf16 --head-dim 128 \
      --placement zigzag --schedule ring --cluster h200-one-port
      where one network port per host is the bottleneck
  annulus simulate --ranks 64 --cluster mine.json --json
      mine.json: {"like": "h200", "ranks_per_host": 4, "between": {"bytes_per_second": 25e9}}
  annulus simulate --pattern dense --tokens 1M --sweep-ranks 8,16,32,64 --sweep-schedules ring,gather
      one line for each)";

struct SimulateFlags {
  ProblemFlags problem;
  std::string cluster = "h200";
  std::vector<int> sweep_ranks;
  std::vector<std::string> sweep_placements;
  std::vector<std::string> sweep_schedules;
  bool json = false;

  [[nodiscard]] bool sweeps() const {
    return !sweep_ranks.empty() || !sweep_placements.empty() || !sweep_schedules.empty();
  }
};

// One configuration and its forecast.
struct Outcome {
  RingOptions options;
  ProblemFlags flags;
  Forecast forecast;
  double seconds = 0;  // of simulating
};

Outcome simulate_one(const ProblemFlags& flags, const Cluster& cluster) {
  const Shape shape = shape_from(flags);
  Outcome outcome{ring_options_from(flags, shape, flags.options.dtype), flags, {}, 0};
  const auto begin = std::chrono::steady_clock::now();
  outcome.forecast = simulate(outcome.options, cluster);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return outcome;
}

std::vector<Outcome> simulate_all(const SimulateFlags& flags, const Cluster& cluster) {
  std::vector<ProblemFlags> problems{flags.problem};
  const auto multiply = [&](const auto& values, const auto& set) {
    if (values.empty()) return;
    std::vector<ProblemFlags> more;
    for (const ProblemFlags& problem : problems) {
      for (const auto& value : values) set(more.emplace_back(problem), value);
    }
    problems = std::move(more);
  };
  multiply(flags.sweep_placements,
           [](ProblemFlags& p, const std::string& name) { p.placement = name; });
  multiply(flags.sweep_schedules, [](ProblemFlags& p, const std::string& name) {
    p.options.schedule = name == "ring"     ? Schedule::ring
                         : name == "gather" ? Schedule::gather
                                            : Schedule::automatic;
  });
  multiply(flags.sweep_ranks, [](ProblemFlags& p, int ranks) { p.ranks = ranks; });
  std::vector<Outcome> outcomes;
  Progress progress(false);
  for (const ProblemFlags& problem : problems) {
    progress.phase(
        fmt::format("{} of {}: {} ranks", outcomes.size() + 1, problems.size(), problem.ranks));
    outcomes.push_back(simulate_one(problem, cluster));
  }
  progress.finish();
  return outcomes;
}

Json to_json(const PassForecast& pass) {
  return {{"seconds", pass.seconds},
          {"compute_seconds", pass.compute_seconds},
          {"transfer_seconds", pass.transfer_seconds},
          {"overlap", pass.overlap},
          {"waiting", pass.waiting},
          {"flops", pass.flops},
          {"computed_flops", pass.computed_flops},
          {"bytes", pass.bytes},
          {"busiest_link", pass.busiest_link.empty() ? Json() : Json(pass.busiest_link)},
          {"busiest_link_seconds", pass.busiest_link_seconds}};
}

Json to_json(const Outcome& outcome, const Cluster& cluster) {
  const Forecast& f = outcome.forecast;
  Json json;
  json["ranks"] = outcome.options.placement.ranks();
  json["placement"] = outcome.flags.placement;
  json["schedule"] = name_of(f.schedule);
  json["backward_travel"] = f.backward ? Json(name_of(f.backward_travel)) : Json();
  json["steps"] = f.steps;
  json["counted"] = f.counted;
  json["forward"] = to_json(f.forward);
  json["backward"] = f.backward ? to_json(*f.backward) : Json();
  json["memory"] = {
      {"rank", f.memory.rank},
      {"tensor_bytes", f.memory.tensor_bytes},
      {"state_bytes", f.memory.state_bytes},
      {"communication_bytes", f.memory.communication_bytes},
      {"total_bytes", f.memory.total()},
      {"fits", cluster.memory_bytes > 0 ? Json(f.memory.total() <= cluster.memory_bytes) : Json()}};
  json["simulated_in_seconds"] = outcome.seconds;
  return json;
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

std::string pass_text(const char* name, const PassForecast& pass, int ranks) {
  std::string text =
      fmt::format("{:<18} {}: {} per rank\n", name, format_seconds(pass.seconds),
                  format_flops(pass.seconds > 0 ? pass.flops / pass.seconds / ranks / 1e9 : 0.0));
  const auto line = [&](const char* what, const std::string& value) {
    text += fmt::format("{:<18} {}\n", what, value);
  };
  line("  compute alone", format_seconds(pass.compute_seconds));
  line("  transfers alone", fmt::format("{}, {} in all", format_seconds(pass.transfer_seconds),
                                        format_bytes(pass.bytes)));
  line("  overlap", fmt::format("{} of the shorter of these two; ranks wait {} of the time",
                                percent(pass.overlap), percent(pass.waiting)));
  if (!pass.busiest_link.empty()) {
    line("  busiest link", fmt::format("{}: busy {} of the time", pass.busiest_link,
                                       percent(pass.busiest_link_seconds / pass.seconds)));
  }
  line("  bound by",
       pass.compute_seconds >= pass.transfer_seconds ? "compute" : "the busiest link");
  return text;
}

std::string memory_text(const MemoryForecast& memory, const Cluster& cluster) {
  std::string text =
      fmt::format("{} on rank {}: tensors {}, state {}, communication {}",
                  format_bytes(memory.total()), memory.rank, format_bytes(memory.tensor_bytes),
                  format_bytes(memory.state_bytes), format_bytes(memory.communication_bytes));
  if (cluster.memory_bytes > 0 && memory.total() > cluster.memory_bytes)
    text += fmt::format("; a rank has {}", format_bytes(cluster.memory_bytes));
  return text;
}

std::string text_of(const Outcome& outcome, const Cluster& cluster) {
  const Forecast& f = outcome.forecast;
  const int ranks = outcome.options.placement.ranks();
  std::string text = fmt::format("{:<18} {} ranks on '{}', {} per host\n", "cluster", ranks,
                                 cluster.name, cluster.ranks_per_host);
  if (!cluster.source.empty()) text += fmt::format("{:<18} {}\n", "  figures", cluster.source);
  text += fmt::format("{:<18} {}, {} tokens, {} heads of {}, {}\n", "problem",
                      describe(outcome.options.pattern), outcome.options.placement.tokens(),
                      outcome.options.pattern.heads, outcome.options.head_dim,
                      name_of(outcome.options.dtype));
  text += fmt::format("{:<18} {}, {}, {} steps\n", "plan", outcome.flags.placement,
                      name_of(f.schedule), f.steps);
  if (!f.counted)
    text += fmt::format("{:<18} {}\n", "", "work is split over steps in proportion to rows");
  text += pass_text("forward", f.forward, ranks);
  if (f.backward) {
    text += pass_text("backward", *f.backward, ranks);
    text += fmt::format("{:<18} {}\n", "  travelling", name_of(f.backward_travel));
  }
  text += fmt::format("{:<18} {}\n", "memory", memory_text(f.memory, cluster));
  text += fmt::format("{:<18} {}\n", "simulated in", format_seconds(outcome.seconds));
  return text;
}

std::string table_of(const std::vector<Outcome>& outcomes) {
  std::string text = fmt::format("{:>6}  {:<10}  {:<6}  {:>10}  {:>8}  {:>10}  {:>8}  {:>10}  {}\n",
                                 "ranks", "placement", "sched.", "forward", "overlap", "backward",
                                 "overlap", "memory", "busiest link of forward");
  for (const Outcome& o : outcomes) {
    const Forecast& f = o.forecast;
    text +=
        fmt::format("{:>6}  {:<10}  {:<6}  {:>10}  {:>8}  {:>10}  {:>8}  {:>10}  {}\n",
                    o.options.placement.ranks(), o.flags.placement, name_of(f.schedule),
                    format_seconds(f.forward.seconds), percent(f.forward.overlap),
                    f.backward ? format_seconds(f.backward->seconds) : "",
                    f.backward ? percent(f.backward->overlap) : "", format_bytes(f.memory.total()),
                    f.forward.busiest_link.empty()
                        ? "none"
                        : fmt::format("{}, {}", f.forward.busiest_link,
                                      percent(f.forward.busiest_link_seconds / f.forward.seconds)));
  }
  return text;
}

int simulate_command(const SimulateFlags& flags) {
  const Cluster cluster = cluster_from(flags.cluster);
  const std::vector<Outcome> outcomes = simulate_all(flags, cluster);
  if (!flags.json) {
    print(flags.sweeps() ? table_of(outcomes) : text_of(outcomes.front(), cluster));
    return kOk;
  }
  Json json;
  json["command"] = "simulate";
  json["cluster"] = cli::to_json(cluster);
  if (flags.sweeps()) {
    json["sweep"] = Json::array();
    for (const Outcome& outcome : outcomes) json["sweep"].push_back(to_json(outcome, cluster));
  } else {
    json.update(to_json(outcomes.front(), cluster));
  }
  // Of a sweep, the parameters of its first line.
  json["parameters"] = parameters_json(outcomes.front().flags, outcomes.front().options);
  print_json(json);
  return kOk;
}

}  // namespace

void add_simulate(CLI::App& tool, Action& chosen) {
  CLI::App* command =
      tool.add_subcommand("simulate", "Predict time, overlap and memory on a described cluster");
  const auto flags = std::make_shared<SimulateFlags>();
  command
      ->add_option("--cluster", flags->cluster,
                   "h200 (default), h200-infiniband, h200-one-port, or a JSON file")
      ->check(not_empty("a preset or a file name"))
      ->type_name("NAME");
  add_output_flags(*command, flags->json);
  add_problem_flags(*command, flags->problem);
  add_schedule_limit_flag(*command, flags->problem);
  add_option_flag(*command, flags->problem, "backward");
  add_option_flag(*command, flags->problem, "blocking");
  const std::string sweep = "Sweep: a line for every combination";
  command->add_option("--sweep-ranks", flags->sweep_ranks, "Instead of --ranks")
      ->delimiter(',')
      ->check(whole_number(1, 4096))
      ->type_name("P,...")
      ->group(sweep);
  command->add_option("--sweep-placements", flags->sweep_placements, "Instead of --placement")
      ->delimiter(',')
      ->check(CLI::IsMember(placement_names()))
      ->type_name("NAME,...")
      ->group(sweep);
  command->add_option("--sweep-schedules", flags->sweep_schedules, "Instead of --schedule")
      ->delimiter(',')
      ->check(CLI::IsMember({"ring", "gather", "auto"}))
      ->type_name("NAME,...")
      ->group(sweep);
  command->footer(kExamples);
  command->callback([flags, &chosen] { chosen = [flags] { return simulate_command(*flags); }; });
}

}  // namespace annulus::cli
