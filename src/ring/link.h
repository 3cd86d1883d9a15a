#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/transport.h"
#include "kernels/backend.h"
#include "transport/shared_device.h"

namespace annulus::ring {

// Device memory that messages are sent from or received into.
struct Mailbox {
  Memory memory;
  Memory staging;  // its copy in host memory, if the transport does not reach the device
  Region region;   // of `memory` or `staging`: the one that the transport uses

  [[nodiscard]] std::byte* data() const { return memory.data(); }
};

// Messages that are posted together, fixed when memory is allocated.
struct Batch {
  const char* what = "";  // for events: "rows", "gradients"
  int step = -1;
  std::vector<Message> messages;
  std::vector<const Mailbox*> boxes;  // per message

  void add(Way way, int peer, std::uint32_t tag, const Mailbox& box, std::int64_t offset,
           std::int64_t bytes);
};

// A batch under way; empty: none.
struct Posted {
  std::unique_ptr<Ticket> ticket;
  std::int64_t begin_ns = 0;  // for events; 0: events are off

  void reset() { ticket.reset(); }
};

// Connects the compute queue to the transport: orders messages after the work that they depend on,
// and work after the messages that it needs. Rows move between devices in one of three ways: by the
// transport itself, through device memory that processes share, or staged through host memory.
class Link {
 public:
  Link(Transport& transport, Backend& backend, std::shared_ptr<Queue> queue);

  // Chooses how rows travel, before there are mailboxes. Collective, among ranks whose devices are
  // of one kind. ConfigError on all ranks if ANNULUS_DEVICE_MESSAGES asks for a way that is not
  // available.
  void connect();
  // Text for users: how rows travel, and why not in a better way.
  [[nodiscard]] const std::string& way() const { return way_; }

  [[nodiscard]] Mailbox make_mailbox(std::int64_t bytes, const char* what);
  // Rows are staged through host memory. post() then blocks until the device is done with the rows,
  // so to overlap work with messages, enqueue the work first.
  [[nodiscard]] bool staged() const { return staged_; }
  // Batches are executed one after the other; both sides of a message must be in the same batch.
  [[nodiscard]] bool in_order() const { return !staged_ && transport_->in_order(); }
  // Memory of a mailbox of this many bytes, including its copy in host memory.
  [[nodiscard]] std::int64_t mailbox_bytes(std::int64_t bytes) const {
    return staged_ ? 2 * bytes : bytes;
  }

  // Posts a batch. Messages are sent, and received bytes overwrite their targets, only after
  // `after`, an event of the queue.
  [[nodiscard]] Posted post(const Batch& batch, const Event& after);
  // Work enqueued from now on finds the bytes of the batch.
  void wait(const Batch& batch, Posted& posted);

  // Waits for all enqueued work: the device no longer uses its memory. DeviceError.
  void finish();
  // Ends the ring. The device stops waiting for other ranks.
  void abort(const std::string& reason) noexcept { carrier().abort(reason); }
  // TransportError if the device continued although another process had not done its part.
  void check() const;

  [[nodiscard]] Queue& queue() { return *queue_; }
  void use_queue(std::shared_ptr<Queue> queue);
  [[nodiscard]] Backend& backend() { return *backend_; }

 private:
  void wait_for(const Batch& batch, Ticket& ticket);
  [[nodiscard]] Transport& carrier() const { return shared_ != nullptr ? *shared_ : *transport_; }

  Transport* transport_;
  Backend* backend_;
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Queue> copies_;  // for transfers; null if the device has no queued work
  bool staged_;
  std::string way_;
  std::shared_ptr<DeviceSharing> sharing_;
  std::unique_ptr<SharedDevice> shared_;  // null: device memory is not shared
};

}  // namespace annulus::ring
