#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/device.h"
#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"
#include "annulus/tensor.h"
#include "annulus/transport.h"

namespace annulus {

// Checked per rank before anything is allocated.
struct Limits {
  std::int64_t communication_bytes = std::int64_t{1} << 30;  // send and receive buffers together
  std::int64_t qkv_elements = 100'000'000;                   // q + k + v of one rank
};

// What `automatic` schedules reckon with, per rank: those of a CPU socket on a fast network. Only
// their ratio matters.
struct Rates {
  double flops_per_second = 1e12;
  double bytes_per_second = 1e10;
};

enum class BackwardTravel : std::uint8_t { automatic, keys, queries };

struct RingOptions {
  Pattern pattern;
  Placement placement;  // of queries, and of keys unless there is a key_placement
  std::optional<Placement> key_placement;  // on as many ranks; may have another number of tokens
  std::int64_t batch = 1;
  int kv_heads = 1;  // divides the query heads: head h uses K/V head h / (heads / kv_heads)
  int head_dim = 64;
  DType dtype = DType::f32;
  std::optional<double> scale;  // of q.k, above 0; 1/sqrt(head_dim) when absent
  double softcap = 0;           // c > 0: scores become c * tanh(score / c), before masks; 0: none
  double dropout_p = 0;         // in [0, 1): the share of probabilities that dropout sets to 0, see
                                // OptionalInputs::dropout_seed
  MixGradient mix_gradient = MixGradient::full;
  Schedule schedule = Schedule::automatic;
  std::int64_t min_tokens_for_ring = 32768;  // below, `automatic` gathers
  // The same bits for every ring size and placement. Needs the gather schedule; backward computes
  // scores twice.
  bool reproducible = false;
  // The same bits in every run with the same ranks; implied by reproducible. The CPU always does
  // so; on CUDA devices backward is slower by it.
  bool deterministic = false;
  bool backward = true;  // false: backward() is refused and its memory is not allocated
  BackwardTravel backward_travel = BackwardTravel::automatic;  // automatic: fewer bytes
  bool blocking =
      false;  // debugging: wait for each transfer where it is posted instead of overlapping it
  // When memory runs out on any rank while an executor is made, all ranks try again: without what
  // is cached, then sequence by sequence, head by head, then by the ring schedule. The results are
  // the same (gradients, and all results by the ring schedule, to rounding, unless reproducible);
  // RingAttention::recovery says what it came to. false: the first failure is the error.
  bool recover = true;
  Limits limits;
  Rates rates;
  Device device;    // of all tensors
  int threads = 0;  // CPU: how many compute, shared by all ranks of the process; 0: as many as the
                    // process may use, or ANNULUS_THREADS

  [[nodiscard]] const Placement& keys() const { return key_placement ? *key_placement : placement; }
};

// Bytes are of this rank.
struct MemoryInfo {
  Device device;                         // of a cache's: that of one of its executors
  std::string complexity;                // how memory grows, in words
  std::int64_t workspace_bytes = 0;      // everything this executor has allocated
  std::int64_t communication_bytes = 0;  // of these: send and receive buffers
  std::int64_t state_bytes = 0;          // of these: fp32 accumulators, row statistics, packed keys
  std::int64_t scratch_bytes = 0;        // the kernels', shared by all executors of the process
  std::int64_t cached_workspaces = 0;    // filled by RingAttentionCache, else 0
};

// What a call may have besides the tensors that every call has. Every rank passes them, or none
// does: else it is a ConfigError on all of them.
struct OptionalInputs {
  // fp32 [q heads], any stride, the same numbers on every rank: logits that take part in the
  // softmax of each of their head's rows, once, and have no value (attention sinks). With L and O
  // without them, lse is L' = log(exp(L) + exp(sink)) and o is exp(L - L') O; of a row without keys
  // sink and 0. -inf: none for that head. NaN and +inf make all rows of the head NaN.
  std::optional<ConstTensorView> sinks;
  // Needed where dropout_p is not 0, and of no meaning otherwise: the same number on every rank, in
  // backward that of forward. After the softmax each pair of query and key of a head keeps its
  // probability with probability 1 - dropout_p and is then divided by that. Which pairs do follows
  // from the seed, the batch entry, the query head and the global tokens of query and key alone,
  // whatever the ranks, the placement and the device. lse is that of all pairs.
  std::optional<std::uint64_t> dropout_seed;
};

// Results of backward besides those that every call has, each for an input of its name.
struct OptionalGradients {
  // fp32 [q heads]: of this rank's rows alone, whose sum over the ranks is the gradient. The same
  // bits in every run with the same ranks, but to rounding for other numbers of ranks, also where
  // the call is `reproducible`.
  std::optional<TensorView> sinks;
};

// What `detached` mixing needs from forward: the normalised output of every branch, of the rows
// that the branch selects. Made by make_branch_state().
class BranchState {
 public:
  BranchState();
  ~BranchState();
  BranchState(BranchState&&) noexcept;
  BranchState& operator=(BranchState&&) noexcept;

