#include "cli/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "annulus/in_process.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device_tensors.h"
#include "cli/shard_exchange.h"
#include "ring/limits.h"

namespace annulus::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct PassRecord {
  Clock::time_point start;
  Clock::time_point end;
  std::int64_t bytes = 0;  // of all passes
};

struct RankRecord {
  std::vector<PassRecord> forward;
  std::vector<PassRecord> backward;
  std::int64_t predicted_forward = 0;
  std::int64_t predicted_backward = 0;
};

template <typename Pass>
PassRecord record(const Transport& transport, RingAttention& ring, int passes, const Pass& pass) {
  PassRecord record;
  const std::uint64_t before = transport.counters().bytes_sent;
  record.start = Clock::now();
  for (int i = 0; i < passes; ++i) pass();
  ring.synchronize();
  record.end = Clock::now();
  record.bytes = static_cast<std::int64_t>(transport.counters().bytes_sent - before);
  return record;
}

// A pass begins with an agreement of all ranks, in which early ranks wait for late ones. So it is
// timed from the last start to the last end.
PassReport summarise(const std::vector<RankRecord>& ranks,
                     std::vector<PassRecord> RankRecord::*pass, std::int64_t RankRecord::*predicted,
                     const char* name, double flops, int passes) {
  PassReport report;
  report.flops = flops;
  const std::size_t repetitions = (ranks[0].*pass).size();
  for (std::size_t i = 0; i < repetitions; ++i) {
    Clock::time_point start = (ranks[0].*pass)[i].start;
    Clock::time_point end = (ranks[0].*pass)[i].end;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const PassRecord& record = (ranks[rank].*pass)[i];
      start = std::max(start, record.start);
      end = std::max(end, record.end);
      if (record.bytes != passes * (ranks[rank].*predicted)) {
        throw VerificationError(fmt::format(
            "rank {} sent {} bytes in {}, {} were predicted: this is a bug in annulus, please "
            "report the command line",
            rank, record.bytes, name, passes * (ranks[rank].*predicted)));
      }
    }
    report.seconds.push_back(std::chrono::duration<double>(end - start).count() / passes);
  }
  if (repetitions == 0) return report;
  for (const RankRecord& rank : ranks) {
    report.predicted_bytes += rank.*predicted;
    report.measured_bytes += (rank.*pass)[0].bytes / passes;
  }
  return report;
}

// What the other ranks report to rank 0. Their clocks may differ from its own, so a pass takes as
// long as on its slowest rank: a barrier came just before it.
Json to_json(const std::vector<PassRecord>& passes) {
  Json json = Json::array();
  for (const PassRecord& pass : passes) {
    json.push_back({std::chrono::duration<double>(pass.end - pass.start).count(), pass.bytes});
  }
  return json;
}

std::vector<PassRecord> passes_from(const Json& json) {
  std::vector<PassRecord> passes;
  for (const Json& one : json) {
    const std::chrono::duration<double> length(one[0].get<double>());
    PassRecord& pass = passes.emplace_back();
    pass.end = pass.start + std::chrono::duration_cast<Clock::duration>(length);
    pass.bytes = one[1].get<std::int64_t>();
  }
  return passes;
}

void gather_records(World& world, std::vector<RankRecord>& records, JobReport& report) {
  const auto own = static_cast<std::size_t>(world.rank());
  const Json mine = {to_json(records[own].forward),  to_json(records[own].backward),
                     records[own].predicted_forward, records[own].predicted_backward,
                     report.peak_bytes[own],         report.workspace_bytes[own]};
  const std::vector<std::string> all = world.gather(to_text(mine));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Json json = Json::parse(all[rank]);
    records[rank] = {passes_from(json[0]), passes_from(json[1]), json[2].get<std::int64_t>(),
                     json[3].get<std::int64_t>()};
    report.peak_bytes[rank] = json[4].get<std::int64_t>();
    report.workspace_bytes[rank] = json[5].get<std::int64_t>();
  }
}

std::int64_t branch_state_bytes(const RingOptions& options, std::int64_t local_tokens) {
  if (!options.backward || options.mix_gradient != MixGradient::detached) return 0;
  return static_cast<std::int64_t>(options.pattern.branches.size()) * options.batch * local_tokens *
         options.pattern.heads * (options.head_dim + 1) * 4;
}

}  // namespace

double PassReport::median_seconds() const { return median(seconds); }

double PassReport::gflops() const {
  const double time = median_seconds();
  return time > 0.0 ? flops / time / 1e9 : 0.0;
}

