#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "core/function_ref.h"
#include "kernels/backend.h"
#include "ring/agreement.h"
#include "ring/courier.h"
#include "ring/link.h"
#include "ring/return_courier.h"
#include "ring/tensor_check.h"

namespace annulus {

// Normalised output and log-sum-exp of every branch, of the rows that it selects: o is [row][dim]
// of the call's dtype, lse fp32 and the same without dim; `KeptRows` says which row is where.
struct BranchState::Data {
  Memory o;
  Memory lse;
  bool filled = false;  // by a forward that ended well

  [[nodiscard]] BranchOutputs outputs() const { return {o.data(), lse.floats()}; }
};

// What one rank's executor holds: the plan's order of things, and whose memory is where. How to
// compute is the engine's business.
struct RingAttention::Impl {
  // `whole`: what this is a piece of, whose choices (schedule, which side travels) are kept.
  // `by_ring`: instead of a schedule that the caller has chosen, or that was better. That its
  // messages exceed the limit is then no error of the caller but one more shortage.
  Impl(RingOptions options_in, Transport& transport_in, const RingOptions* whole = nullptr,
       bool by_ring = false);
  ~Impl();
  // The same, as the only caller of the transport.
  [[nodiscard]] static std::unique_ptr<Impl> make(RingOptions options, Transport& transport,
                                                  const RingOptions* whole = nullptr,
                                                  bool by_ring = false);

  // ---- calls.cpp: one call, as the only caller of the transport
  void run(const ring::ForwardTensors& tensors, BranchState::Data* state);
  void run(const ring::BackwardTensors& tensors, const BranchState::Data* state);
  void synchronize();
  void use_queue(std::shared_ptr<Queue> other);
  [[nodiscard]] std::int64_t predicted_forward_bytes() const;
  [[nodiscard]] std::int64_t predicted_backward_bytes() const;
  [[nodiscard]] MemoryInfo memory_info() const;

  // ---- passes.cpp
  void forward(const ForwardCall& call);
  void backward(const BackwardCall& call);
  // Runs a pass; on an error drops its transfers and tells the other ranks.
  void guard(FunctionRef<void()> pass);
  void check_interrupt() const;
  // Waits for the device, whatever has become of its work.
  void finish_enqueued() noexcept;
  // Step s+1 travels while step s computes. `work` is called for every stage.
  void run_steps(ring::Courier& courier, std::span<const TensorRows> sections, int steps,
                 FunctionRef<void(int stage)> work);
  // Arithmetic, or what enqueues it, and an event of it.
  void compute(const char* what, int step, FunctionRef<void()> work) const;

  // ---- executor.cpp: construction, in order; whatever one of them throws becomes every rank's
  void check_options() const;
  void make_plans(const RingOptions* whole);
  void make_couriers();
  void check_limits() const;
  void make_engine();
  void allocate();
  void make_call_claims(std::span<const ring::Claim> claims);

  [[nodiscard]] static std::string check_state(const BranchState::Data& state,
                                               std::int64_t output_bytes, std::int64_t rows);

  [[nodiscard]] std::int64_t local_queries() const { return options.placement.local_tokens(rank); }
  [[nodiscard]] std::int64_t local_keys() const { return options.keys().local_tokens(rank); }
  [[nodiscard]] std::int64_t branch_rows() const { return kept != nullptr ? kept->rows() : 0; }
  [[nodiscard]] std::int64_t branch_output_bytes() const {
    return branch_rows() * options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
  }
  [[nodiscard]] std::int64_t communication_bytes() const;
  [[nodiscard]] std::int64_t list_bytes() const;  // what says what to compute and to copy

  const RingOptions options;
  Transport* const transport;
  const int rank;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Queue> queue;
  std::unique_ptr<KeptRows> kept;  // detached mixing only
  Computation computation;
  Schedule schedule = Schedule::ring;
  Travel travel = Travel::keys;  // backward
  // What the ranks compare before each pass, made once but for the seed of dropout, which is the
  // last claim.
  struct CallClaims {
    static constexpr std::size_t kMostSeedDigits = 20;
    std::vector<ring::Claim> claims;
    std::uint64_t digest = 0;
    bool with_seed = false;

    void set(const std::optional<DropoutSeed>& dropout);
  };
  CallClaims forward_claims[2][2];        // without and with a branch state, without and with sinks
  CallClaims backward_claims[2];          // without and with sinks
  std::atomic<bool> interrupted = false;  // work still to come is skipped; never taken back

  std::unique_ptr<Plan> key_plan;
  std::unique_ptr<Plan> query_plan;  // backward with travelling queries, or reproducible
  std::unique_ptr<ring::Link> link;
  std::unique_ptr<ring::Courier> key_courier;
  std::unique_ptr<ring::Courier> query_courier;
  std::unique_ptr<ring::ReturnCourier> returns;
  std::unique_ptr<Engine> engine;
};

}  // namespace annulus
