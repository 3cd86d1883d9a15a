// The simulator against passes of in-process rings whose links are limited:
//
//   build/release/bench/simulator_bench [rounds [problem [ranks]]] > measured.json
//
// Problems count from 0; without them, or ranks, all are measured one after the other. On a machine
// with cores to spare several may run at once.
//
// One thread computes, whatever the number of ranks: they share it, and the described cluster says
// so. Its FLOP/s are those of the same ring without a limit, measured before and after every pass,
// so that a busy machine slows both sides alike, and short tiles and changing threads are not the
// simulator's errors. The latency of its links is what a message of the limited ring takes beyond
// its bytes, measured before every pass: threads that slept on it wake up, milliseconds later where
// a virtual machine's host is shared.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "annulus/simulate.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kHeads = 2;
constexpr int kDim = 64;

struct Seconds {
  double forward = 0;
  double backward = 0;
};

// An executor per rank, with tensors, on a ring of its own.
class Runner {
 public:
  Runner(RingOptions options, double bytes_per_second)
      : options_(std::move(options)),
        bytes_per_second_(bytes_per_second),
        ring_(make_in_process_ring(options_.placement.ranks(),
                                   {.bytes_per_second = bytes_per_second})),
        ranks_(ring_.size()) {}

  // Ranks meet before every pass: it lasts from the last start to the last end.
  Seconds run() {
    run_in_process(ring_, [&](Transport& transport) {
      Rank& rank = ranks_[static_cast<std::size_t>(transport.rank())];
      if (rank.attention == nullptr) prepare(rank, transport);
      const std::int64_t n = options_.placement.local_tokens(transport.rank());
      const auto view = [&](std::vector<float>& data) {
        return TensorView(data.data(), DType::f32, {1, n, kHeads, kDim});
      };
      const TensorView q = view(rank.q);
      const TensorView lse(rank.lse.data(), DType::f32, {1, n, kHeads});
      rank.times[0] = Clock::now();
      rank.attention->forward(q, q, q, view(rank.o), lse);
      rank.times[1] = Clock::now();
      rank.attention->backward(q, q, q, view(rank.o), lse, q, view(rank.dq), view(rank.dk),
                               view(rank.dv));
      rank.times[2] = Clock::now();
    });
    return {between(0, 1), between(1, 2)};
  }

  // Seconds of a message from rank to rank beyond those of its bytes: a ring waits for the one that
  // wakes up last, step after step.
  double latency() {
    constexpr int kMessages = 8;
    constexpr double kOnLink = 4e-3;
    const auto bytes = static_cast<std::size_t>(kOnLink * bytes_per_second_);
    run_in_process(ring_, [&](Transport& transport) {
      Rank& rank = ranks_[static_cast<std::size_t>(transport.rank())];
      const std::vector<std::byte> out(bytes);
      std::vector<std::byte> in(bytes);
      const int size = transport.size();
      for (int i = 0; i <= kMessages; ++i) {  // in the first one ranks meet
        if (i == 1) rank.times[0] = Clock::now();
        const auto tag = static_cast<std::uint32_t>(i);
        const auto received = transport.receive((transport.rank() + size - 1) % size, tag, in);
        const auto sent = transport.send((transport.rank() + 1) % size, tag, out);
        received->wait();
        sent->wait();
      }
      rank.times[1] = Clock::now();
    });
    const double bytes_seconds = static_cast<double>(bytes) / bytes_per_second_;
    return std::max(0.0, between(0, 1) / kMessages - bytes_seconds);
  }

  [[nodiscard]] const RingOptions& options() const { return options_; }

 private:
  struct Rank {
    std::unique_ptr<RingAttention> attention;
    std::vector<float> q, o, lse, dq, dk, dv;
    Clock::time_point times[3];
  };

  // From the last rank's time a to the last one's time b.
  [[nodiscard]] double between(int a, int b) const {
    const auto last = [&](int which) {
      Clock::time_point time = ranks_[0].times[which];
      for (const Rank& rank : ranks_) time = std::max(time, rank.times[which]);
      return time;
    };
    return std::chrono::duration<double>(last(b) - last(a)).count();
  }

  void prepare(Rank& rank, Transport& transport) {
    rank.attention = std::make_unique<RingAttention>(options_, transport);
    const std::int64_t n = options_.placement.local_tokens(transport.rank());
    std::mt19937 random(static_cast<unsigned>(transport.rank()));
    std::normal_distribution<float> normal;
    rank.q.resize(static_cast<std::size_t>(n * kHeads * kDim));
    for (float& x : rank.q) x = normal(random);
    rank.o = rank.dq = rank.dk = rank.dv = rank.q;
    rank.lse.resize(static_cast<std::size_t>(n * kHeads));
  }

  RingOptions options_;
  double bytes_per_second_;
  std::vector<std::unique_ptr<Transport>> ring_;
  std::vector<Rank> ranks_;
};

// Of copies, bytes that are read and written per second.
double copy_rate() {
  std::vector<char> from(std::size_t{1} << 25, 1);
  std::vector<char> to(from.size(), 2);
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    std::memcpy(to.data(), from.data(), from.size());
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
    from[static_cast<std::size_t>(to[0])] = static_cast<char>(i);  // and nothing is left out
  }
  return 2 * static_cast<double>(from.size()) / best;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

struct Problem {
  const char* name;
  Pattern pattern;
  std::int64_t tokens;
  const char* placement;
};

RingOptions options_of(const Problem& problem, int ranks, Schedule schedule) {
  RingOptions options{problem.pattern, Placement::named(problem.placement, problem.tokens, ranks)};
  options.kv_heads = kHeads;
  options.head_dim = kDim;
  options.schedule = schedule;
  options.threads = 1;
  return options;
}

