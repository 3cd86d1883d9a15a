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

// Memory of the device that messages leave from or arrive in.
struct Mailbox {
  Memory memory;
  Memory staging;  // its image in host memory, where the transport does not reach the device
  Region region;   // of whichever the transport sees

  [[nodiscard]] std::byte* data() const { return memory.data(); }
};

// Some messages of a pass, fixed when memory is allocated.
struct Batch {
  const char* what = "";  // for events: "rows", "gradients"
  int step = -1;
  std::vector<Message> messages;
  std::vector<const Mailbox*> boxes;  // of each message

  void add(Way way, int peer, std::uint32_t tag, const Mailbox& box, std::int64_t offset,
           std::int64_t bytes);
};

// A batch under way; empty: none.
struct Posted {
  std::unique_ptr<Ticket> ticket;
  std::int64_t begin_ns = 0;  // for events; 0: nobody asks

  void reset() { ticket.reset(); }
};

// Between the queue that computes and the transport: orders messages after the work before them and
// work after the messages it needs, and sees to it that rows get from one device to the other: by
// the transport itself, or between processes that share the device's memory, or through the host.
class Link {
 public:
  Link(Transport& transport, Backend& backend, std::shared_ptr<Queue> queue);

  // Finds out which way rows take, before there are mailboxes. Collective, among ranks whose
  // devices are of one kind. ConfigError on all ranks where ANNULUS_DEVICE_MESSAGES asks for a way
  // that is not to be had.
  void connect();
  // For people: how rows travel, and why not in a better way.
  [[nodiscard]] const std::string& way() const { return way_; }

  [[nodiscard]] Mailbox make_mailbox(std::int64_t bytes, const char* what);
  // Rows take the way through the host, which then waits for the device: whoever overlaps work with
  // messages enqueues the work first.
  [[nodiscard]] bool staged() const { return staged_; }
  // Batches are carried out one after the other: both sides of a message belong to the same one.
  [[nodiscard]] bool in_order() const { return !staged_ && transport_->in_order(); }
  // What a mailbox of this many bytes takes, its image in host memory included.
  [[nodiscard]] std::int64_t mailbox_bytes(std::int64_t bytes) const {
    return staged_ ? 2 * bytes : bytes;
  }

  // Messages are sent, and received bytes may overwrite what was there, once `after` has happened:
  // an event of the queue.
  [[nodiscard]] Posted post(const Batch& batch, const Event& after);
  // What is enqueued from now on finds the batch's bytes.
  void wait(const Batch& batch, Posted& posted);

  // Waits for everything that the device was given: its memory is touched no more. DeviceError.
  void finish();
  // Ends the ring; what the device waits for is waited for no more.
  void abort(const std::string& reason) noexcept { carrier().abort(reason); }
  // TransportError where the device went on although other processes had not done their part.
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
  std::shared_ptr<Queue> copies_;  // of transfers; null where there is nothing to overlap
  bool staged_;
  std::string way_;
  std::shared_ptr<DeviceSharing> sharing_;
  std::unique_ptr<SharedDevice> shared_;  // null: device memory is not shared
};

}  // namespace annulus::ring
