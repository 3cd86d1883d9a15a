// What it costs that the documents of a batch change with every step: planning, work lists and
// everything else of RingAttention::set_documents, on one core per rank. That it allocates nothing
// is in tests/ring/set_documents_test.cpp.

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <memory>
#include <random>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "bench/perf/bars.h"

namespace annulus {
namespace {

constexpr int kRanks = 8;
constexpr int kHeads = 16;
constexpr std::int64_t kTokens = std::int64_t{1} << 20;
constexpr int kDocuments = 64;
constexpr int kSteps = 15;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::vector<Document> random_documents(std::mt19937& random) {
  std::vector<std::int64_t> boundaries{0, kTokens};
  std::uniform_int_distribution<std::int64_t> cut(1, kTokens - 1);
  while (boundaries.size() <= kDocuments) boundaries.push_back(cut(random));
  std::sort(boundaries.begin(), boundaries.end());
  return packed_documents(boundaries);
}

// Milliseconds of set_documents: the median over new lists, of the slowest rank.
double milliseconds(const RingOptions& options) {
  const auto ring = make_in_process_ring(kRanks);
  std::vector<std::unique_ptr<RingAttention>> executors(kRanks);
  run_in_process(ring, [&](Transport& transport) {
    executors[static_cast<std::size_t>(transport.rank())] =
        std::make_unique<RingAttention>(options, transport);
  });
  std::mt19937 random(1);
  std::vector<std::vector<double>> seconds(kRanks);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<Document> documents = random_documents(random);
    for (std::size_t rank = 0; rank < executors.size(); ++rank) {
      std::vector<Document> mine = documents;
      const double begin = thread_seconds();
      executors[rank]->set_documents(std::move(mine));
      seconds[rank].push_back(thread_seconds() - begin);
    }
  }
  double slowest = 0;
  for (std::vector<double>& of_rank : seconds) {
    std::nth_element(of_rank.begin(), of_rank.begin() + kSteps / 2, of_rank.end());
    slowest = std::max(slowest, of_rank[kSteps / 2]);
  }
  return 1e3 * slowest;
}

int run() {
  perf::Bars bars;
  const std::int64_t segments[] = {2048, 4096, 8192, 16384, 32768};
  const std::int64_t dilations[] = {1, 2, 4, 8, 16};
  RingOptions options{longnet(kHeads, segments, dilations, true),
                      Placement::contiguous(kTokens, kRanks)};
  options.kv_heads = kHeads;
  options.head_dim = 8;  // so that eight ranks fit into one process; plans do not depend on it
  options.backward = false;
  options.threads = 1;
  options.limits.qkv_elements = std::int64_t{1} << 40;
  options.limits.communication_bytes = std::int64_t{1} << 40;
  bars.at_most("ms per 64 new documents of 1M tokens on 8 ranks, forward", milliseconds(options),
               2.0);
  options.backward = true;
  bars.at_most("the same, forward and backward", milliseconds(options), 4.0);
  return bars.exit_status();
}

}  // namespace
}  // namespace annulus

int main() { return annulus::run(); }
