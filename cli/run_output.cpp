#include "cli/run_output.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

#include "annulus/error.h"
#include "cli/console.h"
#include "cli/output_file.h"
#include "cli/report.h"
#include "cli/tensor_files.h"
#include "cli/trace.h"
#include "draw/plan_text.h"

namespace annulus::cli {
namespace {

std::string error_text(const std::optional<SampledError>& error) {
  return error ? fmt::format("{:.1e}", error->found) : "-";
}

// What was run, as {name, text} in the order of printing.
std::vector<std::pair<std::string, std::string>> facts_of(const RunFlags& flags,
                                                          const RunResult& result) {
  const RingOptions& options = result.options;
  const Placement& placement = options.placement;
  const JobReport& job = result.job;
  std::vector<std::pair<std::string, std::string>> facts;
  const auto fact = [&](const char* name, std::string value) {
    facts.emplace_back(name, std::move(value));
  };
  fact("pattern", describe(options.pattern));
  fact("tensors",
       fmt::format("{} sequence{} of {} tokens, {} heads{}, head dim {}, {}, {}", options.batch,
                   options.batch == 1 ? "" : "s", with_commas(placement.tokens()),
                   options.pattern.heads,
                   options.kv_heads == options.pattern.heads
                       ? ""
                       : fmt::format(" ({} of keys)", options.kv_heads),
                   options.head_dim, name_of(options.dtype),
                   flags.input.empty() ? fmt::format("synthetic (seed {})", flags.problem.seed)
                                       : "from " + flags.input));
  fact("ring",
       fmt::format("{} rank{}{}, {}, schedule {}{}{}", placement.ranks(),
                   placement.ranks() == 1 ? "" : "s", result.transport == "mpi" ? " over MPI" : "",
                   placement.name(), name_of(job.schedule),
                   options.reproducible ? ", reproducible" : "",
                   options.backward && placement.ranks() > 1
                       ? fmt::format(", {} travel in backward", name_of(job.backward_travel))
                       : ""));
  fact("kernels",
       result.device.on_cpu()
           ? fmt::format("{}, {} thread{}", job.kernels, job.threads, job.threads == 1 ? "" : "s")
           : fmt::format("{} on {}", job.kernels, result.device.text()));
  fact("limits",
       fmt::format("per rank {} elements of q, k, v and {} of messages,\n            {}",
                   compact(static_cast<double>(options.limits.qkv_elements)),
                   format_bytes(options.limits.communication_bytes), result.limits.origin));
  return facts;
}

// Facts about the run that the trace and the report state beside its events.
Json facts_json(const RunFlags& flags, const RunResult& result) {
  const JobReport& job = result.job;
  Json facts;
  facts["lines"] = Json::object();
  for (const auto& [name, value] : facts_of(flags, result)) facts["lines"][name] = value;
  facts["tiles"] = Json::object();
  const auto pass = [&](const char* name, const PassReport& report) {
    facts["tiles"][fmt::format("{}, {}", name, format_flops(report.gflops()))] =
        format_seconds(report.median_seconds());
  };
  pass("forward", job.forward);
  if (result.options.backward) pass("backward", job.backward);
  facts["footer"] = fmt::format(
      "annulus {}. Times are those of the hosts. {} Messages last from posting until the host "
      "knows "
      "that they have arrived.",
      ANNULUS_VERSION,
      result.device.on_cpu()
          ? "Ranks that are threads of one process share its cores: they compute in turns."
          : "The device computes later than shown: bars are the time that enqueuing took.");
  return facts;
}

}  // namespace

void print_table(const RunFlags& flags, const RunResult& result) {
  const RingOptions& options = result.options;
  const JobReport& job = result.job;
  const bool backward = options.backward;
  std::string text = "\n";
  for (const auto& [name, value] : facts_of(flags, result))
    text += fmt::format("  {:<9} {}\n", name, value);

  const auto row = [&](const char* name, const std::string& forward, const std::string& back,
                       const std::string& note = "") {
    text += fmt::format("  {:<9} {:>14}", name, forward);
    if (backward) text += fmt::format(" {:>14}", back);
    text += (note.empty() ? "" : "   " + note) + "\n";
  };
  text += "\n";
  row("", "forward", "backward");
  row("time", format_seconds(job.forward.median_seconds()),
      format_seconds(job.backward.median_seconds()),
      flags.repeat == 1 ? "" : fmt::format("median of {}", flags.repeat));
  row("speed", format_flops(job.forward.gflops()), format_flops(job.backward.gflops()),
      "over allowed pairs");
  row("sent", format_bytes(job.forward.measured_bytes), format_bytes(job.backward.measured_bytes),
      "all ranks, as predicted to the byte");
  const SampledErrors& errors = result.errors;
  row("error", "o " + error_text(errors.o), "dq " + error_text(errors.dq),
      fmt::format("relative, worst of {} sampled rows against fp64", errors.rows));
  row("", "lse " + error_text(errors.lse), errors.dk ? "dk " + error_text(errors.dk) : "",
      "lse: absolute");
  if (backward) row("", "", "dv " + error_text(errors.dv));
  if (errors.nonfinite_rows > 0) {
    text += fmt::format("  {:<9} {} of these rows are NaN, as expected: check the inputs for NaN\n",
                        "", errors.nonfinite_rows);
  }
  const auto [least, most] = std::minmax_element(job.peak_bytes.begin(), job.peak_bytes.end());
  const std::string smallest = format_bytes(*least);
  const std::string largest = format_bytes(*most);
  text += fmt::format("\n  {:<9} {}{} per rank{}\n", "memory", largest,
                      smallest == largest ? "" : " (smallest " + smallest + ")",
                      result.device.on_cpu() ? ", and " + format_bytes(job.scratch_bytes) +
                                                   " of scratch for the threads"
                                             : " on the device");
  if (!flags.output.empty()) {
    text += fmt::format("  {:<9} o, lse{} in {}\n", "written", backward ? ", dq, dk, dv" : "",
                        flags.output);
  }
  const std::string lost =
      result.dropped == 0 ? ""
                          : fmt::format(", without the oldest {} events",
                                        with_commas(static_cast<std::int64_t>(result.dropped)));
  if (!flags.trace.empty()) text += fmt::format("  {:<9} {}{}\n", "trace", flags.trace, lost);
  if (!flags.report.empty()) text += fmt::format("  {:<9} {}{}\n", "report", flags.report, lost);
  if (!result.removed.empty()) {
    text += fmt::format("  {:<9} {}, which an earlier run left there\n", "removed",
                        fmt::join(result.removed, ", "));
  }
  print(text + "\n");
}

Json to_json(const RunFlags& flags, const RunResult& result) {
  const JobReport& job = result.job;
  const SampledErrors& errors = result.errors;
  const auto number = [](const std::optional<SampledError>& error) {
    return error ? Json(error->found) : Json();
  };
  Json json;
  json["command"] = "run";
  json["forward_seconds"] = job.forward.median_seconds();
  json["backward_seconds"] = result.options.backward ? Json(job.backward.median_seconds()) : Json();
  json["forward_gflops"] = job.forward.gflops();
  json["backward_gflops"] = result.options.backward ? Json(job.backward.gflops()) : Json();
  json["predicted_bytes"] = {{"forward", job.forward.predicted_bytes},
                             {"backward", job.backward.predicted_bytes}};
  json["measured_bytes"] = {{"forward", job.forward.measured_bytes},
                            {"backward", job.backward.measured_bytes}};
  json["peak_bytes_per_rank"] = job.peak_bytes;
  json["workspace_bytes_per_rank"] = job.workspace_bytes;
  json["scratch_bytes"] = job.scratch_bytes;
  json["sampled_relative_error"] = errors.worst() ? Json(*errors.worst()) : Json();
  json["sampled_errors"] = {{"rows", errors.rows},
                            {"o", number(errors.o)},
                            {"dq", number(errors.dq)},
                            {"dk", number(errors.dk)},
                            {"dv", number(errors.dv)},
                            {"lse_absolute", number(errors.lse)},
                            {"nonfinite_rows", errors.nonfinite_rows}};
  json["transport"] = result.transport;
  json["schedule"] = name_of(job.schedule);
  json["backward_travel"] = name_of(job.backward_travel);
  add_device(json, result.device);
  json["kernels"] = job.kernels;
  json["threads"] = job.threads;
  json["allowed_pairs"] =
      allowed_pairs(result.options.pattern, result.options.placement.tokens(),
                    result.options.keys().tokens()) *
      static_cast<double>(result.options.pattern.times_in(result.options.batch));
  json["repeat"] = flags.repeat;
  json["forward_seconds_all"] = job.forward.seconds;
  json["backward_seconds_all"] = job.backward.seconds;
  json["limits_origin"] = result.limits.origin;
  json["parameters"] = parameters_json(flags.problem, result.options);
  json["input"] = flags.input.empty() ? Json() : Json(flags.input);
  json["output"] = flags.output.empty() ? Json() : Json(flags.output);
  json["trace"] = flags.trace.empty() ? Json() : Json(flags.trace);
  json["report"] = flags.report.empty() ? Json() : Json(flags.report);
  json["dropped_events"] = result.dropped;
  json["removed"] = result.removed;
  return json;
}

void check_recording_files(const RunFlags& flags) {
  std::vector<std::filesystem::path> taken = tensor_files(flags.input, flags.output);
  const auto check = [&](const char* kind, const std::string& path) {
    if (path.empty()) return;
    const std::filesystem::path target = check_output_file(kind, path);
    if (target.empty()) return;  // written through
    if (std::find(taken.begin(), taken.end(), target) != taken.end()) {
      throw ConfigError(fmt::format(
          "{} '{}': is the same file as '{}', which this run reads or writes: choose another name",
          kind, path, target.string()));
    }
    taken.push_back(target);
  };
  check("trace", flags.trace);
  check("report", flags.report);
}

void write_recording(const RunFlags& flags, const RunResult& result, const Recording& recording) {
  const Json facts = facts_json(flags, result);
  std::vector<OutputFile> files;
  const auto write = [&](const char* kind, const std::string& path, const std::string& text) {
    files.emplace_back(kind, path);
    files.back().write(text);
  };
  if (!flags.trace.empty()) write("trace", flags.trace, chrome_trace(recording, facts));
  if (!flags.report.empty())
    write("report", flags.report, report_page(recording, result.job, facts));
  commit_together(files, {});
}

}  // namespace annulus::cli
