#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/device.h"
#include "annulus/pattern.h"
#include "annulus/plan.h"
#include "annulus/tensor.h"
#include "core/device_sharing.h"
#include "core/memory.h"
#include "kernels/dropout.h"
#include "kernels/head_dim.h"
#include "kernels/kept_rows.h"
#include "kernels/parcel_layout.h"

// The contract between the ring executor and the devices that compute. The executor knows plans,
// memory and order. A backend knows arithmetic, but neither ranks nor transports. A function that
// takes a queue only enqueues its work. The work reads memory later, so the caller must keep it
// unchanged until then; arguments passed by value are copied.
namespace annulus {

// Where the rows of a tensor or a workspace are: row t of (batch b, head h) starts at
// base + b * batch_step + h * head_step + t * row_step bytes.
struct TensorRows {
  std::byte* base = nullptr;
  std::int64_t batch_step = 0;
  std::int64_t head_step = 0;
  std::int64_t row_step = 0;

  [[nodiscard]] std::byte* at(std::int64_t batch, int head) const {
    return base + batch * batch_step + head * head_step;
  }
};

// One fp32 number per query head: that of head h is at base + h * step bytes. A null base: absent.
struct HeadNumbers {
  std::byte* base = nullptr;
  std::int64_t step = 0;

  [[nodiscard]] float* at(int head) const { return reinterpret_cast<float*>(base + head * step); }
};

// Where received parcels are, by index in the plan; null for parcels that this rank never receives.
struct ParcelRows {
  const ParcelLayout* layout = nullptr;
  const std::vector<std::byte*>* base = nullptr;

  [[nodiscard]] std::byte* at(int parcel) const {
    return (*base)[static_cast<std::size_t>(parcel)];
  }
};

// What one rank computes, apart from plans and steps.
struct Computation {
  const Pattern* pattern = nullptr;  // owned by the executor, which outlives its engine
  std::int64_t query_tokens = 0;     // of this rank
  std::int64_t key_tokens = 0;
  std::int64_t batch = 1;
  int kv_heads = 1;
  int head_dim = 0;
  DType dtype = DType::f32;
  double scale = 1;    // of q.k
  double softcap = 0;  // scores are softcap * tanh(scale * q.k / softcap); 0: scale * q.k
  DropoutRate dropout;
  MixGradient mix_gradient = MixGradient::full;
  const KeptRows* kept = nullptr;  // owned by the executor; null unless mixing is detached
  bool reproducible = false;
  bool deterministic = false;  // the same bits in every run; true if reproducible is
  bool backward = true;

  [[nodiscard]] int heads() const { return pattern->heads; }
  // The fastest kernels know neither softcap nor dropout.
  [[nodiscard]] bool caps_or_drops() const { return softcap != 0 || dropout.drops(); }
  [[nodiscard]] std::int64_t query_rows() const { return batch * query_tokens * heads(); }
  [[nodiscard]] std::int64_t key_rows() const { return batch * key_tokens * kv_heads; }
  // Number of deltas, rowsum(dO * O), per row: one, or one for every branch if mixing is detached.
  [[nodiscard]] int deltas() const {
    return mix_gradient == MixGradient::detached ? static_cast<int>(pattern->branches.size()) : 1;
  }
  // Floats of a row's statistics: its log-sum-exp, its deltas, and padding to a multiple of 16
  // bytes, which keeps the other rows of a parcel aligned.
  [[nodiscard]] int statistics_width() const { return (1 + deltas() + 3) / 4 * 4; }
};

// The tiles of steps first_step..last_step of a plan, and what to do with them.
struct Stage {
  enum class Kind : std::uint8_t {
    forward,         // adds into (O, L) of query rows
    gradients,       // adds into dQ of query rows and dK, dV of key rows
    query_gradient,  // dQ only, keys in canonical order
    key_gradient,    // dK and dV only, queries in canonical order
  };
  Kind kind = Kind::forward;
  const Plan* plan = nullptr;
  int first_step = 0;
  int last_step = 0;
};

// Outputs of single branches, which forward keeps for backward if mixing is detached: o is
// [row][dim] of the call's dtype, rounded once; lse is [row]. Computation::kept gives the index of
// a row (kept_rows.h). The local query rows of a run (RunTemplate) are contiguous from its `kept`
// on. Null: not kept.
struct BranchOutputs {
  std::byte* o = nullptr;
  float* lse = nullptr;
};

// Where an executor's received rows are, in every call.
struct ReceivedRows {
  ParcelRows keys;       // sections k, v
  ParcelRows queries;    // sections q, dout, statistics; empty if keys travel
  ParcelRows gradients;  // of the received rows: dk, dv or dq; empty if they are not returned
};

struct ForwardCall {
  TensorRows q, k, v, o, lse;
  BranchOutputs branches;
  // Logits without a value that take part once in the softmax of every row of their head. They are
  // merged into L and O of every row at the end: L' = log(exp(L) + exp(sink)), O' = exp(L - L') O.
  // A sink of -inf has no effect; NaN and +inf make the rows of the head NaN.
  HeadNumbers sinks;
  DropoutSeed dropout;
  const std::atomic<bool>* stop = nullptr;  // true: the results are no longer needed
};

struct BackwardCall {
  TensorRows q, k, v, o, lse, dout, dq, dk, dv;
  BranchOutputs branches;
  // o and lse include sinks, so P = exp(S - L') needs nothing else. The gradient of a sink is
  // -sum(exp(sink - L') dO.O') over the rows of this rank, in an order that does not depend on
  // threads. `adds_dsinks`: it is added to the present value. dsinks without a base: not computed.
  HeadNumbers sinks, dsinks;
  bool adds_dsinks = false;
  DropoutSeed dropout;  // as forward's
  const std::atomic<bool>* stop = nullptr;
};

// Where gradients are summed in fp32: the caller's tensors if these are fp32, otherwise a
// workspace.
struct GradientSums {
  TensorRows dq, dk, dv;
};

// The compiled stages of one executor on a device, with their workspace.
class Engine {
 public:
  virtual ~Engine() = default;

