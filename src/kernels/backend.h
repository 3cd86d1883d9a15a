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
#include "kernels/head_dim.h"
#include "kernels/kept_rows.h"
#include "kernels/parcel_layout.h"

// The contract between the ring executor and the devices that compute. The executor knows plans,
// memory and order; a backend knows arithmetic, and nothing of ranks or transports. Whatever takes
// a queue only enqueues: results are there when the queue has got so far, and what is passed by
// value here is all that may change until then.
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

// One fp32 number per query head, that of head h at base + h * step bytes. No base: there are none.
struct HeadNumbers {
  std::byte* base = nullptr;
  std::int64_t step = 0;

  [[nodiscard]] float* at(int head) const { return reinterpret_cast<float*>(base + head * step); }
};

// Where received parcels are, by their number in the plan; null where one never comes here.
struct ParcelRows {
  const ParcelLayout* layout = nullptr;
  const std::vector<std::byte*>* base = nullptr;

  [[nodiscard]] std::byte* at(int parcel) const {
    return (*base)[static_cast<std::size_t>(parcel)];
  }
};

// What one rank computes, whatever travels when.
struct Computation {
  const Pattern* pattern = nullptr;  // of the executor, which outlives its engine
  std::int64_t query_tokens = 0;     // of this rank
  std::int64_t key_tokens = 0;
  std::int64_t batch = 1;
  int kv_heads = 1;
  int head_dim = 0;
  DType dtype = DType::f32;
  double scale = 1;  // of q.k
  MixGradient mix_gradient = MixGradient::full;
  const KeptRows* kept = nullptr;  // of the executor; null unless mixing is detached
  bool reproducible = false;
  bool deterministic = false;  // the same bits in every run; true if reproducible is
  bool backward = true;

  [[nodiscard]] int heads() const { return pattern->heads; }
  [[nodiscard]] std::int64_t query_rows() const { return batch * query_tokens * heads(); }
  [[nodiscard]] std::int64_t key_rows() const { return batch * key_tokens * kv_heads; }
  // rowsum(dO * O) is one number a row, or one for every branch where those are kept apart.
  [[nodiscard]] int deltas() const {
    return mix_gradient == MixGradient::detached ? static_cast<int>(pattern->branches.size()) : 1;
  }
  // Floats of a row's statistics: its log-sum-exp, its deltas, and what makes them a multiple of 16
  // bytes, so that parcels with statistics in them keep the other rows aligned.
  [[nodiscard]] int statistics_width() const { return (1 + deltas() + 3) / 4 * 4; }
};

// The tiles of steps first_step..last_step of a plan, and what to do with them.
struct Stage {
  enum class Kind : std::uint8_t {
    forward,         // adds into (O, L) of query rows
    gradients,       // adds into dQ of query rows and dK, dV of key rows
    query_gradient,  // dQ alone, keys in canonical order
    key_gradient,    // dK and dV alone, queries in canonical order
  };
  Kind kind = Kind::forward;
  const Plan* plan = nullptr;
  int first_step = 0;
  int last_step = 0;
};

// Outputs of single branches, kept by forward where backward needs them: [row][dim] of the call's
// dtype, rounded once, and the log-sum-exps without dim, for the rows that Computation::kept tells
// (kept_rows.h). The local query rows of a run (RunTemplate) lie side by side from its `kept` on.
// Null: not kept.
struct BranchOutputs {
  std::byte* o = nullptr;
  float* lse = nullptr;
};

// Where an executor's received rows are, call after call.
struct ReceivedRows {
  ParcelRows keys;       // sections k, v
  ParcelRows queries;    // sections q, dout, statistics; nowhere: keys travel
  ParcelRows gradients;  // of the received rows: dk, dv or dq; nowhere: they are not returned
};

struct ForwardCall {
  TensorRows q, k, v, o, lse;
  BranchOutputs branches;
  // Logits that take part in the softmax of their head's rows, once, and have no value. Every row's
  // L and O are merged with them at the end: L' = log(exp(L) + exp(sink)), O' = exp(L - L') O. A
  // sink of -inf is none; NaN and +inf make the rows of the head NaN.
  HeadNumbers sinks;
  const std::atomic<bool>* stop = nullptr;  // true: nobody needs the results any more
};

struct BackwardCall {
  TensorRows q, k, v, o, lse, dout, dq, dk, dv;
  BranchOutputs branches;
  // o and lse are those with sinks, so that P = exp(S - L') needs nothing else. The gradient of a
  // sink is -sum(exp(sink - L') dO.O') over the rows of this rank, in an order that does not depend
  // on threads; it is added to what is there if `adds_dsinks`. No dsinks: nobody wants them.
  HeadNumbers sinks, dsinks;
  bool adds_dsinks = false;
  const std::atomic<bool>* stop = nullptr;
};

