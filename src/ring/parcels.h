#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "annulus/plan.h"
#include "annulus/transport.h"
#include "core/thread_pool.h"
#include "ring/buffer.h"

namespace annulus::ring {

// Where a tensor's rows are: row t of (batch b, head h) starts at base + b * batch_step + h *
// head_step + t * row_step bytes.
struct LocalRows {
  std::byte* base = nullptr;
  std::int64_t batch_step = 0;
  std::int64_t head_step = 0;
  std::int64_t row_step = 0;

  [[nodiscard]] std::byte* at(std::int64_t batch, int head) const {
    return base + batch * batch_step + head * head_step;
  }
};

// How a parcel's rows lie in memory and in messages: [batch][unit][section][row], a section being
// K, V, Q, ... of `section_bytes` per row. The same everywhere, so that forwarding a parcel is one
// copy.
class ParcelShape {
 public:
  ParcelShape(const Plan& plan, std::int64_t batch, std::vector<std::int64_t> section_bytes);

  [[nodiscard]] std::int64_t bytes(int parcel) const;
  [[nodiscard]] std::int64_t section_bytes(int section) const {
    return sections_[static_cast<std::size_t>(section)];
  }
  [[nodiscard]] int sections() const { return static_cast<int>(sections_.size()); }
  // Start of the rows of (batch, unit slot, section) within the parcel.
  [[nodiscard]] std::int64_t offset(int parcel, std::int64_t batch, int unit_slot,
                                    int section) const;
  [[nodiscard]] std::int64_t row_bytes() const { return row_bytes_; }  // over all sections
  [[nodiscard]] std::int64_t batch() const { return batch_; }

 private:
  const Plan* plan_;
  std::int64_t batch_;
  std::vector<std::int64_t> sections_;
  std::int64_t row_bytes_ = 0;
};

// Rows of a parcel that lie evenly spaced in the owner's shard as well.
struct CopyRun {
  std::int64_t parcel_first = 0;
  std::int64_t parcel_stride = 1;
  std::int64_t local_first = 0;
  std::int64_t local_stride = 1;
  std::int64_t count = 0;
};
[[nodiscard]] std::vector<CopyRun> copy_runs(const Placement& placement, const Parcel& parcel);

// One message: some parcels, lying at `offset` of a buffer one after the other.
struct Message {
  int peer = 0;
  std::vector<int> parcels;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

// Moves one side's parcels through the steps of a plan: packs the rank's own, receives into two
// slots, forwards. Step s+1 is begun before step s is computed and finished after it.
class Courier {
 public:
  Courier(const Plan& plan, ParcelShape shape);

  // Bytes of all buffers, before they exist.
  [[nodiscard]] std::int64_t buffer_bytes() const;
  void allocate();

  // Copies the rank's own travelling rows out of its shard; `sections[i]` are the rows of section
  // i, heads being units.
  void pack(std::span<const LocalRows> sections, ThreadPool& pool);
  void begin(Transport& transport, int step);
  void finish();
  void cancel();  // after an error: drops whatever is under way

  // Start of a received parcel; valid from finish() of its step until begin() of the step after the
  // next.
  [[nodiscard]] std::byte* parcel(int id) const;
  [[nodiscard]] const ParcelShape& shape() const { return shape_; }
  [[nodiscard]] std::int64_t bytes_sent() const;  // per pass over all steps

 private:
  struct Step {
    std::vector<Message> in;   // offsets into the slot
    std::vector<Message> out;  // offsets into the source (outbox in step 1, else the previous slot)
                               // or the staging area
    std::vector<bool> staged;  // per out message
  };

  const Plan* plan_;
  ParcelShape shape_;
  std::vector<Step> steps_;
  std::vector<int> own_;                        // parcels of this rank, in outbox order
  std::vector<std::vector<CopyRun>> own_runs_;  // per own parcel
  std::vector<std::int64_t> outbox_offset_;     // per parcel, -1: not ours
  std::vector<std::int64_t> slot_offset_;       // per parcel, -1: never here
  std::vector<int> slot_of_;                    // per parcel: which slot
  std::int64_t outbox_bytes_ = 0;
  std::int64_t slot_bytes_[2] = {0, 0};
  std::int64_t staging_bytes_ = 0;
  Buffer outbox_;
  Buffer slots_[2];
  Buffer staging_;
  std::vector<std::unique_ptr<Transfer>> receives_;
  std::vector<std::unique_ptr<Transfer>> sends_;
};

// Brings fp32 partial gradients of received parcels straight back to their owners, who add them in
// a fixed order.
class ReturnCourier {
 public:
  ReturnCourier(const Plan& plan, ParcelShape shape);

  [[nodiscard]] std::int64_t buffer_bytes() const;
  void allocate();

  void clear(int step, ThreadPool& pool);         // zeroes the gradients of a step
  [[nodiscard]] std::byte* parcel(int id) const;  // gradients of a received parcel
  void begin(Transport& transport,
             int step);  // sends those of `step`, posts receives of what comes back
  void finish(Transport& transport, std::span<const LocalRows> sections,
              ThreadPool& pool);  // adds what came back
  void wait_sends();              // before the caller leaves
  void cancel();
  [[nodiscard]] const ParcelShape& shape() const { return shape_; }
  [[nodiscard]] std::int64_t bytes_sent() const;

 private:
  struct Step {
    std::vector<Message> out;  // to owners, offsets into the slot
    std::vector<Message> in;   // from consumers of our parcels, offsets into the inbox
    std::int64_t slot_bytes = 0;
    std::size_t posted = 0;  // receives that can be posted at once
  };
  void post_receive(Transport& transport, std::size_t index);

  const Plan* plan_;
  ParcelShape shape_;
  std::vector<Step> steps_;
  std::vector<std::vector<CopyRun>> runs_;  // per parcel, only own ones filled
  std::vector<std::int64_t> slot_offset_;
  std::vector<int> slot_of_;
  std::int64_t slot_bytes_[2] = {0, 0};
  std::int64_t inbox_bytes_ = 0;
  Buffer slots_[2];
  Buffer inbox_;
  int current_ = 0;  // step begun and not finished
  std::vector<std::unique_ptr<Transfer>> receives_;
  std::vector<std::unique_ptr<Transfer>> sends_[2];
};

}  // namespace annulus::ring
