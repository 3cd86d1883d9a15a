#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "cli/tensors.h"
#include "cli/world.h"

namespace annulus::cli {

// One pass of all ranks together.
struct PassReport {
  // Per repetition, of one pass: from the last rank's start to the last rank's end.
  std::vector<double> seconds;
  std::int64_t predicted_bytes = 0;  // sent by all ranks in one pass
  std::int64_t measured_bytes = 0;   // the same as the transport counted it
  double flops = 0.0;                // over allowed pairs

  [[nodiscard]] double median_seconds() const;
  [[nodiscard]] double gflops() const;  // 0 if nothing was timed
};

struct JobReport {
  PassReport forward;
  PassReport backward;
  Schedule schedule = Schedule::ring;  // as chosen
  Travel backward_travel = Travel::keys;
  std::string kernels;  // that were used
  int threads = 0;
  std::vector<std::int64_t> peak_bytes;       // per rank: workspace, and its share of the tensors
  std::vector<std::int64_t> workspace_bytes;  // part of peak_bytes
  std::int64_t scratch_bytes = 0;             // once per process: the threads' scratch
};

struct JobSettings {
  int repeat = 1;
  // Passes of a repetition, which are enqueued one after the other and waited for once at the end.
  // On a GPU, timing a single pass would also measure the cost of starting it.
  int passes = 1;
  // Fills the inputs. Runs on every rank's thread, after its executor was made and its limits were
  // checked, and before the first pass.
  std::function<void(int rank, ThreadPool& pool)> prepare;
  // The world of an MPI job, whose processes are the ring. Null: the ranks are threads.
  World* world = nullptr;
  // On every rank's thread, after each pass.
  std::function<void(int rank)> after_pass;
  // Called on the thread of rank 0 with what begins now, and how long it took last time (0:
  // unknown).
  std::function<void(const std::string& phase, double expected_seconds)> on_phase;
};

// Runs forward, and backward if the options ask for it, on a ring. Throws VerificationError if a
// rank sends more or fewer bytes than predicted. In an MPI job only rank 0 gets all results and the
// report.
[[nodiscard]] JobReport run_job(const RingOptions& options, JobTensors& tensors,
                                const JobSettings& settings);

}  // namespace annulus::cli
