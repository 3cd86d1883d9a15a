#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/executor.h"
#include "ring/recovery.h"

namespace annulus {

// Runs the calls of a RingAttention: whole, by one executor, or, where memory ran out, in pieces, a
// few sequences and heads at a time, to need the memory of one piece only. Heads are independent
// and every piece keeps the schedule of the whole, so results equal those of the whole, up to
// rounding where sums are made in another order. Pieces of one kind share an executor. Heads with
// different offsets, and batch entries with different documents, are different kinds. Only one
// executor exists at a time, because there is no memory for two: each kind's executor replaces that
// of the kind before it in every pass.
//
// An error between pieces is an error on all ranks. Results are then undefined, as after any call
// that throws; a later call overwrites them.
struct RingAttention::Pieces {
  // OutOfMemory if nothing helps.
  Pieces(RingOptions options_in, Transport& transport_in);

  // If memory has run out for the documents, or calls are in pieces and the documents are new,
  // makes the executors again, as in construction.
  template <typename Tensors, typename State>
  void run(const Tensors& tensors, State* state);
  // See RingAttention::set_documents.
  void set_documents(std::vector<Document> documents);
  void synchronize();
  void use_queue(std::shared_ptr<Queue> other);
  void interrupt() noexcept;
  // Whose plan, schedule and kernels those of the RingAttention are: the last piece's. ConfigError
  // if the documents are wrong or not yet planned for, DeviceError if the last pass could not make
  // it again.
  [[nodiscard]] const Impl& current() const;
  [[nodiscard]] std::int64_t branch_rows() const;
  [[nodiscard]] std::int64_t predicted_forward_bytes() const;
  [[nodiscard]] std::int64_t predicted_backward_bytes() const;
  [[nodiscard]] MemoryInfo memory_info() const;

  RingOptions options;  // the caller's; the documents may change
  Transport* const transport;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Queue> queue;
  std::string recovery;

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
  // Collective: makes executors as requested or, if that is too much, as the strategies say.
  // OutOfMemory if none fits; there is no executor then.
  void make();
  // Makes the executor of every kind once, to find out now whether it fits. SharedShortage.
  void make(const ring::Strategy& strategy);
  void make_pieces();
  void drop();    // the executor
  void forget();  // the strategy and all that follows from it, too
  // The executor of a kind; replaces the current one if that is of another kind. SharedShortage.
  Impl& executor_of(std::size_t kind);
  // The same within a pass: on a shortage, drops caches and tries again. OutOfMemory with advice if
  // that fails, too.
  Impl& executor_again(std::size_t kind);
  template <typename Tensors, typename State>
  void run_pieces(const Tensors& tensors, State* state);
  [[nodiscard]] bool made() const { return !strategy_.whole() || executor_ != nullptr; }
  [[nodiscard]] bool of_these_documents() const {
    return strategy_.whole() || made_for_ == options.pattern.documents;
  }

  ring::Strategy strategy_;         // the whole, and no executor: there is no memory for any
  std::vector<Kind> kinds_;         // in the order of the pieces: heads first, then batch entries
  std::vector<Document> made_for_;  // the documents of pieces
  std::mutex mutex_;                // guards the next three, for interrupt()
  std::unique_ptr<Impl> executor_;
  std::string key_;
  bool interrupted_ = false;
  std::int64_t branch_rows_ = 0;
  std::int64_t forward_bytes_ = 0;
  std::int64_t backward_bytes_ = 0;
  MemoryInfo info_;
};

}  // namespace annulus
