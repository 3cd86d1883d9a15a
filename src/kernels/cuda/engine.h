#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/compiled_stage.h"
#include "kernels/cuda/families.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/received.h"
#include "kernels/cuda/rows/kernels.h"
#include "kernels/cuda/work/key_writers.h"
#include "kernels/cuda/work/query_writers.h"

namespace annulus::cuda {

class CudaEngine final : public Engine {
 public:
  CudaEngine(const Computation& computation, std::span<const Stage> forward,
             std::span<const Stage> backward, const Families& families, int device,
             Uploads& uploads);

  void allocate(const ReceivedRows& received, Queue& queue) override;
  [[nodiscard]] std::string kernels() const override;
  [[nodiscard]] std::int64_t state_bytes() const override;
  [[nodiscard]] std::int64_t list_bytes() const override { return list_bytes_; }

  void begin_forward(const ForwardCall& call, Queue& queue) override;
  void forward(int stage, const ForwardCall& call, Queue& queue) override;
  void finish_forward(const ForwardCall& call, Queue& queue) override;

  void begin_backward(const BackwardCall& call, Queue& queue) override;
  void backward(int stage, const BackwardCall& call, Queue& queue) override;
  void finish_backward(const BackwardCall& call, Queue& queue) override;
  [[nodiscard]] GradientSums sums(const BackwardCall& call) const override;
  [[nodiscard]] TensorRows statistics() const override;

 private:
  // The stages of backward, compiled for one family.
  struct BackwardStage {
    CompiledStage queries;  // dQ
    CompiledStage keys;     // dK and dV
    std::int64_t first_counter = 0;
    std::int64_t first_progress = 0;
  };
  struct BackwardStages {
    BackwardFamily family;
    std::vector<BackwardStage> stages;
    KeyWriters writers;
    std::int64_t counts = 0;
    Memory counters;  // per launch: the next item; per item in a chain: its progress
  };
  [[nodiscard]] BackwardStages compile_backward(const BackwardFamily& family) const;
  void upload(BackwardStages& stages, Queue& queue);
  // Stages of the chosen family or, for layouts that it does not take, of the portable one. The
  // latter are made when they are first needed.
  [[nodiscard]] BackwardStages& stages_for(const KernelShape& shape, Queue& queue);
  [[nodiscard]] KernelShape backward_shape(const BackwardCall& call) const;
  // Whether the columns of dQ's sums are dealt: see dealt_column.
  [[nodiscard]] bool deals_dq(const BackwardStages& stages) const;
  // Whether the last launch writes the caller's dk and dv, which requires that they have the same
  // layout as their sums.
  [[nodiscard]] bool ends_keys(const BackwardStages& stages, const BackwardCall& call) const;

  // Puts the finest branch first if possible, so that the launch with the most items has no state
  // to read. Each row is then finished by the last launch that has it.
  void put_finest_first();
  // Whether launches do so in this call.
  [[nodiscard]] bool ends_rows(const ForwardCall& call) const;
  [[nodiscard]] bool fits(const ForwardCall& call) const;

  [[nodiscard]] bool is_fp32() const { return computation_.dtype == DType::f32; }
  [[nodiscard]] RowSpace query_space() const;
  [[nodiscard]] RowSpace key_space() const;
  [[nodiscard]] static TensorRows rows_of(std::byte* base, std::int64_t tokens, int heads,
                                          std::int64_t width);
  // The running O.
  [[nodiscard]] TensorRows state_rows(const ForwardCall& call) const;
  // Running fp32 outputs of branches: the kept ones, or an fp32 workspace.
  [[nodiscard]] float* branch_sums(const BranchOutputs& branches) const;
  void upload_kept(Queue& queue);
  [[nodiscard]] std::int64_t sum_bytes(std::int64_t rows) const;
  [[nodiscard]] std::int64_t accumulator_bytes() const;
  [[nodiscard]] std::int64_t statistics_bytes() const;
  [[nodiscard]] KernelShape shape(std::span<const TensorRows> rows) const;

  const Computation computation_;
  const Families families_;
  const int device_;
  Uploads& uploads_;  // of the backend, which outlives its engines
  std::vector<CompiledStage> forward_;
  const std::vector<Stage> stages_;  // of backward
  BackwardStages backward_;
  BackwardStages awkward_;
  std::atomic<std::int64_t> list_bytes_ = 0;  // grows when awkward_ is made
  int forward_launches_ = 0;
  std::size_t first_stage_ = 0;  // the first with launches
  bool covers_first_ = false;    // the first launch covers every query row
  bool covers_last_ = false;     // the last launch does
  bool finest_first_ = false;    // see put_finest_first

  Parcels keys_;
  Parcels queries_;
  Parcels gradients_;
  KeptTables kept_;  // detached mixing
  Memory kept_memory_;
  // 16-bit dtypes: fp32 dQ, dK, dV in backward; fp32 O, or O of all branches, in forward.
  Memory accumulators_;
  Memory statistics_;  // [batch][q head][token][statistics_width()]
  Memory sink_sums_;   // see SinkParams
};

}  // namespace annulus::cuda
