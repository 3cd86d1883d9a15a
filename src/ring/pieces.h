#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/executor.h"
#include "ring/recovery.h"

namespace annulus {

// An executor whose memory is that of a piece: calls are cut into some sequences and some heads at
// a time, one after the other. Heads never meet in the arithmetic, and every piece keeps the
// schedule of the whole, so results are those of the whole, to rounding where sums are made in
// another order. Pieces of one kind share an executor. Heads with other offsets are of another
// kind: its executor takes the place of the last one in every pass, because two of them would take
// the memory that is not there.
//
// Whatever fails between pieces fails on all ranks; results are then undefined, like those of any
// call that throws, and nothing is ever added to what an earlier call has left in them.
struct RingAttention::Pieces {
  // Makes every kind once: what does not fit is known now. SharedShortage.
  Pieces(RingOptions options, const ring::Strategy& strategy, Transport& transport);

  void run(const ring::ForwardTensors& tensors, BranchState::Data* state);
  void run(const ring::BackwardTensors& tensors, const BranchState::Data* state);
  void synchronize();
  void use_queue(std::shared_ptr<Queue> queue);
  void interrupt() noexcept;

  [[nodiscard]] const RingOptions& options() const { return options_; }
  [[nodiscard]] Queue& queue() { return *queue_; }
  [[nodiscard]] Backend& backend() const { return *backend_; }
  // That of the last piece; DeviceError where it could not be made again in the last pass.
  [[nodiscard]] const Impl& current() const;
  [[nodiscard]] std::int64_t branch_rows() const { return branch_rows_; }
  [[nodiscard]] std::int64_t predicted_forward_bytes() const { return forward_bytes_; }
  [[nodiscard]] std::int64_t predicted_backward_bytes() const { return backward_bytes_; }
  [[nodiscard]] const MemoryInfo& memory_info() const { return info_; }

 private:
  struct Kind {
    RingOptions options;
    std::string key;
  };
  // The executor for this piece of the heads, made if there is another one. SharedShortage.
  Impl& executor_of(std::size_t head_piece);
  // In a pass: with caches dropped if need be, and with advice if that does not help.
  Impl& executor_again(std::size_t head_piece);
  template <typename Tensors, typename State>
  void run_all(const char* where, const Tensors& tensors, State* state, std::string complaint);
  [[nodiscard]] std::string check_state(const BranchState::Data& state) const;

  const RingOptions options_;
  const bool by_ring_;  // instead of what was asked for
  Transport* const transport_;
  std::int64_t batch_pieces_ = 1;
  std::vector<Kind> kinds_;  // by piece of the heads
  std::mutex mutex_;         // of the next three, for interrupt()
  std::unique_ptr<Impl> executor_;
  std::string key_;
  bool interrupted_ = false;
  std::shared_ptr<Queue> queue_;  // of all executors
  std::shared_ptr<Backend> backend_;
  std::int64_t branch_rows_ = 0;
  std::int64_t forward_bytes_ = 0;
  std::int64_t backward_bytes_ = 0;
  MemoryInfo info_;
};

}  // namespace annulus
