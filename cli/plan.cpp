#include "annulus/plan.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "annulus/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "draw/plan_text.h"
#include "kernels/backend.h"
#include "plan/traffic.h"
#include "ring/agreement.h"
#include "ring/option_check.h"
#include "ring/plans.h"
#include "ring/schedule.h"

namespace annulus::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  annulus plan --tokens 1M --ranks 64
      who computes and receives how much; nothing is computed or allocated
  annulus plan --tokens 64k --ranks 8 --causal --placement zigzag --svg plan.svg
      a picture to look at in a browser
  annulus plan --tokens 1000000000 --ranks 4096 --rank 17
      what one rank of many keeps, sends and receives
  annulus plan --pattern dense --tokens 8k --schedule gather --json
      for scripts
  annulus plan --travel queries
      backward with travelling queries instead of travelling keys)";

struct PlanFlags {
  ProblemFlags problem;
  std::string travel = "keys";
  std::optional<int> rank;  // of a single rank
  std::string svg;
  bool json = false;
};

// The plan that RingAttention would make, schedule `auto` resolved by the same rule.
Plan make_plan(const RingOptions& options, Travel travel, int rank) {
  const auto make = [&](Schedule schedule, Travel side) {
    return Plan(
        {options.pattern, options.placement, options.placement, options.kv_heads, schedule, side},
        rank);
  };
  const Schedule schedule = options.reproducible ? Schedule::gather : options.schedule;
  if (schedule != Schedule::automatic) return make(schedule, travel);
  const Plan keys = make(Schedule::ring, Travel::keys);
  const Schedule chosen =
      ring::choose_schedule(keys, options, ring::row_bytes(options, Travel::keys, false).there);
  return travel == Travel::keys ? keys.with_schedule(chosen) : make(chosen, travel);
}

std::int64_t bytes_of(std::int64_t unit_rows, std::int64_t row) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 4;  // sums fit, too
  if (unit_rows > kMost / row) {
    throw ConfigError(
        fmt::format("{} rows of {} would travel, more bytes than can be counted: choose fewer "
                    "tokens, heads or sequences",
                    unit_rows, format_bytes(row)));
  }
  return unit_rows * row;
}

// Bytes that all ranks send, including the records of their agreement: what a transport counts.
std::int64_t forward_bytes(const RingOptions& options, const Plan& plan) {
  return bytes_of(plan.total_unit_rows(), ring::row_bytes(options, Travel::keys, false).there) +
         plan.ranks() * ring::agreement_bytes(plan.ranks());
}

std::int64_t backward_bytes(const RingOptions& options, const Plan& plan) {
  const std::int64_t agreement = plan.ranks() * ring::agreement_bytes(plan.ranks());
  const ring::RowBytes bytes = ring::row_bytes(options, plan.options().travel, true);
  if (!options.reproducible)
    return bytes_of(plan.total_unit_rows(), bytes.there + bytes.back) + agreement;
  // Keys travel for dQ, queries for dK and dV. Nothing returns.
  std::int64_t sum = agreement;
  for (const Travel travel : {Travel::keys, Travel::queries}) {
    const Plan side({options.pattern, options.placement, options.placement, options.kv_heads,
                     Schedule::gather, travel},
                    plan.rank());
    sum += bytes_of(side.total_unit_rows(), ring::row_bytes(options, travel, true).there);
  }
  return sum;
}

