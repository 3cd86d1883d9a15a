#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "annulus/ring_attention.h"
#include "core/memory.h"

namespace annulus::python {

// All ranks of an in-process ring, behind whole arrays: [batch, tokens, heads, head_dim] in the
// order of the sequence. One rank runs on the caller's thread, more on a thread each. Shards whose
// tokens are evenly spaced are views of the arrays; others are copied, in host memory only:
// ConfigError for those of other devices.
class LocalRing {
 public:
  explicit LocalRing(RingOptions options);

  // `lse` may be null.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const TensorView& o, const TensorView* lse);
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& o, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv);

  // CUDA: all ranks' passes are enqueued on this stream of the caller's from now on.
  void use_stream(std::uintptr_t stream);
  // It is not known here any more: the next passes come after what was enqueued there.
  void leave_stream();
  void synchronize();

  // From another thread: the pass that runs ends soon, by an exception.
  void interrupt() noexcept;

  [[nodiscard]] double forward_flops() const { return forward_flops_; }
  [[nodiscard]] std::int64_t bytes() const;  // of executors and copies

 private:
  // Memory of one rank for shards that are no views, and for a log-sum-exp that nobody wants.
  using Copies = std::vector<Memory>;

  void on_every_rank(const std::function<void(int rank)>& body);
  [[nodiscard]] bool is_view(int rank) const { return options_.placement.ranges(rank).size() <= 1; }
  // The shard of a whole array; `slot` numbers the arrays of a call. Copies are filled when the
  // array is an input.
  [[nodiscard]] TensorView shard(int rank, std::size_t slot, const ConstTensorView& whole,
                                 bool is_input);
  // Copies results back.
  void collect(int rank, const ConstTensorView& shard, const TensorView& whole) const;
  [[nodiscard]] std::byte* memory(int rank, std::size_t slot, std::size_t bytes);

  RingOptions options_;
  double forward_flops_;
  // Executors refer to their transports and wait for work that uses the copies, hence go first.
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Copies> copies_;  // per rank
  std::vector<std::unique_ptr<RingAttention>> executors_;
  std::optional<std::uintptr_t> stream_;
  std::shared_ptr<Queue> own_;  // between streams; null: none was left yet
};

// Limits for a process that has its arrays already and asks for results: what fits into the memory
// that is left, and never less than the library's defaults.
[[nodiscard]] Limits local_limits(const RingOptions& options);

}  // namespace annulus::python
