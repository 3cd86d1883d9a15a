#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/placement.h"
#include "annulus/ring_attention.h"
#include "annulus/transport.h"
#include "support/forwarding_transport.h"
#include "support/problem.h"
#include "support/shards.h"
#include "support/test_device.h"

// Rings for tests: in-process rings that turn global tensors into global results, ranks that may
// fail, and transports that record traffic.
namespace annulus::test {

[[nodiscard]] RingOptions ring_options(const Problem& problem, Placement placement);
[[nodiscard]] Results empty_results(const RingOptions& options);

// Builds the executors, runs forward and (options.backward) backward, and returns the global
// results. Throws std::runtime_error if an input or a gap between rows was written to.
[[nodiscard]] Results run_ring(const RingOptions& options, const Inputs& inputs,
                               Layout layout = Layout::dense);

// The ways in which rows travel to other ranks.
struct RowTravel {
  std::string name;
  Schedule schedule;
  BackwardTravel travel;
  bool reproducible;

  void apply(RingOptions& options) const {
    options.schedule = schedule;
    options.backward_travel = travel;
    options.reproducible = reproducible;
  }
};
inline const RowTravel kRowTravels[] = {
    {"ring_keys", Schedule::ring, BackwardTravel::keys, false},
    {"ring_queries", Schedule::ring, BackwardTravel::queries, false},
    {"gather_keys", Schedule::gather, BackwardTravel::keys, false},
    {"gather_queries", Schedule::gather, BackwardTravel::queries, false},
    {"reproducible", Schedule::gather, BackwardTravel::automatic, true}};

// Runs body(transport) on one thread per rank, without any abort: every rank has to end by itself.
struct RankOutcome {
  std::string kind;  // "", "ConfigError", "TransportError", "DeviceError" or "other"
  std::string message;
  int lost_rank = -1;  // as a TransportError says
};
[[nodiscard]] std::vector<RankOutcome> run_ranks(int ranks,
                                                 const std::function<void(Transport&)>& body);
[[nodiscard]] std::vector<RankOutcome> run_ranks(std::span<const std::unique_ptr<Transport>> ring,
                                                 const std::function<void(Transport&)>& body);

using Texts = std::vector<std::string>;
// Expects that every rank ended with an error of this kind, whose message contains all of `texts`,
// and not because of a timeout.
void expect_everywhere(const std::vector<RankOutcome>& outcomes, const std::string& kind,
                       const Texts& texts);

// Forwards to another transport and counts bytes and messages by tag and peer. Can be told to fail
// a send.
class WatchedTransport : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  struct Count {
    std::int64_t bytes = 0;
    std::int64_t messages = 0;
  };
  // Sent since the last clear(), by tag and peer.
  [[nodiscard]] const std::map<std::pair<std::uint32_t, int>, Count>& sent() const { return sent_; }
  [[nodiscard]] Count sent(std::uint32_t tag) const;
  void clear() { sent_.clear(); }
  // The send after `sends` more of this tag throws std::runtime_error("rank failure for the test").
  void fail_after(std::uint32_t tag, int sends) {
    fail_tag_ = tag;
    fail_after_ = sends;
  }

  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override;

 private:
  std::map<std::pair<std::uint32_t, int>, Count> sent_;
  std::uint32_t fail_tag_ = 0;
  int fail_after_ = -1;
};

// All placements of `tokens` over `ranks`: contiguous, aligned, zigzag, striped, hilbert, explicit.
inline constexpr const char* kPlacementNames[] = {"contiguous", "aligned", "zigzag",
                                                  "striped",    "hilbert", "explicit"};
[[nodiscard]] Placement placement_of(const std::string& name, std::int64_t tokens, int ranks,
                                     std::uint64_t seed = 7);

// Sanitizers slow tests down by about this factor: tests do less, and deadlines are longer.
[[nodiscard]] double slowness();

}  // namespace annulus::test
