#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

// Speeds per rank by which `automatic` schedules are chosen. The defaults are those of a CPU socket
// on a fast network. Only the ratio matters.
struct Rates {
  double flops_per_second = 1e12;
  double bytes_per_second = 1e10;
};

enum class BackwardTravel : std::uint8_t { automatic, keys, queries };

struct RingOptions {
  Pattern pattern;
  Placement placement;                     // of queries, and of keys unless key_placement is set
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
  std::int64_t min_tokens_for_ring = 32768;  // with fewer, `automatic` gathers
  // The same bits for every ring size and placement. Needs the gather schedule; backward computes
  // scores twice.
  bool reproducible = false;
  // The same bits in every run with the same ranks; implied by reproducible. The CPU always does
  // so; on CUDA devices it makes backward slower.
  bool deterministic = false;
  bool backward = true;  // false: backward() throws and its memory is not allocated
  BackwardTravel backward_travel = BackwardTravel::automatic;  // automatic: fewer bytes
  bool blocking =
      false;  // debugging: wait for each transfer where it is posted instead of overlapping it
  // When memory runs out on any rank while an executor is made, all ranks try again: with caches
  // dropped, then sequence by sequence, head by head, then with the ring schedule. The results are
  // the same (gradients, and all results with the ring schedule, up to rounding, unless
  // reproducible). RingAttention::recovery says what was done. false: the first failure is the
  // error.
  bool recover = true;
  Limits limits;
  Rates rates;
  Device device;    // of all tensors
  int threads = 0;  // CPU: how many compute, shared by all ranks of the process; 0: as many as the
                    // process may use, or ANNULUS_THREADS

  [[nodiscard]] const Placement& keys() const { return key_placement ? *key_placement : placement; }
};

// Memory of this rank, in bytes.
struct MemoryInfo {
  Device device;                         // for a cache: that of one of its executors
  std::string complexity;                // how memory grows, in words
  std::int64_t workspace_bytes = 0;      // everything this executor has allocated
  std::int64_t communication_bytes = 0;  // of these: send and receive buffers
  std::int64_t state_bytes = 0;          // of these: fp32 accumulators, row statistics, packed keys
  std::int64_t scratch_bytes = 0;        // the kernels', shared by all executors of the process
  std::int64_t cached_workspaces = 0;    // filled by RingAttentionCache, else 0
};

// Optional inputs of a call. Either all ranks pass one or none does; otherwise every rank gets a
// ConfigError.
struct OptionalInputs {
  // Attention sinks: fp32 [q heads], any stride, the same numbers on every rank. A sink is a logit
  // that takes part once in the softmax of every row of its head and has no value. If L and O are
  // the results without sinks, lse is L' = log(exp(L) + exp(sink)) and o is exp(L - L') O. A row
  // without keys has lse = sink and o = 0. -inf: no sink for that head. NaN and +inf make all rows
  // of the head NaN.
  std::optional<ConstTensorView> sinks;
  // Needed where dropout_p is not 0, and of no meaning otherwise: the same number on every rank, in
  // backward that of forward. After the softmax each pair of query and key of a head keeps its
  // probability with probability 1 - dropout_p and is then divided by that. Which pairs do follows
  // from the seed, the batch entry, the query head and the global tokens of query and key alone,
  // whatever the ranks, the placement and the device. lse is that of all pairs.
  std::optional<std::uint64_t> dropout_seed;
  // For callers that draw seeds: the ranks may then pass different ones, and all of them use that
  // of rank 0. In backward every rank passes what it passed in forward.
  bool dropout_seed_of_rank_0 = false;
  // What else a caller wants to be the same on every rank: a text that the ranks compare with their
  // other claims, without another message.
  std::string_view claims;
};

// Optional results of backward, each for the optional input of the same name.
struct OptionalGradients {
  // fp32 [q heads]: the part of this rank's rows. The gradient is the sum over all ranks. The same
  // bits in every run with the same ranks. With another number of ranks equal up to rounding, even
  // if the call is `reproducible`.
  std::optional<TensorView> sinks;
};

// What backward with `detached` mixing needs from forward: the normalised output of every branch,
// for the rows that it selects. Made by make_branch_state().
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
// allocates everything and compares its options with every other rank. A mismatch, or an error that
// one rank alone finds, is a ConfigError on every rank. A lack of memory that recovery cannot solve
// is an OutOfMemory on every rank. forward and backward are collective, accept any strides whose
// last axis is contiguous, and allocate nothing (unless memory ran out: in
// set_documents, or in construction and heads differ in their offsets, so that every pass makes its
// executors again). Executors with different transports may run
// at the same time in different threads. An executor or a transport serves one caller at a time: a
// second one gets a ConfigError and, in a ring of several ranks, ends the transport, because
// another rank may have taken the two calls in the other order.
class RingAttention {
 public:
  RingAttention(RingOptions options, Transport& transport);
  ~RingAttention();
  RingAttention(RingAttention&&) noexcept;
  RingAttention& operator=(RingAttention&&) noexcept;

