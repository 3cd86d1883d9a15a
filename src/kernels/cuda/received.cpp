#include "kernels/cuda/received.h"

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/cuda/device/runtime.h"

namespace annulus::cuda {

Parcels upload_parcels(const ParcelRows& parcels, int device, Uploads& uploads, Queue& queue) {
  Parcels out;
  out.layout = parcels.layout;
  if (parcels.layout == nullptr || parcels.base->empty()) return out;
  std::vector<Source> sources(parcels.base->size());
  std::int64_t row_bytes = 0;
  for (int s = 0; s < parcels.layout->sections(); ++s)
    row_bytes += parcels.layout->section_bytes(s);
  for (std::size_t id = 0; id < sources.size(); ++id) {
    Source& source = sources[id];
    source.base = (*parcels.base)[id];
    if (source.base == nullptr) continue;
    const auto parcel = static_cast<int>(id);
    source.units = static_cast<std::int64_t>(parcels.layout->units(parcel).size());
    source.rows = parcels.layout->bytes(parcel) /
                  (source.units * parcels.layout->entries(parcel) * row_bytes);
    // Kernels count batch entries from the first of the batch, the parcel from its own first.
    source.base += parcels.layout->offset(parcel, 0, 0, 0);
    out.aligned = out.aligned && reinterpret_cast<std::uintptr_t>(source.base) % 16 == 0 &&
                  source.rows * row_bytes % 16 == 0;
  }
  out.table = allocate_reusable(device, static_cast<std::int64_t>(sources.size() * sizeof(Source)),
                                "the table of parcels");
  uploads.copy(out.table.data(), std::as_bytes(std::span(sources)), "the table of parcels", queue);
  return out;
}

Channel channel(const TensorRows& local, const Parcels& parcels, int section,
                std::int64_t byte_offset) {
  Channel out;
  out.local = local;
  out.local.base += byte_offset;
  if (parcels.layout == nullptr) return out;
  out.sources = reinterpret_cast<const Source*>(parcels.table.data());
  out.row_bytes = parcels.layout->section_bytes(section);
  for (int s = 0; s < parcels.layout->sections(); ++s) {
    if (s < section) out.bytes_before += parcels.layout->section_bytes(s);
    out.bytes_all += parcels.layout->section_bytes(s);
  }
  out.row_offset = byte_offset;
  return out;
}

}  // namespace annulus::cuda
