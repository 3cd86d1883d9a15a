#pragma once

#include <cstdint>
#include <span>

#include "annulus/events.h"
#include "annulus/transport.h"

namespace annulus::ring {

// Records events of messages that were posted at `begin_ns` and have now arrived.
inline void record_messages(const Transport& transport, std::span<const Message> messages,
                            const char* what, int step, std::int64_t begin_ns) {
  EventRecord record;
  record.begin_ns = begin_ns;
  record.end_ns = EventStream::now_ns();
  record.rank = transport.rank();
  record.step = step;
  record.set_name(what);
  for (const Message& message : messages) {
    record.kind = message.way == Way::send ? EventKind::send : EventKind::receive;
    record.peer = message.peer;
    record.bytes = message.bytes;
    event_stream().add(record);
  }
}

}  // namespace annulus::ring