  // Other documents for the passes from now on: for batches whose boundaries change with every
  // step. Plans anew, in the memory that the executor has, which only grows; the last few plans are
  // kept. On a GPU, the host waits for enqueued passes only if memory has to grow. Not collective:
  // whatever is wrong on this rank, and ranks that have other documents, are errors of the next
  // pass on every rank. If memory runs out on any rank, or calls were split in pieces before, the
  // next pass recovers as construction does, on all ranks.
  void set_documents(std::vector<Document> documents);

  // q, o: [batch, local queries, q heads, head_dim]; k, v: [batch, local keys, kv heads,
  // head_dim]; lse: fp32 [batch, local queries, q heads], natural log. `state` is needed when
  // mix_gradient is detached and backward follows.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const TensorView& o, const TensorView& lse, BranchState* state = nullptr,
               const OptionalInputs& more = {});

  // o and lse are the results of forward, `more` is the same as in forward. Overwrites dq, dk, dv
  // and the tensors in `gradients`.
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& o, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv,
                const BranchState* state = nullptr, const OptionalInputs& more = {},
                const OptionalGradients& gradients = {});

  // Blocks until the device has finished the work that forward and backward have enqueued.
  // DeviceError if the work failed, Interrupted after interrupt(). On the CPU, passes return when
  // they are done. A pass that throws has already waited: nothing uses its tensors afterwards.
  void synchronize();
  // The queue of all passes, for callers that order their own work before and after passes by
  // events instead of waiting.
  [[nodiscard]] Queue& queue();
  // Enqueues passes from now on in this queue, for example the caller's stream (cuda_queue), after
  // the work that was enqueued before. ConfigError for a queue of another device.
  void use_queue(std::shared_ptr<Queue> queue);

  // For callers that find an error before they can construct an executor or call forward or
  // backward. The construction or call of the other ranks throws a ConfigError with this reason,
  // and so does this function. Empty: another rank gives the reason.
  [[noreturn]] static void refuse(Transport& transport, const std::string& reason);

  // Callable from any thread. The current pass, or else the next one, soon ends with Interrupted on
  // this rank and with a TransportError on the others. Results are then undefined, and the executor
  // and its transport cannot be used again. A rank that is waiting for rows continues to wait for
  // them, at most until its transport's deadline.
  void interrupt() noexcept;

  [[nodiscard]] BranchState make_branch_state() const;
  // A branch state in the caller's memory, for frameworks that own everything that lives between
  // forward and backward: branch_state_rows() * head_dim elements of the options' dtype, and
  // branch_state_rows() floats. `filled`: a forward has written it already.
  [[nodiscard]] BranchState make_branch_state(std::span<std::byte> o, std::span<float> lse,
                                              bool filled) const;
  // Batch entries x heads x selected tokens of this rank, over all branches; 0 unless detached.
  [[nodiscard]] std::int64_t branch_state_rows() const;

  [[nodiscard]] const RingOptions& options() const;
  // Valid until set_documents and, if calls run in pieces, until the next pass. ConfigError, like
  // schedule() and other facts of a plan, after set_documents with wrong documents.
  [[nodiscard]] const Plan& plan() const;  // forward
  [[nodiscard]] const Plan& backward_plan()
      const;  // of the side that travels; ConfigError without backward
  [[nodiscard]] Schedule schedule() const;  // as chosen
  // Which kernels run: the CPU's instruction set; "sm90", "portable", or "sm90 forward, portable
  // backward" on CUDA devices.
  [[nodiscard]] std::string kernels() const;
  // How rows travel between ranks: "host memory", "device memory" (the transport reaches it),
  // "shared device memory" (between processes of one host), or "staged through host memory (why)".
  // Empty for a ring of one rank.
  [[nodiscard]] std::string transfers() const;
  // What was done because memory ran out: "caches dropped", or "1 of 4 sequences at a time"; empty:
  // nothing. If calls run in pieces, plan(), schedule() and kernels() are those of one piece.
  [[nodiscard]] const std::string& recovery() const;
  // Bytes that this rank sends in one forward or backward, equal to what the transport counts:
  // rows, and 32 bytes x ceil(log2(ranks)) for each agreement.
  [[nodiscard]] std::int64_t predicted_forward_bytes() const;
  [[nodiscard]] std::int64_t predicted_backward_bytes() const;
  [[nodiscard]] MemoryInfo memory_info() const;

 private:
  struct Impl;
  struct Pieces;
  std::unique_ptr<Pieces> pieces_;
};

// A cache of executors for changing shapes. Drops the least recently used ones if there are more
// than `capacity`, or if they hold more than a share of the memory: 1/8; 1/4 while more than half
// of the memory is free; 1/32 (and a quarter of `capacity`) while less than a tenth is free.
// Collective like the executors: every rank asks for the same options in the same order. An
// executor that one rank has dropped is made again on all ranks.
class RingAttentionCache {
 public:
  explicit RingAttentionCache(Transport& transport, std::size_t capacity = 20);
  ~RingAttentionCache();

  // The executor for these options. It lives as long as the caller or the cache holds it.
  [[nodiscard]] std::shared_ptr<RingAttention> get(const RingOptions& options);
  void clear_cache();  // idempotent
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] MemoryInfo memory_info() const;  // sums over the cached executors

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus
