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

// Moves one side's parcels through the steps of a plan: packs the rank's own, receives into two
// slots, forwards. Step s+1 is posted before step s is computed and finished after it.
class Courier {
 public:
  Courier(const Plan& plan, ParcelLayout layout, Link& link);
  Courier(const Courier&) = delete;  // steps point to mailboxes
  Courier& operator=(const Courier&) = delete;

  // Bytes of all buffers, before they exist.
  [[nodiscard]] std::int64_t buffer_bytes() const;
  void allocate();

  // Copies the rank's own travelling rows out of its shard; `sections[i]` are the rows of section
  // i, heads being units.
  void pack(std::span<const TensorRows> sections);
  // Makes the messages of a step ready behind what the queue has so far; post() lets them go, also
  // when the queue has got more work meanwhile.
  void prepare(int step);
  void post();
  void finish();
  void cancel();  // after an error: drops whatever is under way

  // Received parcels; each is valid from finish() of its step until prepare() of the step after the
  // next.
  [[nodiscard]] ParcelRows received() const { return {&layout_, &slots_.rows()}; }
  [[nodiscard]] std::int64_t bytes_sent() const;  // per pass over all steps
  [[nodiscard]] std::int64_t list_bytes() const { return packing_->bytes(); }

 private:
  // Parcels of a message that do not lie one after the other are put so first.
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
  std::vector<std::int64_t> outbox_offset_;  // per parcel, -1: not ours
  std::int64_t outbox_bytes_ = 0;
  std::int64_t staging_bytes_ = 0;
  Mailbox outbox_;
  Slots slots_;
  Mailbox staging_;
  int current_ = 0;  // step prepared and not finished
  Event ready_;      // of its messages
  Posted posted_;
};

}  // namespace annulus::ring
