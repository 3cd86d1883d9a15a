// The simulator against passes of in-process rings whose links are limited:
//
//   build/release/bench/simulator_bench [seconds [problem [ranks [schedule]]]] > measured.json
//
// Every ring is measured for so many seconds, and at least three rounds. Problems count from 0;
// without them, ranks or a schedule all are measured one after the other. On a machine with cores
// to spare several may run at once (bench/simulator.py --cpus).
//
// One thread computes, whatever the number of ranks: they share it, and the described cluster says
// so. Its FLOP/s are those of the same ring without a limit, measured before and after every round,
// so that a busy machine slows both sides alike, and short tiles and changing threads are not the
// simulator's errors. The latency of its links is what a message of the limited ring takes beyond
// its bytes, measured before every pass: threads that slept on it wake up, milliseconds later where
// a virtual machine's host is shared.

#include <fmt/format.h>
#include <fmt/ranges.h>

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
Cluster described(const RingOptions& options, double copies, const Seconds& free) {
  Cluster cluster;
  cluster.name = "one thread";
  cluster.ranks_per_host = cluster.ranks_per_processor = options.placement.ranks();
  cluster.copy_bytes_per_second = copies;
  cluster.inside = {"link", 0, 0, false};
  cluster.forward_flops_per_second = cluster.backward_flops_per_second = 1e30;
  const Forecast copying = simulate(options, cluster);
  cluster.forward_flops_per_second =
      copying.forward.computed_flops / (free.forward - copying.forward.seconds);
  cluster.backward_flops_per_second =
      copying.backward->computed_flops / (free.backward - copying.backward->seconds);
  return cluster;
}

// Bytes per second at which the transfers of a forward pass, alone, take so many seconds.
double rate_of(const RingOptions& options, double seconds) {
  constexpr double kAny = 1e9;
  Cluster cluster = described(options, 0, {1, 1});
  cluster.inside.bytes_per_second = kAny;
  return kAny * simulate(options, cluster).forward.transfer_seconds / seconds;
}

struct Setting {
  double factor;  // transfers alone over compute alone, in forward
  double bytes_per_second;
  std::unique_ptr<Runner> runner;
  std::vector<double> latency;
  std::vector<Seconds> measured;
  std::vector<Seconds> predicted;
};

std::string row_of(const Problem& problem, const RingOptions& options, const Setting& setting,
                   const char* pass, double Seconds::*seconds) {
  std::vector<double> measured;
  std::vector<double> predicted;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < setting.measured.size(); ++i) {
    measured.push_back(setting.measured[i].*seconds);
    predicted.push_back(setting.predicted[i].*seconds);
    ratios.push_back(predicted.back() / measured.back());
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  return fmt::format(
      "  {{\"pattern\": \"{}\", \"tokens\": {}, \"placement\": \"{}\", \"ranks\": {}, "
      "\"schedule\": \"{}\", \"pass\": \"{}\", \"transfer_over_compute\": {}, "
      "\"bytes_per_second\": {:.6g}, \"latency_seconds\": {:.3g}, \"measured_seconds\": {:.6g}, "
      "\"predicted_seconds\": {:.6g}, \"rounds\": {}, \"ratio\": {:.4f}, \"ratio_least\": {:.4f}, "
      "\"ratio_most\": {:.4f}}}",
      problem.name, problem.tokens, problem.placement, options.placement.ranks(),
      name_of(options.schedule), pass, setting.factor, setting.bytes_per_second,
      median(setting.latency), median(measured), median(predicted), ratios.size(), median(ratios),
      *least, *most);
}

void add_rows(const Problem& problem, int ranks, Schedule schedule, double seconds, double copies,
              std::vector<std::string>& rows) {
  const RingOptions options = options_of(problem, ranks, schedule);
  Runner free(options, 0);
  (void)free.run();  // memory is touched, threads are there
  Seconds before = free.run();
  std::vector<Setting> settings;
  for (const double factor : {0.5, 1.0, 2.0}) {
    const double rate = rate_of(options, factor * before.forward);
    settings.push_back({factor, rate, std::make_unique<Runner>(options, rate), {}, {}, {}});
    (void)settings.back().runner->run();
  }
  before = free.run();
  constexpr std::size_t kLeastRounds = 3;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (settings[0].measured.size() < kLeastRounds || Clock::now() < end) {
    for (Setting& setting : settings) {
      setting.latency.push_back(setting.runner->latency());
      setting.measured.push_back(setting.runner->run());
    }
    const Seconds after = free.run();
    const Seconds mean{(before.forward + after.forward) / 2,
                       (before.backward + after.backward) / 2};
    before = after;
    Cluster cluster = described(options, copies, mean);
    for (Setting& setting : settings) {
      cluster.inside.bytes_per_second = setting.bytes_per_second;
      cluster.inside.latency_seconds = setting.latency.back();
      const Forecast forecast = simulate(options, cluster);
      setting.predicted.push_back({forecast.forward.seconds, forecast.backward->seconds});
    }
  }
  for (const Setting& setting : settings) {
    rows.push_back(row_of(problem, options, setting, "forward", &Seconds::forward));
    rows.push_back(row_of(problem, options, setting, "backward", &Seconds::backward));
  }
}

// Of several, or all of them.
struct Arguments {
  double seconds = 20;
  int problem = -1;
  int ranks = 0;
  std::string schedule;
};

int run(const Arguments& wanted) {
  const std::vector<std::int64_t> segments{1024, 16384};
  const std::vector<std::int64_t> dilations{1, 4};
  const std::vector<Problem> problems = {
      {"dense", dense(kHeads), 6144, "contiguous"},
      {"dense causal", dense(kHeads, true), 8192, "zigzag"},
      {"LongNet", longnet(kHeads, segments, dilations), 16384, "contiguous"}};
  const double copies = copy_rate();
  std::vector<std::string> rows;
  for (int i = 0; i < static_cast<int>(problems.size()); ++i) {
    if (wanted.problem >= 0 && i != wanted.problem) continue;
    const Problem& problem = problems[static_cast<std::size_t>(i)];
    for (const int ranks : {2, 4, 8}) {
      if (wanted.ranks > 0 && ranks != wanted.ranks) continue;
      for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
        if (!wanted.schedule.empty() && wanted.schedule != name_of(schedule)) continue;
        add_rows(problem, ranks, schedule, wanted.seconds, copies, rows);
        std::fprintf(stderr, "%s: %d ranks, %s\n", problem.name, ranks, name_of(schedule));
      }
    }
  }
  fmt::print(
      "{{\"seconds\": {}, \"heads\": {}, \"head_dim\": {}, \"copy_bytes_per_second\": {:.4g},"
      "\n \"rows\": [\n{}\n ]}}\n",
      wanted.seconds, kHeads, kDim, copies, fmt::join(rows, ",\n"));
  return 0;
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  try {
    annulus::Arguments wanted;
    if (argc > 1) wanted.seconds = std::atof(argv[1]);
    if (argc > 2) wanted.problem = std::atoi(argv[2]);
    if (argc > 3) wanted.ranks = std::atoi(argv[3]);
    if (argc > 4) wanted.schedule = argv[4];
    if (!(wanted.seconds > 0)) {
      std::fprintf(stderr, "simulator_bench: seconds is %s, expected above 0\n", argv[1]);
      return 2;
    }
    return annulus::run(wanted);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simulator_bench: %s\n", error.what());
    return 1;
  }
}
