#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "annulus/ring_attention.h"
#include "core/memory.h"

namespace annulus::python {

// All ranks of an in-process ring, for whole arrays: [batch, tokens, heads, head_dim] in the order
// of the sequence. A single rank runs on the caller's thread, several run on one thread each.
// Shards whose tokens are evenly spaced are views of the arrays. Others are copied, which works in
// host memory only: elsewhere it is a ConfigError.
class LocalRing {
 public:
  explicit LocalRing(RingOptions options);

  // Plans for these documents, unless they are those of the ring.
  void set_documents(const std::vector<Document>& documents);
  // False: it has other documents and cannot change them, because a CUDA graph uses it.
  [[nodiscard]] bool takes_documents(const std::vector<Document>& documents) const {
    return has_documents(documents) || !keeps_documents_;
  }
  [[nodiscard]] bool has_documents(const std::vector<Document>& documents) const {
    return documents == options_.pattern.documents;
  }
  void keep_documents() { keeps_documents_ = true; }

  // `lse` may be null.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const TensorView& o, const TensorView* lse, const OptionalInputs& more);
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& o, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv,
                const OptionalInputs& more, const std::optional<TensorView>& dsinks);

  // CUDA: enqueue all ranks' passes on this stream of the caller from now on.
  void use_stream(std::uintptr_t stream);
  // Stop using the caller's stream. The next passes come after the work enqueued there.
  void leave_stream();
  void synchronize();

  // From another thread: ends the running pass soon, by an exception.
  void interrupt() noexcept;

  [[nodiscard]] int ranks() const { return options_.placement.ranks(); }
  // Of one operation of a transport. A rank may have to wait while others compute.
  [[nodiscard]] std::chrono::milliseconds deadline() const { return transports_[0]->deadline(); }
  [[nodiscard]] double forward_flops() const { return forward_flops_; }
  [[nodiscard]] std::int64_t bytes() const;  // bytes of executors and copies

 private:
  // Memory of one rank for shards that are not views, and for a log-sum-exp that the caller does
  // not want.
  using Copies = std::vector<Memory>;

  void on_every_rank(const std::function<void(int rank)>& body);
  [[nodiscard]] static bool is_view(const Placement& placement, int rank) {
    return placement.ranges(rank).size() <= 1;
  }
  // The shard of a whole array. `slot` numbers the arrays of a call. If the shard is a copy of an
  // input, it is filled.
  [[nodiscard]] TensorView shard(const Placement& placement, int rank, std::size_t slot,
                                 const ConstTensorView& whole, bool is_input);
  // Copies results back.
  static void collect(const Placement& placement, int rank, const ConstTensorView& shard,
                      const TensorView& whole);
  [[nodiscard]] std::byte* memory(int rank, std::size_t slot, std::size_t bytes);

  [[nodiscard]] static double forward_flops_of(const RingOptions& options);

  RingOptions options_;
  double forward_flops_;
  bool keeps_documents_ = false;
  // Declared so that executors are destroyed first: they refer to their transports and wait for
  // work that uses the copies.
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Copies> copies_;  // one for each rank
  std::vector<std::unique_ptr<RingAttention>> executors_;
  std::optional<std::uintptr_t> stream_;
  std::shared_ptr<Queue> own_;  // used between streams; null: no stream was left yet
};

// Limits for a process that already holds its arrays: whatever fits into the free memory, but at
// least the library's defaults.
[[nodiscard]] Limits local_limits(const RingOptions& options);

}  // namespace annulus::python