  // Once. What the queue has to do for it comes before the first pass. OutOfMemory.
  virtual void allocate(const ReceivedRows& received, Queue& queue) = 0;
  [[nodiscard]] virtual std::string kernels() const = 0;  // which ones run; for messages
  // Bytes of accumulators and row statistics, before or after allocate().
  [[nodiscard]] virtual std::int64_t state_bytes() const = 0;
  [[nodiscard]] virtual std::int64_t list_bytes() const = 0;  // bytes of the compiled stages

  // Resets the state of all rows: no row has attended to anything yet.
  virtual void begin_forward(const ForwardCall& call, Queue& queue) = 0;
  virtual void forward(int stage, const ForwardCall& call, Queue& queue) = 0;
  // Writes zeros to rows that attended to nothing, merges kept branches and sinks, and rounds once.
  virtual void finish_forward(const ForwardCall& call, Queue& queue) = 0;

  // Computes row statistics and the gradients of sinks, and clears all other gradients.
  virtual void begin_backward(const BackwardCall& call, Queue& queue) = 0;
  virtual void backward(int stage, const BackwardCall& call, Queue& queue) = 0;
  virtual void finish_backward(const BackwardCall& call, Queue& queue) = 0;
  [[nodiscard]] virtual GradientSums sums(const BackwardCall& call) const = 0;
  // Log-sum-exp and deltas of each row, adjacent because they travel together.
  [[nodiscard]] virtual TensorRows statistics() const = 0;
};

// A list, in the form that the device needs, of rows to copy between a shard and a buffer of
// parcels.
class CopyProgram {
 public:
  virtual ~CopyProgram() = default;
  [[nodiscard]] virtual std::int64_t bytes() const = 0;  // of the list
};

class CacheKernels;  // cached_rows.h
struct CacheShape;

class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual Device device() const = 0;
  // The best kernels of the device; an engine may run others. Backends with equal names compute the
  // same bits in reproducible mode.
  [[nodiscard]] virtual std::string kernels() const = 0;
  [[nodiscard]] virtual std::int64_t scratch_bytes() const = 0;  // shared by all executors
  // Why the backend cannot compute this; empty: it can.
  [[nodiscard]] virtual std::string complaint(const Computation& computation) const = 0;

  [[nodiscard]] virtual Memory allocate(std::int64_t bytes, const char* what) = 0;
  // Host memory for rows that are staged through the host.
  [[nodiscard]] virtual Memory allocate_staging(std::int64_t bytes, const char* what) = 0;
  [[nodiscard]] virtual std::shared_ptr<Queue> make_queue() = 0;
  // Whether enqueued work is done when enqueuing returns.
  [[nodiscard]] virtual bool immediate() const = 0;
  // Whether engines and copy programs may go, and their memory to others, while work that they have
  // enqueued is under way: what the others do with it is enqueued on the same queue.
  [[nodiscard]] virtual bool replaces_in_order() const { return false; }
  // Shares device memory between processes of one host; null if that is impossible.
  [[nodiscard]] virtual std::shared_ptr<DeviceSharing> sharing() { return nullptr; }

  [[nodiscard]] virtual std::unique_ptr<Engine> compile(const Computation& computation,
                                                        std::span<const Stage> forward,
                                                        std::span<const Stage> backward) = 0;
  // The queue may have to copy the list to the device.
  [[nodiscard]] virtual std::unique_ptr<CopyProgram> compile(const ParcelLayout& layout,
                                                             std::vector<ParcelCopy> copies,
                                                             Queue& queue) = 0;
  // Copies rows of the shard into the buffer. `sections[i]` are the rows of section i; their heads
  // are units.
  virtual void pack(const CopyProgram& program, std::span<const TensorRows> sections,
                    std::byte* buffer, Queue& queue) = 0;
  // Adds fp32 rows of the buffer to those of the shard, in the order of the list.
  virtual void add(const CopyProgram& program, const std::byte* buffer,
                   std::span<const TensorRows> sections, Queue& queue) = 0;
  virtual void clear(std::byte* memory, std::int64_t bytes, Queue& queue) = 0;
  [[nodiscard]] virtual std::unique_ptr<CacheKernels> cache_kernels(const CacheShape& shape) = 0;
};

// The backend of a device. `threads` is for the CPU: backends with the same number share their
// threads; 0: all that this process may use. DeviceError if the device is not available.
[[nodiscard]] std::shared_ptr<Backend> backend_of(const Device& device, int threads);

// For tests: backend_of passes its result through `wrap`; null: no more. Returns the previous
// wrapper.
using WrapBackend = std::shared_ptr<Backend> (*)(std::shared_ptr<Backend>);
WrapBackend wrap_backends(WrapBackend wrap);

}  // namespace annulus
