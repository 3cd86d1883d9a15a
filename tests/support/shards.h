#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "annulus/tensor.h"
#include "support/problem.h"
#include "support/test_device.h"

// A rank's tensors in awkward memory layouts, to be copied from and to global tensors.
namespace annulus::test {

// dense: [batch, tokens, heads, dim]. heads_major: a transposed view of [batch, heads, tokens,
// dim]. padded: gaps after rows, tokens and batch entries, and an unaligned start.
enum class Layout : std::uint8_t { dense, heads_major, padded };

// One rank's tensor in some layout. Bytes outside the view hold a pattern that must not change.
class ShardTensor {
 public:
  // dim 0: a tensor of three axes (the log-sum-exp).
  ShardTensor(DType dtype, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
              std::int64_t dim, Layout layout);
  ShardTensor(ShardTensor&&) = default;  // a copy's view would still point into the original
  ShardTensor& operator=(ShardTensor&&) = default;

  [[nodiscard]] TensorView view() const { return view_; }
  // Of a tensor of three axes, with one batch entry and token: [heads].
  [[nodiscard]] TensorView head_view() const;
  [[nodiscard]] float get(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const;
  void set(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d, float value);
  void fill(float value);
  [[nodiscard]] bool gaps_untouched() const;
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  // Copies between the host, which tests look at, and the device under test, which the view is of.
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

// All tensors that one rank passes to its executor.
struct Shard {
  Shard(const RingOptions& options, int rank, Layout layout = Layout::dense);

  void load(const Inputs& inputs);    // and fills outputs with NaN, to find unwritten ones
  void forward(RingAttention& ring);  // makes a branch state if backward needs one
  void backward(RingAttention& ring);
  // Both passes. Backward is enqueued behind forward without a wait between them.
  void enqueue(RingAttention& ring) const;
  void collect(Results& results) const;  // own rows only, so ranks may run at the same time
  [[nodiscard]] std::string damage()
      const;  // inputs or gaps that changed since load(); empty: none

  // The optional tensors of a call, for the sinks of the loaded inputs.
  [[nodiscard]] OptionalInputs more() const;
  [[nodiscard]] OptionalGradients more_gradients() const;

  int rank;
  std::vector<std::int64_t> positions;  // of queries
  std::vector<std::int64_t> key_positions;
  std::int64_t batch;
  std::int64_t tokens;  // of the whole sequence
  std::int64_t key_tokens;
  bool detached;
  bool has_sinks = false;
  std::uint64_t dropout_seed = 0;  // of the inputs
  ShardTensor q, k, v, o, lse, dout, dq, dk, dv;
  ShardTensor sinks, dsinks;
  BranchState state;

 private:
  template <typename Body>
  void for_each_element(const ShardTensor& tensor, const Body& body) const;
  [[nodiscard]] bool is_of_keys(const ShardTensor& tensor) const;

  std::vector<std::vector<std::byte>> loaded_;
  std::vector<std::byte> state_o_;
  std::vector<float> state_lse_;
};

}  // namespace annulus::test
