#pragma once

#include <atomic>
#include <cstdint>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "core/function_ref.h"
#include "core/thread_pool.h"
#include "kernels/cpu/kernel.h"
#include "ring/buffer.h"
#include "ring/parcels.h"
#include "ring/work.h"

namespace annulus {

// Normalised output and log-sum-exp of every branch: o is [branch][batch][token][head][dim], lse
// the same without dim.
struct BranchState::Data {
  ring::Buffer o;
  ring::Buffer lse;
  bool filled = false;  // by a forward that ended well
};

// What one rank's executor holds. forward.cpp and backward.cpp run it; ring_attention.cpp builds
// and checks it.
struct RingAttention::Impl {
  Impl(RingOptions options_in, Transport& transport_in);

  // ---- forward.cpp
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const TensorView& o, const TensorView& lse, BranchState::Data* state);
  // ---- backward.cpp
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& o, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv,
                const BranchState::Data* state);

  // Runs a pass; on an error drops its transfers and tells the other ranks.
  void guard(FunctionRef<void()> pass);
  void check_interrupt() const;
  void run_steps(ring::Courier& courier, std::span<const ring::LocalRows> sections, int steps,
                 FunctionRef<void(int step)> compute);
  void finish_output(const ring::LocalRows& out_rows, const ring::LocalRows& lse_rows,
                     const ring::LocalRows& state_rows, bool direct,
                     const BranchState::Data* state);
  void merge_branches(const BranchState::Data& state, std::int64_t batch, std::int64_t token,
                      int head, float* row, float* lse) const;
  void fill_statistics(const ConstTensorView& o, const ConstTensorView& lse,
                       const ConstTensorView& dout, const BranchState::Data* state);

  // ---- construction, in order; a ConfigError thrown by one of them becomes every rank's
  void check_options() const;
  void make_plans();
  void make_couriers();
  void check_limits() const;
  void make_work();
  void allocate();

  // ---- shared by both passes
  [[nodiscard]] std::string check_tensor(const char* name, const ConstTensorView& view,
                                         bool heads_of_keys) const;
  [[nodiscard]] std::string check_lse(const ConstTensorView& view) const;
  [[nodiscard]] std::string check_state(const BranchState::Data& state) const;
  [[nodiscard]] std::int64_t local_tokens() const { return options.placement.local_tokens(rank); }
  [[nodiscard]] std::int64_t query_rows() const {
    return options.batch * local_tokens() * options.pattern.heads;
  }
  [[nodiscard]] std::int64_t branch_rows() const {
    return static_cast<std::int64_t>(options.pattern.branches.size()) * query_rows();
  }
  [[nodiscard]] std::int64_t key_rows() const {
    return options.batch * local_tokens() * options.kv_heads;
  }
  [[nodiscard]] bool wide() const { return options.dtype == DType::f32; }
  [[nodiscard]] int deltas() const {
    return options.mix_gradient == MixGradient::detached
               ? static_cast<int>(options.pattern.branches.size())
               : 1;
  }
  [[nodiscard]] cpu::Problem problem() const;
  [[nodiscard]] static ring::LocalRows rows_of(const ConstTensorView& view);
  // fp32 rows of a workspace buffer [batch][token][heads][width].
  [[nodiscard]] ring::LocalRows rows_of(const float* base, int heads, std::int64_t width) const;
  void for_each_token(FunctionRef<void(std::int64_t batch, std::int64_t token)> body) const;

  RingOptions options;
  Transport* transport;
  std::shared_ptr<ThreadPool> pool;
  const cpu::Kernels* kernels = nullptr;
  int rank = 0;
  double scale = 1;
  Schedule schedule = Schedule::ring;
  Travel travel = Travel::keys;                  // backward
  std::uint64_t identity = 0xcbf29ce484222325U;  // digest of what the ranks agreed on
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::atomic<bool> interrupted = false;  // items still to come are skipped; never taken back

  std::unique_ptr<Plan> key_plan;
  std::unique_ptr<Plan> query_plan;  // backward with travelling queries, or reproducible
  std::unique_ptr<ring::Courier> key_courier;
  std::unique_ptr<ring::Courier> query_courier;
  std::unique_ptr<ring::ReturnCourier> returns;
  std::vector<ring::Work> forward_work;   // per step; reproducible: one entry for all
  std::vector<ring::Work> backward_work;  // per step; reproducible: dQ, then dK and dV

  ring::Buffer wide_queries;  // fp32 O state in forward, dQ in backward (16-bit dtypes)
  ring::Buffer wide_keys;     // fp32 dK (16-bit dtypes)
  ring::Buffer wide_values;   // fp32 dV (16-bit dtypes)
  ring::Buffer statistics;    // [batch][token][q head][1 + deltas()]: lse and delta
  struct Runs {
    std::vector<cpu::RowRun> queries;
    std::vector<cpu::RowRun> keys;
  };
  std::vector<Runs> runs;  // per pool slot
  [[nodiscard]] Runs& runs_of(int slot) { return runs[static_cast<std::size_t>(slot)]; }
  bool every_row_attends = false;  // no row of the output can be empty
  bool direct_output = false;      // every row is written once: no fp32 state is needed
};

}  // namespace annulus
