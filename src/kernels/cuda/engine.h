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
             std::span<const Stage> backward, const Families& families, int device);

  void allocate(const ReceivedRows& received) override;
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
  // Backward's stages, as a family wants them.
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
    Memory counters;  // of their launches: which item is next; of items in chains: their progress
  };
  [[nodiscard]] BackwardStages compile_backward(const BackwardFamily& family) const;
  void upload(BackwardStages& stages);
  // Those of the chosen family or, for rows that lie too awkwardly for it, of the portable one,
  // which are made when they are first needed.
  [[nodiscard]] BackwardStages& stages_for(const KernelShape& shape);
  [[nodiscard]] KernelShape backward_shape(const BackwardCall& call) const;
  // Whether the last launch writes the caller's dk and dv: where these lie as their sums do.
  [[nodiscard]] bool deals_dq(const BackwardStages& stages) const;
  [[nodiscard]] bool ends_keys(const BackwardStages& stages, const BackwardCall& call) const;

  // Lets the finest branch come first and rows end with whichever launch has them last, where that
  // can be: the launch with the most items then has no state to read.
  void put_finest_first();
  // Whether launches do so for what the caller passes.
  [[nodiscard]] bool ends_rows(const ForwardCall& call) const;
  [[nodiscard]] bool fits(const ForwardCall& call) const;

  [[nodiscard]] bool is_fp32() const { return computation_.dtype == DType::f32; }
  [[nodiscard]] RowSpace query_space() const;
  [[nodiscard]] RowSpace key_space() const;
  [[nodiscard]] static TensorRows rows_of(std::byte* base, std::int64_t tokens, int heads,
                                          std::int64_t width);
  // Where O so far is.
  [[nodiscard]] TensorRows state_rows(const ForwardCall& call) const;
  // fp32 outputs of branches so far: those that are kept, or their wide image.
  [[nodiscard]] float* branch_sums(const BranchOutputs& branches) const;
  void upload_kept();
  [[nodiscard]] std::int64_t sum_bytes(std::int64_t rows) const;
  [[nodiscard]] std::int64_t accumulator_bytes() const;
  [[nodiscard]] std::int64_t statistics_bytes() const;
  [[nodiscard]] KernelShape shape(std::span<const TensorRows> rows) const;

  const Computation computation_;
  const Families families_;
  const int device_;
  std::vector<CompiledStage> forward_;
  const std::vector<Stage> stages_;  // of backward
  BackwardStages backward_;
  BackwardStages awkward_;
  std::atomic<std::int64_t> list_bytes_ = 0;  // grows when awkward_ is made
  int forward_launches_ = 0;
  std::size_t first_stage_ = 0;  // that has launches
  bool covers_first_ = false;    // the first launch has every query row
  bool covers_last_ = false;     // the last one
  bool finest_first_ = false;    // see put_finest_first

  Parcels keys_;
  Parcels queries_;
  Parcels gradients_;
  KeptTables kept_;  // detached mixing
  Memory kept_memory_;
  // 16-bit dtypes: dQ, dK, dV in backward; fp32 O, or those of all branches, in forward.
  Memory accumulators_;
  Memory statistics_;  // [batch][q head][token][statistics_width()]
  Memory sink_sums_;   // see SinkParams
};

}  // namespace annulus::cuda
