#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/reference.h"
#include "annulus/ring_attention.h"
#include "annulus/tensor.h"
#include "annulus/transport.h"
#include "kernels/reference/scales.h"
#include "support/forwarding_transport.h"
#include "support/test_device.h"

// What the tests of the ring share: global random tensors, their shards in awkward memory layouts,
// an in-process ring that turns them into global results, and the measures that compare those with
// the oracle.
namespace annulus::test {

// What is computed, whatever the ring.
struct Problem {
  std::string name;
  Pattern pattern;
  reference::Shape shape;
  DType dtype = DType::f32;
  MixGradient mix = MixGradient::full;
  std::optional<double> scale;
};

// Global [batch, tokens, heads, head_dim]; every value is representable in the problem's dtype.
struct Inputs {
  std::vector<double> q, k, v, dout;
};
[[nodiscard]] Inputs random_inputs(const Problem& problem, std::uint64_t seed,
                                   double deviation = 1.0);

// Global results, widened to fp32; lse is [batch, tokens, heads].
struct Results {
  std::vector<float> o, lse, dq, dk, dv;
};

struct Expected {
  reference::Output output;
  reference::Gradients gradients;
  reference::Scales scales;  // what errors are relative to
  // 16-bit problems: what the reference gives with the inputs and outputs that an executor has.
  // Outputs are rounded to the dtype, and backward gets the rounded o, from which it takes
  // rowsum(dO * O).
  Results one_piece;
};
[[nodiscard]] Expected reference_of(const Problem& problem, const Inputs& inputs);

// Names of the tensors of Results in the order of members(), for messages.
inline constexpr const char* kResultNames[] = {"o", "lse", "dq", "dk", "dv"};
[[nodiscard]] std::vector<const std::vector<float>*> members(const Results& results);
[[nodiscard]] std::vector<const std::vector<double>*> members(const Expected& expected);
// Empty if every bit is equal, else the first difference. NaNs are equal whatever their payload.
[[nodiscard]] std::string first_difference(const Results& a, const Results& b);

// dense: [batch, tokens, heads, dim]. heads_major: a transposed view of [batch, heads, tokens,
// dim]. padded: gaps behind rows, tokens and batch entries, and a start that is aligned to nothing.
enum class Layout : std::uint8_t { dense, heads_major, padded };

// One rank's tensor in some layout. Bytes outside the view hold a pattern that nobody may change.
class ShardTensor {
 public:
  // dim 0: a tensor of three axes (the log-sum-exp).
  ShardTensor(DType dtype, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
              std::int64_t dim, Layout layout);
  ShardTensor(ShardTensor&&) = default;  // a copy's view would still be of the original
  ShardTensor& operator=(ShardTensor&&) = default;

  [[nodiscard]] TensorView view() const { return view_; }
  [[nodiscard]] float get(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const;
  void set(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d, float value);
  void fill(float value);
  [[nodiscard]] bool gaps_untouched() const;
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  // Between the host, where tests look, and the device under test, which the view is of.
  void upload() const;
  void download() const;

 private:
  [[nodiscard]] std::int64_t index(std::int64_t b, std::int64_t t, std::int64_t h,
                                   std::int64_t d) const;
  template <typename Body>
  void for_each_element(const Body& body) const;

  std::vector<std::byte> bytes_;
  void* host_ = nullptr;  // the view's data on the host
  TensorView view_;
  std::unique_ptr<DeviceImage> image_;  // null: the device under test is the host
};

// Everything one rank passes to its executor.
struct Shard {
  Shard(const RingOptions& options, int rank, Layout layout = Layout::dense);

  void load(const Inputs& inputs);    // and fills the outputs with NaN: nothing may survive
  void forward(RingAttention& ring);  // makes a branch state where backward will need one
  void backward(RingAttention& ring);
  void collect(Results& results) const;  // own rows only: ranks may do so at the same time
  [[nodiscard]] std::string damage()
      const;  // inputs or gaps that changed since load(); empty: none

