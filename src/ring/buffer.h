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
  // Somebody else's memory.
  explicit Buffer(std::span<float> memory)
      : data_(reinterpret_cast<std::byte*>(memory.data()), Free(false)),
        bytes_(static_cast<std::int64_t>(memory.size_bytes())) {}

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    Free() : owned(true) {}
    explicit Free(bool is_owned) : owned(is_owned) {}
    bool owned;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t bytes_ = 0;
};

}  // namespace annulus::ring
