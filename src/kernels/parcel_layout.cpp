#include "kernels/parcel_layout.h"

#include <span>
#include <utility>

namespace annulus {

ParcelLayout::ParcelLayout(const Plan& plan, std::int64_t batch,
                           std::vector<std::int64_t> content_bytes)
    : plan_(&plan), batch_(batch), sections_(std::move(content_bytes)) {
  for (int s = 0; s < sections(); ++s) row_bytes_ += section_bytes(s);
}

std::int64_t ParcelLayout::bytes(int parcel) const {
  const auto count = static_cast<std::int64_t>(units(parcel).size());
  return entries(parcel) * count * plan_->parcels()[static_cast<std::size_t>(parcel)].row_count *
         row_bytes_;
}

std::int64_t ParcelLayout::offset(int parcel, std::int64_t batch, int unit, int section) const {
  const auto count = static_cast<std::int64_t>(units(parcel).size());
  std::int64_t row = ((batch - first_entry(parcel)) * count + unit) * row_bytes_;
  for (int i = 0; i < section; ++i) row += section_bytes(i);
  return row * plan_->parcels()[static_cast<std::size_t>(parcel)].row_count;
}

std::vector<CopyRun> copy_runs(const Placement& placement, const Parcel& parcel) {
  std::vector<CopyRun> runs;
  const std::span<const RowSet> ranges = placement.ranges(parcel.owner);
  std::int64_t stored = 0;
  for (const RowSet& rows : parcel.rows) {
    std::int64_t local = 0;
    for (const RowSet& range : ranges) {
      const RowSet common = intersect(rows, range);
      if (common.count > 0) {
        runs.push_back({stored + (common.first - rows.first) / rows.stride,
                        common.stride / rows.stride,
                        local + (common.first - range.first) / range.stride,
                        common.stride / range.stride, common.count});
        if (common.count == 1) runs.back().parcel_stride = runs.back().local_stride = 1;
      }
      local += range.count;
    }
    stored += rows.count;
  }
  return runs;
}

}  // namespace annulus