  std::vector<std::int64_t> positions;
  std::int64_t batch;
  std::int64_t tokens;  // of the whole sequence
  bool detached;
  ShardTensor q, k, v, o, lse, dout, dq, dk, dv;
  BranchState state;

 private:
  std::vector<std::vector<std::byte>> loaded_;
  std::vector<std::byte> state_o_;
  std::vector<float> state_lse_;
};

[[nodiscard]] RingOptions ring_options(const Problem& problem, Placement placement);
[[nodiscard]] Results empty_results(const RingOptions& options);

// Builds the executors, runs forward and (options.backward) backward, and returns the global
// results. Throws std::runtime_error if an input or a gap between rows was written to.
[[nodiscard]] Results run_ring(const RingOptions& options, const Inputs& inputs,
                               Layout layout = Layout::dense);

// Runs body(transport) on one thread per rank without any abort: every rank has to end by itself.
struct RankOutcome {
  std::string kind;  // "", "ConfigError", "TransportError", "DeviceError" or "other"
  std::string message;
  int lost_rank = -1;  // as a TransportError says
  double seconds = 0;
};
[[nodiscard]] std::vector<RankOutcome> run_ranks(int ranks,
                                                 const std::function<void(Transport&)>& body);
[[nodiscard]] std::vector<RankOutcome> run_ranks(std::span<const std::unique_ptr<Transport>> ring,
                                                 const std::function<void(Transport&)>& body);

// Every rank ended as `kind`, within a second, with a message that holds all of `texts`.
void expect_everywhere(const std::vector<RankOutcome>& outcomes, const std::string& kind,
                       const std::vector<std::string>& texts);

// Forwards to another transport and keeps books: bytes and messages by tag and peer. May refuse to
// send.
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

// Root mean square of actual - expected, over that of expected or `floor`, whichever is larger.
// Infinite if one side is finite where the other is not, or infinities differ. NaN matches NaN.
[[nodiscard]] double relative_rms(std::span<const float> actual, std::span<const double> expected,
                                  double floor = 0.0);
[[nodiscard]] double rms(std::span<const double> values);  // of the finite ones
[[nodiscard]] std::vector<float> rounded(std::span<const double> values, DType dtype);

// fp32: root mean square of each result's error over that of its scale (kernels/reference/error.h).
struct Errors {
  double value[5] = {};  // as kResultNames
};
[[nodiscard]] Errors errors_of(const Results& results, const Expected& expected);
// 16 bit: error over that of Expected::one_piece.
[[nodiscard]] Errors error_ratios(const Problem& problem, const Results& results,
                                  const Expected& expected);

// Fails unless fp32 results are within 1e-6 of the oracle, and 16-bit ones within twice the error
// of rounding it. Worst values are printed when the program ends.
void expect_matches(const Problem& problem, const Results& results, const Expected& expected);
void note_worst(const std::string& what, double value);

// All placements of `tokens` over `ranks`: contiguous, aligned, zigzag, striped, hilbert, explicit.
inline constexpr const char* kPlacementNames[] = {"contiguous", "aligned", "zigzag",
                                                  "striped",    "hilbert", "explicit"};
[[nodiscard]] Placement placement_of(const std::string& name, std::int64_t tokens, int ranks,
                                     std::uint64_t seed = 7);

// Presets with kv heads and shape in one call.
[[nodiscard]] Problem make_problem(std::string name, Pattern pattern, int kv_heads,
                                   std::int64_t tokens, int head_dim, std::int64_t batch = 1,
                                   MixGradient mix = MixGradient::full);

[[nodiscard]] std::uint64_t seed_of(const std::string& name);  // the same on every machine

// Sanitizers slow everything down: durations that tests insist on are multiplied by this.
[[nodiscard]] double slowness();

}  // namespace annulus::test
