#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "annulus/plan.h"
#include "kernels/backend.h"
#include "ring/link.h"
#include "ring/slots.h"

namespace annulus::ring {

// Moves the parcels of the travelling side through the steps of a plan: packs the rank's own
// parcels, receives others into two slots, and forwards them. The messages of step s+1 are posted
// before step s is computed, and finished after it.
class Courier {
 public:
  Courier(const Plan& plan, ParcelLayout layout, Link& link);
  Courier(const Courier&) = delete;  // steps point to mailboxes
  Courier& operator=(const Courier&) = delete;

  // Bytes of all buffers, before they exist.
  [[nodiscard]] std::int64_t buffer_bytes() const;
  void allocate();

  // Copies the rank's own travelling rows from its shard to the outbox. `sections[i]` are the rows
  // of section i; their heads are units.
  void pack(std::span<const TensorRows> sections);
  // Prepares the messages of a step: they follow the work that is in the queue now. post() sends
  // them, even if the queue has more work by then.
  void prepare(int step);
  void post();
  void finish();
  void cancel();  // after an error: drops pending messages

  // Received parcels. The parcels of step s are valid from finish() of s to prepare() of s+2.
  [[nodiscard]] ParcelRows received() const { return {&layout_, &slots_.rows()}; }
  [[nodiscard]] std::int64_t bytes_sent() const;  // in one pass
  [[nodiscard]] std::int64_t list_bytes() const { return packing_->bytes(); }

 private:
  // A copy into the staging area: parcels of a message that are not adjacent are gathered there.
  struct Staged {
    const Mailbox* from = nullptr;
    std::int64_t source = 0;
    std::int64_t target = 0;
    std::int64_t bytes = 0;
  };
  struct Step {
    std::vector<Envelope> in;   // offsets into the slot
    std::vector<Envelope> out;  // offsets into the source (outbox in step 1, else the previous
                                // slot) or the staging area
    std::vector<bool> staged;   // per out message
    std::vector<Staged> copies;
    Batch batch;
  };

  const Plan* plan_;
  ParcelLayout layout_;
  Link* link_;
  std::vector<Step> steps_;
  std::vector<ParcelCopy> own_;              // parcels of this rank, in outbox order
  std::unique_ptr<CopyProgram> packing_;     // of these
  std::vector<std::int64_t> outbox_offset_;  // per parcel; -1: of another rank
  std::int64_t outbox_bytes_ = 0;
  std::int64_t staging_bytes_ = 0;
  Mailbox outbox_;
  Slots slots_;
  Mailbox staging_;
  int current_ = 0;  // prepared, not yet finished
  Event ready_;      // of its messages
  Posted posted_;
};

}  // namespace annulus::ring