// Where gradients are summed in fp32: in the caller's tensors where these are fp32.
struct GradientSums {
  TensorRows dq, dk, dv;
};

// What a device has made of the stages of one executor, with the memory it needs for them.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual void allocate(const ReceivedRows& received) = 0;  // once; OutOfMemory
  [[nodiscard]] virtual std::string kernels() const = 0;    // which ones run, for people
  // Accumulators and row statistics: what allocate() takes or has taken.
  [[nodiscard]] virtual std::int64_t state_bytes() const = 0;
  [[nodiscard]] virtual std::int64_t list_bytes() const = 0;  // what the stages became

  // No row has attended to anything yet.
  virtual void begin_forward(const ForwardCall& call, Queue& queue) = 0;
  virtual void forward(int stage, const ForwardCall& call, Queue& queue) = 0;
  // Zeros for rows that attended to nothing, kept branches merged, sinks taken in, rounded once.
  virtual void finish_forward(const ForwardCall& call, Queue& queue) = 0;

  // Row statistics, gradients of zero, and those of sinks.
  virtual void begin_backward(const BackwardCall& call, Queue& queue) = 0;
  virtual void backward(int stage, const BackwardCall& call, Queue& queue) = 0;
  virtual void finish_backward(const BackwardCall& call, Queue& queue) = 0;
  [[nodiscard]] virtual GradientSums sums(const BackwardCall& call) const = 0;
  // Log-sum-exp and deltas of a row side by side, so that they travel together.
  [[nodiscard]] virtual TensorRows statistics() const = 0;
};

// Rows to copy between a shard and a buffer of parcels, as the device wants them described.
class CopyProgram {
 public:
  virtual ~CopyProgram() = default;
  [[nodiscard]] virtual std::int64_t bytes() const = 0;  // of the description
};

class CacheKernels;  // cached_rows.h
struct CacheShape;

class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual Device device() const = 0;
  // The best ones, known before anything is compiled: an engine may run others. Backends with the
  // same name here compute the same reproducible bits.
  [[nodiscard]] virtual std::string kernels() const = 0;
  [[nodiscard]] virtual std::int64_t scratch_bytes() const = 0;  // shared by all executors
  // Why it cannot compute this; empty: it can.
  [[nodiscard]] virtual std::string complaint(const Computation& computation) const = 0;

  [[nodiscard]] virtual Memory allocate(std::int64_t bytes, const char* what) = 0;
  // Host memory for rows on their way through the host.
  [[nodiscard]] virtual Memory allocate_staging(std::int64_t bytes, const char* what) = 0;
  [[nodiscard]] virtual std::shared_ptr<Queue> make_queue() = 0;
  // Whether enqueued work is done when enqueuing returns.
  [[nodiscard]] virtual bool immediate() const = 0;
  // How processes of one host pass its memory to each other; null where they cannot.
  [[nodiscard]] virtual std::shared_ptr<DeviceSharing> sharing() { return nullptr; }

  [[nodiscard]] virtual std::unique_ptr<Engine> compile(const Computation& computation,
                                                        std::span<const Stage> forward,
                                                        std::span<const Stage> backward) = 0;
  [[nodiscard]] virtual std::unique_ptr<CopyProgram> compile(const ParcelLayout& layout,
                                                             std::vector<ParcelCopy> copies) = 0;
  // Rows of the shard into the buffer; `sections[i]` are the rows of section i, heads being units.
  virtual void pack(const CopyProgram& program, std::span<const TensorRows> sections,
                    std::byte* buffer, Queue& queue) = 0;
  // fp32 rows of the buffer added to those of the shard, in the program's order.
  virtual void add(const CopyProgram& program, const std::byte* buffer,
                   std::span<const TensorRows> sections, Queue& queue) = 0;
  virtual void clear(std::byte* memory, std::int64_t bytes, Queue& queue) = 0;
  // ConfigError where there are none for the device.
  [[nodiscard]] virtual std::unique_ptr<CacheKernels> cache_kernels(const CacheShape& shape);
};

// A backend of a device. `threads` is the CPU's, whose backends of one number share them: 0 takes
// all that this process may use. DeviceError where the device is not to be had.
[[nodiscard]] std::shared_ptr<Backend> backend_of(const Device& device, int threads);

// For tests: what backend_of returns goes through `wrap` first; null ends that. Returns what it
// went through before.
using WrapBackend = std::shared_ptr<Backend> (*)(std::shared_ptr<Backend>);
WrapBackend wrap_backends(WrapBackend wrap);

}  // namespace annulus