Json to_json(const PlanFlags& flags, const RingOptions& options, const Plan& plan,
             double plan_seconds) {
  const PlanTotals totals = plan_totals(plan);
  const Travel travel = plan.options().travel;
  Json json;
  json["command"] = "plan";
  json["schedule"] = name_of(plan.options().schedule);
  json["travel"] = name_of(travel);
  json["steps"] = plan.steps();
  json["parcels"] = traffic_of(plan).parcels();
  json["head_classes"] = plan.classes().size();
  json["digest"] = fmt::format("{:016x}", plan.digest());
  json["plan_seconds"] = plan_seconds;
  json["totals"] = {
      {"pairs", totals.pairs},
      {"balance", totals.balance},
      {"unit_rows_moved", totals.moved},
      {"unit_rows_all_gather", totals.all_gather},
      {"forward_bytes", travel == Travel::keys ? Json(forward_bytes(options, plan)) : Json()},
      {"backward_bytes", backward_bytes(options, plan)}};
  json["ranks"] = Json::array();
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    if (flags.rank && rank != *flags.rank) continue;
    const RankTotals& mine = totals.ranks[static_cast<std::size_t>(rank)];
    json["ranks"].push_back({{"rank", rank},
                             {"tokens", plan.query_placement().local_tokens(rank)},
                             {"pairs", mine.work},
                             {"unit_rows_received", mine.received},
                             {"unit_rows_sent", mine.sent},
                             {"largest_step_unit_rows", mine.largest_step}});
    if (flags.rank) json["ranks"].back()["parcels"] = plan.parcels().size();
  }
  json["svg"] = flags.svg.empty() ? Json() : Json(flags.svg);
  json["parameters"] = parameters_json(flags.problem, options);
  return json;
}

int plan_command(const PlanFlags& flags) {
  const Shape shape = shape_from(flags.problem);
  const RingOptions options = ring_options_from(flags.problem, shape, flags.problem.options.dtype);
  // Rejects problems that no kernel can compute.
  ring::check_values(options);
  (void)ring::computation_of(options, *backend_of(options.device, options.threads), shape.tokens,
                             shape.tokens);
  if (flags.rank && *flags.rank >= options.placement.ranks()) {
    throw ConfigError(fmt::format("--rank is {}, expected 0..{}: --ranks is {}", *flags.rank,
                                  options.placement.ranks() - 1, options.placement.ranks()));
  }
  const Travel travel = flags.travel == "queries" ? Travel::queries : Travel::keys;
  const auto begin = std::chrono::steady_clock::now();
  const Plan plan = make_plan(options, travel, flags.rank.value_or(0));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  // The picture is written last, after everything else that can fail.
  std::string text;
  Json json;
  if (flags.json) {
    json = to_json(flags, options, plan, seconds);
  } else {
    text = flags.rank ? plan_rank_table(plan) : plan_table(plan);
    if (travel == Travel::keys) {
      text += fmt::format("{:<18} {} in forward\n", "bytes",
                          format_bytes(forward_bytes(options, plan)));
    }
    text += fmt::format(
        "{:<18} {} in backward, fp32 gradients included ({}, head dim {}, batch {})\n",
        travel == Travel::keys ? "" : "bytes", format_bytes(backward_bytes(options, plan)),
        name_of(options.dtype), options.head_dim, options.batch);
    text += fmt::format("{:<18} {}\n", "planned in", format_seconds(seconds));
    if (!flags.svg.empty()) text += fmt::format("{:<18} {}\n", "picture", flags.svg);
  }
  if (!flags.svg.empty()) {
    OutputFile picture("picture", flags.svg);
    picture.write(plan_svg(plan));
    picture.commit();
  }
  if (flags.json) {
    print_json(json);
  } else {
    print(text);
  }
  return kOk;
}

}  // namespace

void add_plan(CLI::App& tool, Action& chosen) {
  CLI::App* command =
      tool.add_subcommand("plan", "Show what each rank computes and sends in each step");
  const auto flags = std::make_shared<PlanFlags>();
  add_choice(*command, "--travel", flags->travel, {"keys", "queries"},
             "Which rows leave their owner (default keys)");
  command->add_option("--rank", flags->rank, "Show one rank's view instead of all ranks")
      ->check(whole_number(0, std::numeric_limits<int>::max()))
      ->type_name("R");
  command->add_option("--svg", flags->svg, "Write a picture of the plan")
      ->check(not_empty("a file name"))
      ->type_name("FILE");
  add_output_flags(*command, flags->json);
  add_problem_flags(*command, flags->problem);
  add_schedule_limit_flag(*command, flags->problem);
  command->footer(kExamples);
  command->callback([flags, &chosen] { chosen = [flags] { return plan_command(*flags); }; });
}

}  // namespace annulus::cli
