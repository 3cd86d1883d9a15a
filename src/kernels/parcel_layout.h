#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "annulus/plan.h"

namespace annulus {

// Rows in parcels start at multiples of 16 bytes for every head dim: kernels load 16 bytes at a
// time, and a parcel may have elements of 2 bytes and of 4.
[[nodiscard]] constexpr std::int64_t parcel_row_bytes(std::int64_t content_bytes) {
  return (content_bytes + 15) / 16 * 16;
}

// The layout of a parcel in memory and in messages: [batch entry of its class][unit][section][row].
// Sections are K, V, Q, ...; a row of a section has `content_bytes`, padded with zeros. The layout
// is the same on all ranks, so that forwarding a parcel is one copy.
class ParcelLayout {
 public:
  ParcelLayout(const Plan& plan, std::int64_t batch, std::vector<std::int64_t> content_bytes);

  [[nodiscard]] std::int64_t bytes(int parcel) const;
  [[nodiscard]] std::int64_t content_bytes(int section) const {
    return sections_[static_cast<std::size_t>(section)];
  }
  [[nodiscard]] std::int64_t section_bytes(int section) const {
    return parcel_row_bytes(content_bytes(section));
  }
  [[nodiscard]] int sections() const { return static_cast<int>(sections_.size()); }
  // Start of the rows of (batch entry, unit index, section) within the parcel.
  [[nodiscard]] std::int64_t offset(int parcel, std::int64_t batch, int unit, int section) const;
  // Batch entries that the parcel has rows of: from first_entry() on.
  [[nodiscard]] std::int64_t first_entry(int parcel) const {
    return class_of(parcel).entries.begin;
  }
  [[nodiscard]] std::int64_t entries(int parcel) const {
    return class_of(parcel).entries.count_in(batch_);
  }
  // K/V heads or query heads of the parcel, in the order of its units.
  [[nodiscard]] const std::vector<int>& units(int parcel) const { return class_of(parcel).units; }

 private:
  [[nodiscard]] const HeadClass& class_of(int parcel) const {
    const Parcel& p = plan_->parcels()[static_cast<std::size_t>(parcel)];
    return plan_->classes()[static_cast<std::size_t>(p.head_class)];
  }

  const Plan* plan_;
  std::int64_t batch_;
  std::vector<std::int64_t> sections_;  // content_bytes
  std::int64_t row_bytes_ = 0;          // over all sections
};

// Rows of a parcel that are evenly spaced in the owner's shard, too.
struct CopyRun {
  std::int64_t parcel_first = 0;
  std::int64_t parcel_stride = 1;
  std::int64_t local_first = 0;
  std::int64_t local_stride = 1;
  std::int64_t count = 0;
};
[[nodiscard]] std::vector<CopyRun> copy_runs(const Placement& placement, const Parcel& parcel);

// A parcel in a buffer and the corresponding rows of the owner's shard.
struct ParcelCopy {
  int parcel = 0;
  std::int64_t offset = 0;  // of the parcel in the buffer
  std::shared_ptr<const std::vector<CopyRun>> runs;
};

}  // namespace annulus