JobReport run_job(const RingOptions& options, JobTensors& tensors, const JobSettings& settings) {
  const int ranks = options.placement.ranks();
  std::vector<RankRecord> records(static_cast<std::size_t>(ranks));
  JobReport report;
  report.peak_bytes.resize(records.size());
  report.workspace_bytes.resize(records.size());
  const double pair_flops =
      allowed_pairs(options.pattern, options.placement.tokens(), options.keys().tokens()) *
      static_cast<double>(options.pattern.times_in(options.batch)) * options.head_dim;

  const bool by_mpi = settings.world != nullptr && settings.world->is_mpi();
  const auto body = [&](Transport& transport) {
    const int rank = transport.rank();
    const auto at = static_cast<std::size_t>(rank);
    const auto announce = [&](const char* pass, int repetition, double expected) {
      if (rank != 0 || !settings.on_phase) return;
      settings.on_phase(settings.repeat == 1
                            ? std::string(pass)
                            : fmt::format("{} {}/{}", pass, repetition + 1, settings.repeat),
                        expected);
    };
    RingAttention ring(options, transport);
    const std::shared_ptr<ThreadPool> pool = ThreadPool::of(options.threads);
    const bool detached = options.backward && options.mix_gradient == MixGradient::detached;
    BranchState state = detached ? ring.make_branch_state() : BranchState();
    BranchState* kept = detached ? &state : nullptr;
    OptionalInputs more;
    more.dropout_seed = tensors.dropout_seed;
    if (settings.prepare) settings.prepare(rank, *pool);

    DeviceTensors on_device(options, tensors, rank);
    on_device.upload();
    RankRecord& mine = records[at];
    mine.predicted_forward = ring.predicted_forward_bytes();
    mine.predicted_backward = ring.predicted_backward_bytes();
    double forward_seconds = 0.0;
    double backward_seconds = 0.0;
    const auto seconds_of = [](const PassRecord& pass) {
      return std::chrono::duration<double>(pass.end - pass.start).count();
    };
    const auto meet = [&] {
      if (by_mpi) settings.world->meet();
    };
    for (int i = 0; i < settings.repeat; ++i) {
      announce("forward", i, forward_seconds);
      meet();
      mine.forward.push_back(record(transport, ring, settings.passes, [&] {
        const DeviceTensors& t = on_device;
        ring.forward(t.q, t.k, t.v, t.o, t.lse, kept, more);
      }));
      forward_seconds = seconds_of(mine.forward.back());
      if (settings.after_pass) settings.after_pass(rank);
      if (!options.backward) continue;
      // 10 D operations per pair against 4 D.
      announce("backward", i, backward_seconds > 0.0 ? backward_seconds : 2.5 * forward_seconds);
      meet();
      mine.backward.push_back(record(transport, ring, settings.passes, [&] {
        const DeviceTensors& t = on_device;
        ring.backward(t.q, t.k, t.v, t.o, t.lse, t.dout, t.dq, t.dk, t.dv, kept, more);
      }));
      backward_seconds = seconds_of(mine.backward.back());
      if (settings.after_pass) settings.after_pass(rank);
    }
    on_device.download();
    const MemoryInfo memory = ring.memory_info();
    report.workspace_bytes[at] =
        memory.workspace_bytes + branch_state_bytes(options, options.placement.local_tokens(rank));
    report.peak_bytes[at] = report.workspace_bytes[at] + tensors.shard_bytes(rank);
    if (rank == 0) {
      report.schedule = ring.schedule();
      if (options.backward) report.backward_travel = ring.backward_plan().options().travel;
      report.kernels = ring.kernels();
      report.threads = pool->threads();
      report.scratch_bytes = memory.scratch_bytes;
    }
  };
  const InProcessOptions patient = ring::patient_ring(options);
  if (by_mpi) {
    World& world = *settings.world;
    world.set_deadline(patient.deadline);
    body(world.ring());
    world.set_no_deadline();
    gather_records(world, records, report);
    collect_results(world, tensors);
    if (!world.leads()) return report;
  } else {
    run_in_process(ranks, body, patient);
  }

  report.forward = summarise(records, &RankRecord::forward, &RankRecord::predicted_forward,
                             "forward", 4.0 * pair_flops, settings.passes);
  report.backward = summarise(records, &RankRecord::backward, &RankRecord::predicted_backward,
                              "backward", 10.0 * pair_flops, settings.passes);
  return report;
}

}  // namespace annulus::cli
