#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace annulus {

struct TransportCounters {
  std::uint64_t bytes_sent = 0;
  std::uint64_t messages_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages_received = 0;
};

// One asynchronous send or receive under way. The buffer must stay alive until wait() returns or
// throws.
class Transfer {
 public:
  virtual ~Transfer() =
      default;  // an unfinished transfer is cancelled: the buffer is not touched afterwards
  // Blocks until the bytes have moved. TransportError after the transport's deadline or when it is
  // aborted.
  virtual void wait() = 0;
  // True once wait() would return or throw at once, so that a loop that polls ends in every case.
  [[nodiscard]] virtual bool done() = 0;
};

// Moves bytes between the ranks of one ring and knows nothing of attention. Messages between two
// ranks with the same tag arrive in the order they were posted; a receive of another size than the
// send is a TransportError on both sides. Used by one thread per rank.
class Transport {
 public:
  virtual ~Transport() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;

  [[nodiscard]] virtual std::unique_ptr<Transfer> send(int peer, std::uint32_t tag,
                                                       std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Transfer> receive(int peer, std::uint32_t tag,
                                                          std::span<std::byte> bytes) = 0;

  // Every pending and future operation of every rank fails with a TransportError that names this
  // rank and the reason.
  virtual void abort(const std::string& reason) noexcept = 0;

  virtual void set_deadline(std::chrono::milliseconds deadline) = 0;  // per operation
  [[nodiscard]] virtual TransportCounters counters() const = 0;
};

}  // namespace annulus
