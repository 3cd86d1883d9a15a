#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "annulus/plan.h"
#include "annulus/ring_attention.h"

namespace annulus {

// One kind of link. A port sends one message at a time and receives one message at a time; both
// directions work simultaneously.
struct Wire {
  std::string name;
  double bytes_per_second = 0;   // each way; 0: takes no time
  double latency_seconds = 0;    // after the last byte
  bool limits_receiving = true;  // false: only sending takes time, as with InProcessOptions
};

// A described set of machines. Ranks fill hosts one after the other.
struct Cluster {
  std::string name;
  std::string source;  // where the figures come from
  int ranks_per_host = 1;
  // Ranks that share a processor take turns, by one step's tiles or one copy at a time: threads of
  // one core, or virtual ranks of one GPU.
  int ranks_per_processor = 1;
  // Speed of a processor, counted over the pairs that it computes (pairs shared by branches are
  // computed once): 4 x head_dim operations per pair in forward, 10 x head_dim in backward.
  double forward_flops_per_second = 0;
  double backward_flops_per_second = 0;
  // Speed of copies other than messages: packing rows, clearing and adding returned gradients.
  // Counts bytes read and bytes written. 0: they take no time.
  double copy_bytes_per_second = 0;
  double stage_seconds = 0;       // minimal duration of the tiles of a step
  std::int64_t memory_bytes = 0;  // of a rank; 0: unknown
  Wire inside;                    // between ranks of one host: a port per rank
  Wire between;                   // between hosts
  int ports_per_host = 0;         // of `between`; ranks share them evenly. 0: one per rank

  void validate() const;  // ConfigError
};

// "h200", "h200-infiniband", "h200-one-port"; ConfigError on anything else.
[[nodiscard]] Cluster cluster_preset(const std::string& name);
[[nodiscard]] const std::vector<std::string>& cluster_preset_names();

struct PassForecast {
  double seconds = 0;
  double compute_seconds = 0;   // the same with links that take no time
  double transfer_seconds = 0;  // the same with compute that takes no time
  double overlap = 1;           // share of the shorter of these two that is hidden behind the other
  double waiting = 0;           // share of the pass in which a rank waits for rows, mean over ranks
  double flops = 0;             // of all ranks, over all allowed pairs
  double computed_flops = 0;    // ... over those that are computed
  std::int64_t bytes = 0;       // sent by all ranks
  std::string busiest_link;     // empty: nothing is sent
  double busiest_link_seconds = 0;
};

// Memory of the rank that needs most.
struct MemoryForecast {
  int rank = 0;
  std::int64_t tensor_bytes = 0;         // q, k, v, o, log-sum-exp and their gradients
  std::int64_t state_bytes = 0;          // fp32 accumulators and row statistics
  std::int64_t communication_bytes = 0;  // without copies of messages that are not in one piece

  [[nodiscard]] std::int64_t total() const {
    return tensor_bytes + state_bytes + communication_bytes;
  }
};

struct Forecast {
  Schedule schedule = Schedule::ring;  // as chosen
  Travel backward_travel = Travel::keys;
  int steps = 0;
  // False: the tiles of all ranks are too many to be counted. The work of each rank is exact, but
  // is split over its steps in proportion to the rows present.
  bool counted = true;
  PassForecast forward;
  std::optional<PassForecast> backward;  // absent without options.backward
  MemoryForecast memory;
};

// Predicts forward and backward of RingAttention(options) on a cluster: replays every rank's steps
// in order of time, with the messages of the plan on the cluster's links. Nothing is allocated or
// computed. `threads`, `device` and limits have no effect, except that schedule `auto` is resolved
// as the executor does. ConfigError for options that an executor would reject, and for impossible
// clusters.
[[nodiscard]] Forecast simulate(const RingOptions& options, const Cluster& cluster);

}  // namespace annulus
