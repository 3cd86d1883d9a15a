#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "annulus/device.h"

namespace annulus {

struct TransportCounters {
  std::uint64_t bytes_sent = 0;
  std::uint64_t messages_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages_received = 0;
};

// Whether the ring still holds together and, if not, which rank is lost (-1: not known) and why.
struct Health {
  bool alive = true;
  int lost_rank = -1;
  std::string reason;
};

// Memory that messages leave from or arrive in. Made by Transport::expose, once for memory that is
// used again and again; plain host memory needs no more than its bytes.
struct Region {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  Device device;
  // Memory of a device whose work is queued: the transport enqueues its copies here.
  std::shared_ptr<Queue> copies;
  std::shared_ptr<const void> registration;  // what the transport keeps for it

  Region() = default;
  explicit Region(std::span<std::byte> host)
      : data(host.data()), bytes(static_cast<std::int64_t>(host.size())) {}
};

enum class Way : std::uint8_t { send, receive };

// Bytes [offset, offset + bytes) of a region, to or from a rank.
struct Message {
  Way way = Way::send;
  int peer = 0;
  std::uint32_t tag = 0;
  const Region* region = nullptr;  // only until post() returns; its memory until the end
  std::int64_t offset = 0;
  std::int64_t bytes = 0;

  [[nodiscard]] std::byte* data() const { return region->data + offset; }
};

// A batch of messages under way. Destroying it before wait() was called calls it off: its memory is
// not touched afterwards.
class Ticket {
 public:
  virtual ~Ticket() = default;
  // Blocks until all bytes of the batch have moved. TransportError after the transport's deadline
  // or when it is aborted.
  virtual void wait() = 0;
  // What is enqueued on `queue` from now on finds the bytes moved. A transport that moves the
  // memory of queues by their copies blocks only until the other ranks have posted their side;
  // others block as wait() does.
  virtual void wait(Queue& queue) {
    (void)queue;
    wait();
  }
};

// Moves bytes between the ranks of one ring and knows nothing of attention. Messages between two
// ranks with the same tag arrive in the order they were posted; a receive of another size than the
// send is a TransportError on both sides. Batches progress independently: one must not wait for an
// earlier one to complete. Used by one thread per rank, except where said otherwise.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;

  // Whether messages may lie in this device's memory. Host memory is always fine; whoever has other
  // memory stages it through the host where the answer is no.
  [[nodiscard]] virtual bool reaches(const Device& device) const {
    return device.kind == Device::Kind::cpu;
  }
  // Whether batches are carried out one after the other, on every rank in the order in which they
  // were posted: then both sides of a message are to be in batches that their ranks post at the
  // same point.
  [[nodiscard]] virtual bool in_order() const { return false; }
  // Makes memory known before messages use it. `copies` is null for host memory.
  [[nodiscard]] virtual Region expose(std::span<std::byte> memory, const Device& device,
                                      std::shared_ptr<Queue> copies);

  // Begins to move a batch of messages, some sent, some received. The bytes to be sent are there,
  // and the memory to be received into is free, once `after` has happened.
  [[nodiscard]] virtual std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                                     const Event& after) = 0;

  // Batches of one, in host memory.
  [[nodiscard]] std::unique_ptr<Ticket> send(int peer, std::uint32_t tag,
                                             std::span<const std::byte> bytes);
  [[nodiscard]] std::unique_ptr<Ticket> receive(int peer, std::uint32_t tag,
                                                std::span<std::byte> bytes);

  // From any thread: every pending and future operation of every rank fails with a TransportError
  // that gives the reason and names this rank, or, between processes, the one that it has lost.
  virtual void abort(const std::string& reason) noexcept = 0;
  // From any thread.
  [[nodiscard]] virtual Health health() const = 0;

  virtual void set_deadline(std::chrono::milliseconds deadline) = 0;  // per operation
  [[nodiscard]] virtual std::chrono::milliseconds deadline() const {
    return std::chrono::milliseconds(60'000);
  }
  [[nodiscard]] virtual TransportCounters counters() const = 0;
  // What has moved between its ranks by another way, from device memory to device memory say, is
  // counted as its own. From any thread.
  virtual void count(const TransportCounters& moved) { (void)moved; }

  // Held by whoever runs something collective: two at once would mix their messages. A second one
  // is a ConfigError, and, where other ranks might have taken the two in another order, the end of
  // the transport.
  class Use {
   public:
    Use(Transport& transport, const char* where);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Transport& transport_;
  };

 private:
  std::atomic_flag in_use_ = ATOMIC_FLAG_INIT;
};

}  // namespace annulus
