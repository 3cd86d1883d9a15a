#include "ring/slots.h"

#include <algorithm>

namespace annulus::ring {

std::vector<Envelope> envelopes(std::span<const Hop> hops, const ParcelLayout& layout) {
  std::vector<Envelope> out;
  for (const Hop& hop : hops) {
    if (out.empty() || out.back().peer != hop.peer) out.push_back({hop.peer, {}, 0, 0});
    out.back().parcels.push_back(hop.parcel);
    out.back().bytes += layout.bytes(hop.parcel);
  }
  return out;
}

std::int64_t lay_out(std::vector<Envelope>& list) {
  std::int64_t offset = 0;
  for (Envelope& envelope : list) {
    envelope.offset = offset;
    offset += envelope.bytes;
  }
  return offset;
}

Slots::Slots(const Plan& plan) : offsets_(plan.parcels().size(), -1), slots_(offsets_.size(), 0) {}

std::int64_t Slots::place(int step, std::vector<Envelope>& messages, const ParcelLayout& layout) {
  const int slot = step % 2;
  const std::int64_t total = lay_out(messages);
  bytes_[slot] = std::max(bytes_[slot], total);
  for (const Envelope& message : messages) {
    std::int64_t offset = message.offset;
    for (const int id : message.parcels) {
      offsets_[static_cast<std::size_t>(id)] = offset;
      slots_[static_cast<std::size_t>(id)] = slot;
      offset += layout.bytes(id);
    }
  }
  return total;
}

void Slots::allocate(Link& link, const char* what) {
  for (const int slot : {0, 1}) boxes_[slot] = link.make_mailbox(bytes_[slot], what);
  rows_.assign(offsets_.size(), nullptr);
  for (std::size_t id = 0; id < rows_.size(); ++id) {
    if (offsets_[id] >= 0) rows_[id] = boxes_[slots_[id]].data() + offsets_[id];
  }
}

}  // namespace annulus::ring
