#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/uploads.h"
#include "kernels/cuda/families.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/tables.h"

namespace annulus::cuda {

// Tables of a stage in device memory, and their launches.
struct CompiledStage {
  Tables tables;                     // cleared after the upload, except the launches
  std::vector<LaunchTraits> traits;  // of the launches
  struct Parcels {
    std::vector<std::int32_t> queries, keys;
  };
  std::vector<Parcels> parcels;  // the parcels that the launches read
  std::vector<ItemTurn> turns;   // of items in chains; cleared as well
  DeviceTables device;
  const ItemTurn* device_turns = nullptr;   // null: not in chains
  const std::uint32_t* key_sums = nullptr;  // KeySums::earlier
  const std::uint32_t* later = nullptr;     // ForwardParams::later
  Memory memory;

  void upload(int device_index, Uploads& uploads, Queue& queue);
  // `row_bytes`: of q, k, v and dout.
  void find_rows(const ReceivedRows& received, std::int64_t row_bytes);
};

// `tile`: most rows of an item; `step`: see BackwardFamily.
[[nodiscard]] CompiledStage compile_stage(const Stage& stage, const Computation& computation,
                                          Side side, int tile, ItemOrder order, int step,
                                          int device);

// Whether the items of a launch cover every query row.
[[nodiscard]] bool covers(const Tables& tables, const Launch& launch, std::int64_t rows);

}  // namespace annulus::cuda
