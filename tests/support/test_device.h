#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "annulus/device.h"
#include "core/memory.h"

// ANNULUS_TEST_DEVICE=cuda:0 runs a whole test program on that device. If it does not exist, the
// program exits with kSkipped, which ctest reports.
namespace annulus::test {

inline constexpr int kSkipped = 77;

[[nodiscard]] const Device& test_device();

// Bytes of the host, and a copy in the memory of the device under test.
class DeviceImage {
 public:
  explicit DeviceImage(std::span<std::byte> host);
  [[nodiscard]] std::byte* data() const { return memory_.data(); }
  void upload();
  void download();

 private:
  std::span<std::byte> host_;
  Memory memory_;
  std::shared_ptr<Queue> queue_;
};

}  // namespace annulus::test
