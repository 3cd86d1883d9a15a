#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "core/function_ref.h"
#include "core/memory.h"
#include "kernels/backend.h"
#include "ring/agreement.h"
#include "ring/courier.h"
#include "ring/link.h"
#include "ring/plans.h"
#include "ring/return_courier.h"
#include "ring/tensor_check.h"

namespace annulus {

// Normalised output and log-sum-exp of every branch, for the rows that it selects: o is [row][dim]
// in the call's dtype, lse is fp32 [row]. `KeptRows` gives the index of a row.
struct BranchState::Data {
  Memory o;
  Memory lse;
  bool filled = false;  // by a successful forward

  [[nodiscard]] BranchOutputs outputs() const { return {o.data(), lse.floats()}; }
};

// The executor of one rank: the order of operations and the buffers. The engine does the
// arithmetic.
struct RingAttention::Impl {
  // `whole`: the options of the call that this executor is a piece of; the piece keeps its choices
  // (schedule, travelling side). `by_ring`: recovery uses the ring schedule instead of the one that
  // was asked for or chosen. Messages that exceed the limit are then a shortage, not a ConfigError.
  Impl(RingOptions options_in, Transport& transport_in, const RingOptions* whole = nullptr,
       bool by_ring = false);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  // The same, with the transport reserved for it.
  [[nodiscard]] static std::unique_ptr<Impl> make(RingOptions options, Transport& transport,
                                                  const RingOptions* whole = nullptr,
                                                  bool by_ring = false);

  // ---- calls.cpp: one call, with the transport reserved for it
  void run(const ring::ForwardTensors& tensors, BranchState::Data* state);
  void run(const ring::BackwardTensors& tensors, const BranchState::Data* state);
  void synchronize();
  void use_queue(std::shared_ptr<Queue> other);
  void interrupt() noexcept { interrupted.store(true, std::memory_order_relaxed); }
  [[nodiscard]] std::int64_t predicted_forward_bytes() const;
  [[nodiscard]] std::int64_t predicted_backward_bytes() const;
  [[nodiscard]] MemoryInfo memory_info() const;

  // ---- passes.cpp
  void forward(const ForwardCall& call);
  void backward(const BackwardCall& call);
  // Runs a pass. On an error, drops its transfers and reports the error to the other ranks.
  void guard(FunctionRef<void()> pass);
  void check_interrupt() const;
  // Waits for the device and ignores its errors.
  void finish_enqueued() noexcept;
  [[nodiscard]] Event end_of_enqueued() noexcept;
  // Transfers of step s+1 overlap with the work of step s. Calls `work` for every stage.
  void run_steps(ring::Courier& courier, std::span<const TensorRows> sections, int steps,
                 FunctionRef<void(int stage)> work);
  // Calls `work`, which computes or enqueues computation, and records an event.
  void compute(const char* what, int step, FunctionRef<void()> work) const;

  // ---- executor.cpp: construction, in this order. What one of them throws is an error on every
  // rank
  void check_options() const;
  void make_plans(const RingOptions* whole);
  void make_couriers();
  void check_limits() const;
  void make_engine();
  void allocate();
  void make_call_claims();
  // Runs a part of construction. What it throws becomes `complaint`.
  void attempt(FunctionRef<void()> part);
  void make_computation();

  // Plans anew for other documents, without talking to other ranks: whatever is wrong is an error
  // of the next pass on all of them, and a lack of memory its SharedShortage. Memory of the last
  // plan is used again. Where the device can replace tables in the order of the queue, the host
  // waits for it only to free memory that has become too small. Throws nothing.
  void set_documents(std::vector<Document> documents);

  [[nodiscard]] static std::string check_state(const BranchState::Data& state,
                                               std::int64_t output_bytes, std::int64_t rows);

  [[nodiscard]] std::int64_t local_queries() const { return options.placement.local_tokens(rank); }
  [[nodiscard]] std::int64_t local_keys() const { return options.keys().local_tokens(rank); }
  [[nodiscard]] std::int64_t branch_rows() const { return kept != nullptr ? kept->rows() : 0; }
  [[nodiscard]] std::int64_t branch_output_bytes() const {
    return branch_rows() * options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
  }
  [[nodiscard]] std::int64_t communication_bytes() const;
  [[nodiscard]] std::int64_t list_bytes() const;  // work lists and copy lists

  RingOptions options;  // the documents may change
  Transport* const transport;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Queue> queue;
  SpareMemory spare;  // outlives all other memory
  const int rank;
  // What is wrong on this rank with the options or documents. Then there are no plans and engine.
  ring::Complaint complaint;
  std::uint64_t identity = 0;      // of all options but the documents
  std::unique_ptr<KeptRows> kept;  // detached mixing only
  Computation computation;
  Schedule schedule = Schedule::ring;
  Travel travel = Travel::keys;  // backward
  // What the ranks compare before each pass. Made once, except for the last claims: those of the
  // caller and, if there is dropout, the seed.
  struct CallClaims {
    static constexpr std::size_t kMostShown = 48;  // characters of a value that errors show
    std::vector<ring::Claim> claims;
    std::uint64_t fixed = 0;  // the digest of the claims that are made once
    std::uint64_t digest = 0;
    bool with_seed = false;

    void set(const ring::CallValues& values);
  };
  // The agreement before a pass. `wrong`: what this rank has found. Returns the seed of all ranks.
  DropoutSeed agree_on_call(const char* where, std::string wrong, const ring::CallValues& values,
                            CallClaims& claims) const;
  CallClaims forward_claims[2][2];        // without and with a branch state, without and with sinks
  CallClaims backward_claims[2];          // without and with sinks
  std::atomic<bool> interrupted = false;  // remaining work is skipped; never reset

  // Of earlier documents, the latest first: gradients are often computed after other forwards.
  struct PastPlans {
    std::vector<Document> documents;
    ring::Plans plans;
  };
  static constexpr std::size_t kMostPastPlans = 4;
  std::vector<PastPlans> past_plans;
  std::unique_ptr<Plan> key_plan;
  std::unique_ptr<Plan> query_plan;  // backward with travelling queries, or reproducible
  std::unique_ptr<ring::Link> link;
  std::unique_ptr<ring::Courier> key_courier;
  std::unique_ptr<ring::Courier> query_courier;
  std::unique_ptr<ring::ReturnCourier> returns;
  std::unique_ptr<Engine> engine;
};

}  // namespace annulus
