#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/function_ref.h"
#include "core/thread_pool.h"
#include "kernels/backend.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_packs.h"
#include "kernels/cpu/turns.h"
#include "kernels/cpu/work.h"

namespace annulus::cpu {

// Blocks of rows over which gradients of sinks are summed: several per thread.
inline constexpr std::int64_t kMostSinkBlocks = 256;

// Runs all work at once, on the caller's thread and the pool.
class CpuEngine final : public Engine {
 public:
  CpuEngine(const Computation& computation, std::span<const Stage> forward,
            std::span<const Stage> backward, const Kernels& kernels,
            std::shared_ptr<ThreadPool> pool);

  void allocate(const ReceivedRows& received, Queue& queue) override;
  [[nodiscard]] std::string kernels() const override { return kernels_.name; }
  [[nodiscard]] std::int64_t state_bytes() const override;
  [[nodiscard]] std::int64_t list_bytes() const override;

  // ---- engine_forward.cpp
  void begin_forward(const ForwardCall& call, Queue& queue) override;
  void forward(int stage, const ForwardCall& call, Queue& queue) override;
  void finish_forward(const ForwardCall& call, Queue& queue) override;

  // ---- engine_backward.cpp
  void begin_backward(const BackwardCall& call, Queue& queue) override;
  void backward(int stage, const BackwardCall& call, Queue& queue) override;
  void finish_backward(const BackwardCall& call, Queue& queue) override;
  [[nodiscard]] GradientSums sums(const BackwardCall& call) const override;
  [[nodiscard]] TensorRows statistics() const override;

 private:
  struct StateBytes {
    std::int64_t accumulators = 0;
    std::int64_t packed = 0;
    std::int64_t statistics = 0;
  };
  void compile(std::vector<Work>& works, std::span<const Stage> stages);
  [[nodiscard]] StateBytes needed_state() const;
  [[nodiscard]] bool is_fp32() const { return computation_.dtype == DType::f32; }
  // fp32 rows of a workspace [batch][token][heads][width].
  [[nodiscard]] static TensorRows rows_of(const float* base, std::int64_t tokens, int heads,
                                          std::int64_t width);
  [[nodiscard]] static float sink_of(const HeadNumbers& sinks, int head) {
    return sinks.base == nullptr ? -INFINITY : *sinks.at(head);
  }
  // Where the running O is, for rows that are written more than once.
  [[nodiscard]] bool direct(const ForwardCall& call) const {
    return direct_output_ && call.branches.o == nullptr;
  }
  // Whether kernels merge sinks into all rows that they write. Otherwise finish_forward does, in
  // one multiplication with output_scale.
  [[nodiscard]] bool kernels_take_sinks(const ForwardCall& call) const {
    return direct(call) && computation_.pattern->output_scale == 1.0;
  }
  [[nodiscard]] TensorRows state_rows(const ForwardCall& call) const;
  // The running fp32 outputs of branches: in the caller's memory or in the workspace.
  [[nodiscard]] float* branch_outputs(const BranchOutputs& kept) const {
    return is_fp32() ? reinterpret_cast<float*>(kept.o) : accumulators_.floats();
  }
  // fp32 dQ, dK and dV of 16-bit dtypes, one after the other.
  [[nodiscard]] std::array<std::int64_t, 3> sum_bytes() const;
  void merge_branches(const BranchOutputs& branches, std::int64_t batch, std::int64_t token,
                      int head, float* row, float* lse) const;
  void round_branches(const BranchOutputs& branches, std::int64_t batch, std::int64_t token,
                      int head) const;
  [[nodiscard]] double fill_statistics(const BackwardCall& call, std::int64_t batch,
                                       std::int64_t token, int head) const;
  [[nodiscard]] double take_sink(const BackwardCall& call, std::int64_t batch, std::int64_t token,
                                 int head, float sink, float* statistics) const;
  void fill_statistics_and_dsinks(const BackwardCall& call);
  void for_each_token(std::int64_t tokens,
                      FunctionRef<void(std::int64_t batch, std::int64_t token)> body) const;

  // What dropout needs to know of an item's rows.
  [[nodiscard]] dropout::Rows dropout_rows(const DropoutSeed& seed, const WorkItem& item, int head,
                                           const WorkGroup& group) const {
    if (!problem_.dropout.drops()) return {};
    return {dropout::head_of(seed, item.batch, head), group.tokens};
  }

  const Computation computation_;
  const Problem problem_;
  const Kernels& kernels_;
  const std::shared_ptr<ThreadPool> pool_;
  std::vector<Work> forward_;   // per stage
  std::vector<Work> backward_;  // per stage
  std::unique_ptr<Turns> turns_;
  ShareRunner share_runner_;
  std::int64_t list_bytes_ = 0;
  StateBytes state_bytes_;
  bool every_row_attends_ = false;  // no row of the output can be empty
  bool direct_output_ = false;      // every row is written once: no fp32 state is needed

  ReceivedRows received_;
  Memory accumulators_;  // 16-bit dtypes: fp32 O, or O of the branches; in backward dQ, dK, dV
  Memory packed_;        // keys of a phase, if the kernels pack them
  Memory statistics_;    // [batch][token][q head][statistics_width()]
  struct Runs {
    std::vector<RowRun> queries;
    std::vector<RowRun> keys;
  };
  std::vector<Runs> runs_;      // per pool slot
  std::vector<double> dsinks_;  // [block of rows][q head]
};

}  // namespace annulus::cpu
