#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "annulus/device.h"
#include "core/memory.h"

// What a device offers to processes of one host that share its memory. Transports use this
// interface and know nothing else about the device.
namespace annulus {

// Identifies device memory to another process.
struct SharedHandle {
  std::array<std::byte, 64> bytes{};
  std::int64_t offset = 0;  // from the start of the allocation that `bytes` names
};

// Words of host memory that several processes have mapped. Hosts and device queues read and write
// them.
class SharedWords {
 public:
  virtual ~SharedWords() = default;
  // Work enqueued after this call runs once the word has reached `value`, compared with
  // wrap-around. A host can store such a value to release the queue.
  virtual void wait(Queue& queue, std::size_t word, std::uint32_t value) = 0;
  // A reader that sees `value` also sees the effects of all work enqueued before.
  virtual void write(Queue& queue, std::size_t word, std::uint32_t value) = 0;
};

class DeviceSharing {
 public:
  virtual ~DeviceSharing() = default;

  // Why this device's memory cannot be shared between processes, as far as this process can tell;
  // empty if it can.
  [[nodiscard]] virtual std::string complaint() const = 0;
  [[nodiscard]] virtual std::shared_ptr<Queue> make_queue() = 0;
  // Memory that can be shared. Throws DeviceError.
  [[nodiscard]] virtual Memory allocate(std::int64_t bytes, const char* what) = 0;
  [[nodiscard]] virtual SharedHandle share(const std::byte* memory) = 0;
  // Maps memory of another process until the last copy of the pointer is gone. Throws DeviceError.
  [[nodiscard]] virtual std::shared_ptr<std::byte> open(const SharedHandle& handle) = 0;
  // This process must keep `memory` mapped for as long as the words are used.
  [[nodiscard]] virtual std::unique_ptr<SharedWords> adopt(std::span<std::byte> memory) = 0;
};

}  // namespace annulus
