#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "annulus/transport.h"
#include "kernels/backend.h"

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
  std::vector<Message> messages;
  std::vector<const Mailbox*> boxes;  // of each message

  void add(Way way, int peer, std::uint32_t tag, const Mailbox& box, std::int64_t offset,
           std::int64_t bytes);
};

// Between the queue that computes and the transport: orders messages after the work before them and
// work after the messages it needs, and takes rows through host memory where it must.
class Link {
 public:
  Link(Transport& transport, Backend& backend, std::shared_ptr<Queue> queue);

  [[nodiscard]] Mailbox make_mailbox(std::int64_t bytes, const char* what);
  // Rows take the way through the host, which then waits for the device: whoever overlaps work with
  // messages enqueues the work first.
  [[nodiscard]] bool staged() const { return staged_; }
  // What a mailbox of this many bytes takes, its image in host memory included.
  [[nodiscard]] std::int64_t mailbox_bytes(std::int64_t bytes) const {
    return staged_ ? 2 * bytes : bytes;
  }

  // Messages are sent, and received bytes may overwrite what was there, once `after` has happened:
  // an event of the queue.
  [[nodiscard]] std::unique_ptr<Ticket> post(const Batch& batch, const Event& after);
  // What is enqueued from now on finds the batch's bytes.
  void wait(const Batch& batch, std::unique_ptr<Ticket>& ticket);

  // Waits for everything that the device was given: its memory is touched no more. DeviceError.
  void finish();

  [[nodiscard]] Queue& queue() { return *queue_; }
  void use_queue(std::shared_ptr<Queue> queue);
  [[nodiscard]] Backend& backend() { return *backend_; }

 private:
  Transport* transport_;
  Backend* backend_;
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Queue> copies_;  // of transfers; null where there is nothing to overlap
  bool staged_;
};

}  // namespace annulus::ring
