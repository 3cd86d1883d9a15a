#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "ring/slots.h"

namespace annulus::ring {

// Brings fp32 partial gradients of received parcels straight back to their owners, who add them in
// a fixed order: by step, then by rank.
class ReturnCourier {
 public:
  ReturnCourier(const Plan& plan, ParcelLayout layout, Link& link);

  [[nodiscard]] std::int64_t buffer_bytes() const;
  void allocate();

  void clear(int step);  // zeroes the gradients of a step
  void begin(int step);  // sends those of `step`, posts receives of what comes back
  // Adds what came back to the rows of its sections.
  void finish(std::span<const TensorRows> sections);
  void cancel();

  // Gradients of received parcels, from clear() to begin() of their step.
  [[nodiscard]] ParcelRows gradients() const { return {&layout_, &slots_.rows()}; }
  [[nodiscard]] std::int64_t bytes_sent() const;
  [[nodiscard]] std::int64_t list_bytes() const;

 private:
  // What comes back in one message, and how it is added.
  struct Incoming {
    Envelope envelope;
    std::vector<ParcelCopy> copies;
    std::unique_ptr<CopyProgram> add;  // of these
    Batch batch;                       // where messages are received one by one
  };
  struct Step {
    std::vector<Envelope> out;  // to owners, offsets into the slot
    std::vector<Incoming> in;   // from consumers of our parcels, offsets into the inbox
    std::int64_t slot_bytes = 0;
    Batch batch;  // sends; and receives, where all fit the inbox
  };
  void post_receive(std::size_t index);

  const Plan* plan_;
  ParcelLayout layout_;
  Link* link_;
  std::vector<Step> steps_;
  std::int64_t inbox_bytes_ = 0;
  bool ring_;
  // The ring returns each own row once per step: all of a step's messages fit an inbox of the
  // shard's size. The gather schedule returns P - 1 copies in its one step: they take turns in two
  // places, unless the transport carries batches out in order. Other ranks' sends would then wait
  // for receives that are posted after them.
  bool together_;
  Slots slots_;  // of gradients
  Mailbox inbox_;
  int current_ = 0;  // step begun and not finished
  Posted posted_;
  Posted receives_[2];
};

}  // namespace annulus::ring
