#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "annulus/device.h"
#include "core/memory.h"

// What a device can do for processes of one host that pass its memory to each other. Transports use
// it and know nothing of the device.
namespace annulus {

// How another process finds memory of a device.
struct SharedHandle {
  std::array<std::byte, 64> bytes{};
  std::int64_t offset = 0;  // of the memory within what the bytes name
};

// Words of host memory that several processes have mapped: hosts read and write them, and so do
// queues.
class SharedWords {
 public:
  virtual ~SharedWords() = default;
  // What is enqueued from now on runs once the word has come to `value` or beyond, as numbers that
  // wrap around do. A host that stores such a value lets the queue go on.
  virtual void wait(Queue& queue, std::size_t word, std::uint32_t value) = 0;
  // Whoever sees the value finds everything done that was enqueued before.
  virtual void write(Queue& queue, std::size_t word, std::uint32_t value) = 0;
};

class DeviceSharing {
 public:
  virtual ~DeviceSharing() = default;

  // Why processes cannot share this device's memory, as far as this one can tell; empty: they can.
  [[nodiscard]] virtual std::string complaint() const = 0;
  [[nodiscard]] virtual std::shared_ptr<Queue> make_queue() = 0;
  // Memory that can be shared. DeviceError.
  [[nodiscard]] virtual Memory allocate(std::int64_t bytes, const char* what) = 0;
  [[nodiscard]] virtual SharedHandle share(const std::byte* memory) = 0;
  // Memory of another process, mapped until the last copy of the pointer is gone. DeviceError.
  [[nodiscard]] virtual std::shared_ptr<std::byte> open(const SharedHandle& handle) = 0;
  // `memory` is mapped by this process for as long as the words are used.
  [[nodiscard]] virtual std::unique_ptr<SharedWords> adopt(std::span<std::byte> memory) = 0;
};

}  // namespace annulus