// The cluster on which the ring without a limit takes what it took.
Cluster described(const RingOptions& options, double bytes_per_second, double latency,
                  double copies, const Seconds& free) {
  Cluster cluster;
  cluster.name = "one thread";
  cluster.ranks_per_host = cluster.ranks_per_processor = options.placement.ranks();
  cluster.copy_bytes_per_second = copies;
  cluster.inside = {"link", bytes_per_second, 0, false};
  cluster.forward_flops_per_second = cluster.backward_flops_per_second = 1e9;
  const Forecast slow = simulate(options, cluster);
  cluster.forward_flops_per_second = slow.forward.computed_flops / free.forward;
  cluster.backward_flops_per_second = slow.backward->computed_flops / free.backward;
  cluster.inside.latency_seconds = latency;
  return cluster;
}

struct Setting {
  double factor;  // link time of a shard's rows over the compute of one step
  double bytes_per_second;
  std::unique_ptr<Runner> runner;
  std::vector<double> latency;
  std::vector<double> measured[2];  // forward, backward
  std::vector<double> predicted[2];
};

std::string rows_of(const Problem& problem, int ranks, Schedule schedule, int rounds,
                    double copies) {
  const RingOptions options = options_of(problem, ranks, schedule);
  Runner free(options, 0);
  (void)free.run();  // memory is touched, threads are there
  const double step = std::min(free.run().forward, free.run().forward) / ranks;
  const double shard = static_cast<double>(problem.tokens) / ranks * kHeads * 2 * kDim * 4;
  std::vector<Setting> settings;
  for (const double factor : {0.5, 1.0, 3.0}) {
    const double rate = shard / (factor * step);
    settings.push_back({factor, rate, std::make_unique<Runner>(options, rate), {}, {}, {}});
    (void)settings.back().runner->run();
  }
  for (int round = 0; round < rounds; ++round) {
    Seconds before = free.run();
    for (Setting& setting : settings) {
      const double latency = setting.runner->latency();
      setting.latency.push_back(latency);
      const Seconds measured = setting.runner->run();
      const Seconds after = free.run();
      const Seconds mean{(before.forward + after.forward) / 2,
                         (before.backward + after.backward) / 2};
      before = after;
      const Forecast forecast =
          simulate(options, described(options, setting.bytes_per_second, latency, copies, mean));
      setting.measured[0].push_back(measured.forward);
      setting.measured[1].push_back(measured.backward);
      setting.predicted[0].push_back(forecast.forward.seconds);
      setting.predicted[1].push_back(forecast.backward->seconds);
    }
  }
  std::string text;
  for (const Setting& setting : settings) {
    for (const int pass : {0, 1}) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < setting.measured[pass].size(); ++i)
        ratios.push_back(setting.predicted[pass][i] / setting.measured[pass][i]);
      const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
      text += fmt::format(
          "{}{{\"pattern\": \"{}\", \"tokens\": {}, \"placement\": \"{}\", \"ranks\": {}, "
          "\"schedule\": \"{}\", \"pass\": \"{}\", \"link_over_step\": {}, "
          "\"bytes_per_second\": {:.6g}, \"latency_seconds\": {:.3g}, \"measured_seconds\": "
          "{:.6g}, "
          "\"predicted_seconds\": {:.6g}, \"ratio\": {:.4f}, \"ratio_least\": {:.4f}, "
          "\"ratio_most\": {:.4f}}}",
          text.empty() ? "  " : ",\n  ", problem.name, problem.tokens, problem.placement, ranks,
          name_of(schedule), pass == 0 ? "forward" : "backward", setting.factor,
          setting.bytes_per_second, median(setting.latency), median(setting.measured[pass]),
          median(setting.predicted[pass]), median(ratios), *least, *most);
    }
  }
  return text;
}

int run(int rounds, int only_problem, int only_ranks) {
  const std::vector<std::int64_t> segments{1024, 8192};
  const std::vector<std::int64_t> dilations{1, 4};
  const std::vector<Problem> problems = {
      {"dense", dense(kHeads), 3072, "contiguous"},
      {"dense causal", dense(kHeads, true), 4096, "zigzag"},
      {"LongNet", longnet(kHeads, segments, dilations), 8192, "contiguous"}};
  const double copies = copy_rate();
  std::string rows;
  const std::vector<int> ring_sizes =
      only_ranks > 0 ? std::vector<int>{only_ranks} : std::vector<int>{2, 4, 8};
  for (int i = 0; i < static_cast<int>(problems.size()); ++i) {
    if (only_problem >= 0 && i != only_problem) continue;
    const Problem& problem = problems[static_cast<std::size_t>(i)];
    for (const int ranks : ring_sizes) {
      for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
        rows += (rows.empty() ? "" : ",\n") + rows_of(problem, ranks, schedule, rounds, copies);
        std::fprintf(stderr, "%s: %d ranks, %s\n", problem.name, ranks, name_of(schedule));
      }
    }
  }
  fmt::print(
      "{{\"rounds\": {}, \"heads\": {}, \"head_dim\": {}, \"copy_bytes_per_second\": {:.4g},"
      "\n \"rows\": [\n{}\n ]}}\n",
      rounds, kHeads, kDim, copies, rows);
  return 0;
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  try {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
    if (rounds < 1) {
      std::fprintf(stderr, "simulator_bench: rounds is %s, expected 1 or more\n", argv[1]);
      return 2;
    }
    return annulus::run(rounds, argc > 2 ? std::atoi(argv[2]) : -1,
                        argc > 3 ? std::atoi(argv[3]) : 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simulator_bench: %s\n", error.what());
    return 1;
  }
}
