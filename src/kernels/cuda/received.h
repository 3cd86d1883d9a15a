#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/uploads.h"
#include "kernels/cuda/launch.h"

namespace annulus::cuda {

// The table of received parcels of one kind, for kernels.
struct Parcels {
  Memory table;  // of Source
  const ParcelLayout* layout = nullptr;
  bool aligned = true;
};

[[nodiscard]] Parcels upload_parcels(const ParcelRows& parcels, int device, Uploads& uploads,
                                     Queue& queue);

// The channel of a tensor of the shard and of a section of parcels, from `byte_offset` of each row
// on.
[[nodiscard]] Channel channel(const TensorRows& local, const Parcels& parcels, int section,
                              std::int64_t byte_offset = 0);

}  // namespace annulus::cuda