 private:
  friend class RingAttention;
  struct Data;
  std::unique_ptr<Data> data_;
};

// Exact attention over one rank's shard of a sequence. Construction is collective: it plans,
// allocates everything and compares its options with every other rank; a mismatch, or whatever one
// rank alone finds wrong, is a ConfigError on every rank, and lack of memory that nothing helps
// against an OutOfMemory on every rank. forward and backward are collective, allocate nothing
// (unless memory ran out and heads differ: then every pass makes the pieces anew) and accept any
// strides whose last axis is contiguous. Executors with transports
// of their own may run at once in different threads; an executor or a transport serves one caller
// at a time. A second one gets a ConfigError and, in a ring of several ranks, ends the transport:
// another rank may have taken the two calls in the other order.
class RingAttention {
 public:
  RingAttention(RingOptions options, Transport& transport);
  ~RingAttention();
  RingAttention(RingAttention&&) noexcept;
  RingAttention& operator=(RingAttention&&) noexcept;

  // q, o: [batch, local queries, q heads, head_dim]; k, v: [batch, local keys, kv heads,
  // head_dim]; lse: fp32 [batch, local queries, q heads], natural log. `state` is needed when
  // mix_gradient is detached and backward follows.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const TensorView& o, const TensorView& lse, BranchState* state = nullptr,
               const OptionalInputs& more = {});

  // o and lse are forward's results, `more` is what forward got; dq, dk, dv are overwritten, and so
  // is what `gradients` asks for.
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& o, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv,
                const BranchState* state = nullptr, const OptionalInputs& more = {},
                const OptionalGradients& gradients = {});

  // Blocks until the device has done what forward and backward have enqueued; DeviceError if it
  // could not, Interrupted after interrupt(). The CPU enqueues nothing: its passes return when they
  // are done. A pass that throws has waited itself: nothing touches its tensors afterwards.
  void synchronize();
  // On which passes are enqueued: for callers that order their own work before and behind them by
  // events instead of waiting.
  [[nodiscard]] Queue& queue();
  // Passes are enqueued here from now on, after what was enqueued before: a stream of the caller's
  // (cuda_queue). ConfigError for a queue of another device.
  void use_queue(std::shared_ptr<Queue> queue);

  // Instead of constructing or calling forward or backward, for callers that find something wrong
  // before they can: the other ranks' construction or call becomes a ConfigError that gives the
  // reason, and so does this. Empty: another rank has the reason.
  [[noreturn]] static void refuse(Transport& transport, const std::string& reason);

  // From any thread: the pass that runs, or else the next one, soon ends with Interrupted on this
  // rank and with a TransportError on the others. Results are then undefined, and the executor and
  // its transport are of no further use. A rank that is waiting for rows first waits for them: its
  // transport's deadline limits that.
  void interrupt() noexcept;

  [[nodiscard]] BranchState make_branch_state() const;
  // The same over the caller's memory, for frameworks that own whatever lives between forward and
  // backward: branch_state_rows() * head_dim elements of the options' dtype, and
  // branch_state_rows() floats. `filled`: a forward has written it already.
  [[nodiscard]] BranchState make_branch_state(std::span<std::byte> o, std::span<float> lse,
                                              bool filled) const;
  // Batch entries x heads x selected tokens of this rank, over all branches; 0 unless detached.
  [[nodiscard]] std::int64_t branch_state_rows() const;

  [[nodiscard]] const RingOptions& options() const;
  [[nodiscard]] const Plan& plan() const;  // forward
  [[nodiscard]] const Plan& backward_plan()
      const;  // of the side that travels; ConfigError without backward
  [[nodiscard]] Schedule schedule() const;  // as chosen
  // Which kernels run: the CPU's instruction set; "sm90", "portable", or "sm90 forward, portable
  // backward" on CUDA devices.
  [[nodiscard]] std::string kernels() const;
  // How rows travel between ranks: "host memory", "device memory" (the transport reaches it),
  // "shared device memory" (between processes of one host), or "staged through host memory (why)".
  // Empty for a rank alone.
  [[nodiscard]] std::string transfers() const;
  // What was done because memory ran out: "caches dropped", or "1 of 4 sequences at a time"; empty:
  // nothing. Then plan(), schedule() and kernels() are of one piece.
  [[nodiscard]] const std::string& recovery() const;
  // Bytes that this rank will send in one forward or backward: equals what the transport counts.
  // Includes the 24 bytes per doubling of the ranks with which they agree on the call; the rest is
  // rows.
  [[nodiscard]] std::int64_t predicted_forward_bytes() const;
  [[nodiscard]] std::int64_t predicted_backward_bytes() const;
  [[nodiscard]] MemoryInfo memory_info() const;

 private:
  struct Impl;
  struct Pieces;
  [[nodiscard]] const Impl& impl() const;
  std::unique_ptr<Impl> impl_;
  std::unique_ptr<Pieces> pieces_;  // instead, where memory ran out
  std::string recovery_;
};

// Executors for changing shapes. The least recently used ones are dropped beyond `capacity`, or
// when they hold more than a share of the memory: an eighth, a quarter while more than half of it
// is free, a thirty-second (and a quarter of `capacity`) while less than a tenth is. Collective
// like the executors themselves: every rank asks for the same options in the same order. What one
// rank has dropped is made anew on all.
class RingAttentionCache {
 public:
  explicit RingAttentionCache(Transport& transport, std::size_t capacity = 20);
  ~RingAttentionCache();

  // The executor for these options, which lives for as long as it is held or kept here.
  [[nodiscard]] std::shared_ptr<RingAttention> get(const RingOptions& options);
  void clear_cache();  // idempotent
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] MemoryInfo memory_info() const;  // sums over the cached executors

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus
