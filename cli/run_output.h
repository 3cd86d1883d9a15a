#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "cli/device_facts.h"
#include "cli/job.h"
#include "cli/limits.h"
#include "cli/options.h"
#include "cli/recording.h"
#include "cli/sample_check.h"

namespace annulus::cli {

// The flags of 'annulus run', its results, and how they are printed.

struct RunFlags {
  ProblemFlags problem;
  std::string input;
  std::string output;
  std::string trace;
  std::string report;
  std::string log_level = "off";
  bool json = false;
  bool progress = false;
  int repeat = 1;
};

struct RunResult {
  RingOptions options;
  ChosenLimits limits;
  DeviceFacts device;
  std::string transport;
  JobReport job;
  SampledErrors errors;
  std::vector<std::string> removed;  // files of an earlier run
  std::uint64_t dropped = 0;         // events that trace and report do not have
};

void print_table(const RunFlags& flags, const RunResult& result);
[[nodiscard]] Json to_json(const RunFlags& flags, const RunResult& result);
// Called before any work: ConfigError if the files of --trace and --report cannot be written, are
// the same file, or are among the inputs or results.
void check_recording_files(const RunFlags& flags);
// Writes both files or neither.
void write_recording(const RunFlags& flags, const RunResult& result, const Recording& recording);

}  // namespace annulus::cli
