#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "annulus/device.h"

namespace annulus {

// Memory of a device, whose size is known once.
class Memory {
 public:
  using Free = std::function<void(std::byte*)>;  // empty: somebody else's

  Memory() = default;
  Memory(std::byte* data, std::int64_t bytes, Device device, Free free)
      : data_(data, Deleter(std::move(free))), bytes_(bytes), device_(device) {}

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const {
    return {data_.get(), static_cast<std::size_t>(bytes_)};
  }
  [[nodiscard]] const Device& device() const { return device_; }

 private:
  struct Deleter {
    Deleter() = default;
    explicit Deleter(Free f) : free(std::move(f)) {}
    Free free;
    void operator()(std::byte* data) const {
      if (free) free(data);
    }
  };
  std::unique_ptr<std::byte, Deleter> data_;
  std::int64_t bytes_ = 0;
  Device device_;
};

// Aligned host memory, not initialised. Out of memory is a DeviceError that says how much was asked
// for and for what.
[[nodiscard]] Memory allocate_host(std::int64_t bytes, const char* what);

}  // namespace annulus
