#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/executor.h"
#include "ring/recovery.h"

namespace annulus {

// Runs calls in pieces, a few sequences and heads at a time, to need the memory of one piece only.
// Heads are independent and every piece keeps the schedule of the whole, so results equal those of
// the whole, up to rounding where sums are made in another order. Pieces of one kind share an
// executor. Heads with different offsets, and batch entries with different documents, are different
// kinds. Only one executor exists at a time, because there is no memory for two: each kind's
// executor replaces that of the kind before it in every pass.
//
// An error between pieces is an error on all ranks. Results are then undefined, as after any call
// that throws; a later call overwrites them.
struct RingAttention::Pieces final : Executor {
  // Makes the executor of every kind once, to find out now whether it fits. SharedShortage.
  Pieces(RingOptions options_in, const ring::Strategy& strategy, Transport& transport_in);

  void run(const ring::ForwardTensors& tensors, BranchState::Data* state) override;
  void run(const ring::BackwardTensors& tensors, const BranchState::Data* state) override;
  void set_documents(std::vector<Document> documents) override;  // ConfigError
  void synchronize() override;
  void use_queue(std::shared_ptr<Queue> other) override;
  void interrupt() noexcept override;
  // That of the last piece. DeviceError if the last pass could not make it again.
  [[nodiscard]] const Impl& current() const override;
  [[nodiscard]] std::int64_t branch_rows() const override { return branch_rows_; }
  [[nodiscard]] std::int64_t predicted_forward_bytes() const override { return forward_bytes_; }
  [[nodiscard]] std::int64_t predicted_backward_bytes() const override { return backward_bytes_; }
  [[nodiscard]] MemoryInfo memory_info() const override { return info_; }

 private:
  struct Piece {
    std::int64_t first_entry = 0;  // of the batch
    int first_kv_head = 0;
  };
  struct Kind {
    RingOptions options;
    std::string key;
    std::vector<Piece> pieces;
    std::int64_t branch_rows = 0;  // of a piece
  };
  // The executor of a kind; replaces the current one if that is of another kind. SharedShortage.
  Impl& executor_of(std::size_t kind);
  // The same within a pass: on a shortage, drops caches and tries again. OutOfMemory with advice if
  // that fails, too.
  Impl& executor_again(std::size_t kind);
  template <typename Tensors, typename State>
  void run_all(const char* where, const Tensors& tensors, State* state, std::string complaint);
  [[nodiscard]] std::string check_state(const BranchState::Data& state) const;

  const bool by_ring_;       // ring schedule instead of the requested one
  std::vector<Kind> kinds_;  // in the order of the pieces: heads first, then batch entries
  std::mutex mutex_;         // guards the next three, for interrupt()
  std::unique_ptr<Impl> executor_;
  std::string key_;
  bool interrupted_ = false;
  std::int64_t branch_rows_ = 0;
  std::int64_t forward_bytes_ = 0;
  std::int64_t backward_bytes_ = 0;
  MemoryInfo info_;
};

}  // namespace annulus
