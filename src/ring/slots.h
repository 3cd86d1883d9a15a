#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "annulus/plan.h"
#include "kernels/parcel_layout.h"
#include "ring/link.h"

namespace annulus::ring {

// One message: parcels that are adjacent in a mailbox, from `offset` on.
struct Envelope {
  int peer = 0;
  std::vector<int> parcels;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};
// One message per peer. Hops are ordered by peer.
[[nodiscard]] std::vector<Envelope> envelopes(std::span<const Hop> hops,
                                              const ParcelLayout& layout);
// Assigns consecutive offsets; returns the total number of bytes.
std::int64_t lay_out(std::vector<Envelope>& list);

// Buffers of received parcels: those of step s are in slot s % 2, message after message. Kernels
// read one slot while the other one is being received.
class Slots {
 public:
  explicit Slots(const Plan& plan);
  Slots(const Slots&) = delete;  // batches point to the mailboxes
  Slots& operator=(const Slots&) = delete;

  // Assigns places in the step's slot to its messages and their parcels; returns their bytes.
  std::int64_t place(int step, std::vector<Envelope>& messages, const ParcelLayout& layout);
  // Of both slots.
  [[nodiscard]] std::int64_t bytes() const { return bytes_[0] + bytes_[1]; }
  // Per parcel, within its slot; -1: never received.
  [[nodiscard]] const std::vector<std::int64_t>& offsets() const { return offsets_; }

  void allocate(Link& link, const char* what);
  [[nodiscard]] const Mailbox& of_step(int step) const { return boxes_[step % 2]; }
  // Per parcel; null: never received.
  [[nodiscard]] const std::vector<std::byte*>& rows() const { return rows_; }

 private:
  std::vector<std::int64_t> offsets_;
  std::vector<int> slots_;  // per parcel
  std::int64_t bytes_[2] = {0, 0};
  Mailbox boxes_[2];
  std::vector<std::byte*> rows_;
};

}  // namespace annulus::ring
