#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/families.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/row_kernels.h"
#include "kernels/cuda/tables.h"

namespace annulus::cuda {

// Tables of a stage in device memory, and their launches.
struct CompiledStage {
  Tables tables;  // dropped when uploaded, but for the launches
  std::vector<LaunchTraits> traits;  // of the launches
  DeviceTables device;
  Memory memory;

  void upload(int device_index);
};

class CudaEngine final : public Engine {
 public:
  CudaEngine(const Computation& computation, std::span<const Stage> forward,
             std::span<const Stage> backward, const Families& families, int device);

  void allocate(const ReceivedRows& received) override;
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
  struct BackwardStage {
    Stage::Kind kind;
    CompiledStage queries;  // dQ
    CompiledStage keys;     // dK and dV
  };
  // Received parcels of one kind, as kernels see them.
  struct Parcels {
    Memory table;  // of Source
    const ParcelLayout* layout = nullptr;
    bool aligned = true;
  };

  [[nodiscard]] bool is_fp32() const { return computation_.dtype == DType::f32; }
  [[nodiscard]] RowSpace query_space() const;
  [[nodiscard]] RowSpace key_space() const;
  [[nodiscard]] TensorRows rows_of(const Memory& memory, std::int64_t tokens, int heads,
                                   std::int64_t width) const;
  [[nodiscard]] Parcels upload_parcels(const ParcelRows& parcels) const;
  [[nodiscard]] static Channel channel(const TensorRows& local, const Parcels& parcels, int section,
                                       std::int64_t byte_offset = 0);
  [[nodiscard]] KernelShape shape(std::span<const TensorRows> rows) const;

  const Computation computation_;
  const Families families_;
  const int device_;
  std::vector<CompiledStage> forward_;
  std::vector<BackwardStage> backward_;
  std::int64_t list_bytes_ = 0;
  int forward_launches_ = 0;
  bool covers_first_ = false;  // the first launch has every query row
  bool covers_last_ = false;   // the last one

  Parcels keys_;
  Parcels queries_;
  Parcels gradients_;
  Memory accumulators_;     // fp32 O in forward, dQ in backward (16-bit dtypes)
  Memory key_gradients_;    // fp32 (16-bit dtypes)
  Memory value_gradients_;  // fp32 (16-bit dtypes)
  Memory statistics_;       // [batch][token][q head][1 + deltas()]
};

}  // namespace annulus::cuda
