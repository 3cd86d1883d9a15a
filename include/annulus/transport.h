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

// Whether the ring works and, if not, which rank is lost (-1: not known) and why.
struct Health {
  bool alive = true;
  int lost_rank = -1;
  std::string reason;
};

// Memory that messages are sent from or received into. Made by Transport::expose, once for memory
// that is used repeatedly. Plain host memory can also be wrapped directly.
struct Region {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  Device device;
  // Memory of a device with queued work: the transport enqueues its copies here.
  std::shared_ptr<Queue> copies;
  std::shared_ptr<const void> registration;  // what the transport stores for it

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
  const Region* region = nullptr;  // needed until post() returns; its memory until the message ends
  std::int64_t offset = 0;
  std::int64_t bytes = 0;

  [[nodiscard]] std::byte* data() const { return region->data + offset; }
};

// A batch of messages under way. Destroying it before wait() cancels the batch: its memory is not
// used afterwards.
class Ticket {
 public:
  virtual ~Ticket() = default;
  // Blocks until all bytes of the batch have moved. TransportError after the transport's deadline
  // or when it is aborted.
  virtual void wait() = 0;
  // Work enqueued on `queue` from now on finds the bytes moved. A transport that copies by the
  // queues of the memory blocks only until the other ranks have posted their side; others block as
  // wait() does.
  virtual void wait(Queue& queue) {
    (void)queue;
    wait();
  }
};

// Moves bytes between the ranks of one ring and knows nothing of attention. Messages between two
// ranks with the same tag arrive in the order in which they were posted. If send and receive differ
// in size, both sides get a TransportError. Batches progress independently: one must not wait for
// an earlier one to complete. For one thread per rank, except where a method says otherwise.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;

  // Whether messages may lie in this device's memory. Host memory is always supported; callers
  // stage other memory through the host if the answer is no.
  [[nodiscard]] virtual bool reaches(const Device& device) const {
    return device.kind == Device::Kind::cpu;
  }
  // Whether batches are executed one after the other, on every rank in the order in which they were
  // posted. If so, both sides of a message must be in batches that their ranks post at the same
  // point.
  [[nodiscard]] virtual bool in_order() const { return false; }
  // Announces memory before messages use it. `copies` is null for host memory.
  [[nodiscard]] virtual Region expose(std::span<std::byte> memory, const Device& device,
                                      std::shared_ptr<Queue> copies);

  // Begins to move a batch of messages, some sent, some received. Once `after` has happened, the
  // bytes to be sent are ready and the memory to receive into is free.
  [[nodiscard]] virtual std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                                     const Event& after) = 0;

  // Batches of one message in host memory.
  [[nodiscard]] std::unique_ptr<Ticket> send(int peer, std::uint32_t tag,
                                             std::span<const std::byte> bytes);
  [[nodiscard]] std::unique_ptr<Ticket> receive(int peer, std::uint32_t tag,
                                                std::span<std::byte> bytes);

  // Makes every pending and future operation of every rank fail with a TransportError, which gives
  // the reason and names this rank or, between processes, the rank that this one has lost. Callable
  // from any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Callable from any thread.
  [[nodiscard]] virtual Health health() const = 0;

  virtual void set_deadline(std::chrono::milliseconds deadline) = 0;  // per operation
  [[nodiscard]] virtual std::chrono::milliseconds deadline() const {
    return std::chrono::milliseconds(60'000);
  }
  [[nodiscard]] virtual TransportCounters counters() const = 0;
  // Adds messages that moved between its ranks by another way, for example between device memories,
  // to the counters. Callable from any thread.
  virtual void count(const TransportCounters& moved) { (void)moved; }

  // Held during a collective operation, because two at once would mix their messages. A second user
  // gets a ConfigError. If other ranks might have taken the two in another order, the transport
  // ends.
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
