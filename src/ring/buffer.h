#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace annulus::ring {

// Aligned memory whose size is known once. Out of memory is a DeviceError that says how much was
// asked for and for what.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::int64_t bytes, const char* what);

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t bytes_ = 0;
};

}  // namespace annulus::ring
