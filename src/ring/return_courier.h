#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "ring/slots.h"

namespace annulus::ring {

// Sends fp32 partial gradients of received parcels directly back to their owners, who add them in a
// fixed order: by step, then by rank.
class ReturnCourier {
 public:
  ReturnCourier(const Plan& plan, ParcelLayout layout, Link& link);

  [[nodiscard]] std::int64_t buffer_bytes() const;
  void allocate();

  void clear(int step);  // zeroes the gradients of a step
  void begin(int step);  // sends the gradients of `step`, posts receives of those that come back
  // Adds received gradients to the rows of `sections`.
  void finish(std::span<const TensorRows> sections);
  void cancel();

  // Gradients of received parcels, from clear() to begin() of their step.
  [[nodiscard]] ParcelRows gradients() const { return {&layout_, &slots_.rows()}; }
  [[nodiscard]] std::int64_t bytes_sent() const;
  [[nodiscard]] std::int64_t list_bytes() const;

 private:
  // A message with gradients of own rows, and how they are added.
  struct Incoming {
    Envelope envelope;
    std::vector<ParcelCopy> copies;
    std::unique_ptr<CopyProgram> add;  // of these
    Batch batch;                       // if messages are received one by one
  };
  struct Step {
    std::vector<Envelope> out;  // to owners; offsets into the slot
    std::vector<Incoming> in;   // from ranks that had our parcels; offsets into the inbox
    std::int64_t slot_bytes = 0;
    Batch batch;  // sends, and receives if all fit the inbox
  };
  void post_receive(std::size_t index);

  const Plan* plan_;
  ParcelLayout layout_;
  Link* link_;
  std::vector<Step> steps_;
  std::int64_t inbox_bytes_ = 0;
  bool ring_;
  // Whether all messages of a step are received together. The ring schedule returns each own row
  // once per step: the messages of a step fit an inbox of the shard's size. The gather schedule
  // returns P - 1 copies in its one step: they alternate between two places in the inbox. A
  // transport that executes batches in order receives them together, because other ranks' sends
  // would wait for receives that are posted later.
  bool together_;
  Slots slots_;  // of gradients
  Mailbox inbox_;
  int current_ = 0;  // begun, not yet finished
  Posted posted_;
  Posted receives_[2];
};

}  // namespace annulus::ring
