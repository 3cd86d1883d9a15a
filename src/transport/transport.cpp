#include "annulus/transport.h"

#include <utility>

#include "annulus/error.h"
#include "transport/rank_prefix.h"

namespace annulus {

Region Transport::expose(std::span<std::byte> memory, const Device& device,
                         std::shared_ptr<Queue> copies) {
  Region region(memory);
  region.device = device;
  region.copies = std::move(copies);
  return region;
}

std::unique_ptr<Ticket> Transport::send(int peer, std::uint32_t tag,
                                        std::span<const std::byte> bytes) {
  // A message says which way its bytes go: those to be sent are only read.
  const Region region(std::span(const_cast<std::byte*>(bytes.data()), bytes.size()));
  const Message message{Way::send, peer, tag, &region, 0, region.bytes};
  return post(std::span(&message, 1), Event());
}

std::unique_ptr<Ticket> Transport::receive(int peer, std::uint32_t tag,
                                           std::span<std::byte> bytes) {
  const Region region(bytes);
  const Message message{Way::receive, peer, tag, &region, 0, region.bytes};
  return post(std::span(&message, 1), Event());
}

Transport::Use::Use(Transport& transport, const char* where) : transport_(transport) {
  if (!transport_.in_use_.test_and_set(std::memory_order_acquire)) return;
  const std::string text =
      rank_prefix(transport_.rank(), transport_.size()) + where +
      ": another thread is using this executor or its transport: one call at a time";
  // Another rank may be in the call that is rejected here, and its rows would meet the wrong ones.
  if (transport_.size() > 1) transport_.abort(text);
  throw ConfigError(text);
}

Transport::Use::~Use() { transport_.in_use_.clear(std::memory_order_release); }

}  // namespace annulus
