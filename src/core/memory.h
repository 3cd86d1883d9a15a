#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "annulus/device.h"
#include "annulus/error.h"
#include "core/function_ref.h"

namespace annulus {

// Adds to the number of bytes held by all Memory objects of the process.
void count_memory(std::int64_t bytes) noexcept;
// For leak tests.
[[nodiscard]] std::int64_t memory_in_use() noexcept;

// A block of memory of a device. Its size never changes.
class Memory {
 public:
  using Free = std::function<void(std::byte*)>;  // empty: not owned

  Memory() = default;
  Memory(std::byte* data, std::int64_t bytes, Device device, Free free)
      : data_(data, Deleter(std::move(free), bytes, device)), bytes_(bytes), device_(device) {
    if (data_.get_deleter().free && data != nullptr) count_memory(bytes);
  }

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const {
    return {data_.get(), static_cast<std::size_t>(bytes_)};
  }
  [[nodiscard]] const Device& device() const { return device_; }

 private:
  friend class SpareMemory;
  struct Deleter {
    Deleter() : capacity(0), reuse_as(nullptr) {}
    Deleter(Free f, std::int64_t size, const Device& where)
        : free(std::move(f)), capacity(size), device(where), reuse_as(nullptr) {}
    Free free;
    std::int64_t capacity;
    Device device;
    const char* reuse_as;  // null: never reused
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Deleter> data_;
  std::int64_t bytes_ = 0;
  Device device_;
};

// Memory that an owner has released and will need again, by what it is for. An owner that makes its
// parts anew opens a Scope, in which this thread's released memory is kept and allocations take the
// smallest block that is large enough. If there is none, a smaller one is freed, and the new one
// has some bytes more: memory only grows, and seldom. If the device has not as many, all blocks are
// freed, and the new one has no bytes more. Kept memory may be in use until `used`, an event:
// whoever takes it uses it behind that, and what is freed is waited for.
class SpareMemory {
 public:
  SpareMemory() = default;
  ~SpareMemory();
  SpareMemory(const SpareMemory&) = delete;
  SpareMemory& operator=(const SpareMemory&) = delete;

  class Scope {
   public:
    explicit Scope(SpareMemory& spare, Event used = {});
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    SpareMemory* const before_;
  };

  // Memory from the scope of this thread, or by `allocate`. `what` names the use and lives forever.
  [[nodiscard]] static Memory allocate(std::int64_t bytes, const char* what, const Device& device,
                                       FunctionRef<Memory(std::int64_t bytes)> allocate);
  [[nodiscard]] std::int64_t bytes() const;  // kept and not in use

 private:
  friend class Memory;
  struct Block {
    std::byte* data;
    Memory::Deleter deleter;
  };
  [[nodiscard]] Memory take(std::int64_t bytes, const char* what, const Device& device);
  [[nodiscard]] Memory add(std::int64_t bytes, FunctionRef<Memory(std::int64_t bytes)> allocate);
  void clear() noexcept;
  void release(std::size_t block) noexcept;

  std::vector<Block> blocks_;
  Event used_;  // of the last scope
};

// Called before every allocation on any device, and before planning (with 0 bytes). Throws
// OutOfMemory if the test hook below says so.
void admit(std::int64_t bytes, const char* what, const Device& device = {});
// For tests: a hook that returns false simulates a lack of memory. Null removes it. Returns the
// previous hook.
using AllocationHook = bool (*)(std::int64_t bytes, const char* what);
AllocationHook set_allocation_hook(AllocationHook hook);

// The error for a failed allocation, with the free memory that the device reports.
[[nodiscard]] OutOfMemory out_of_memory(std::int64_t bytes, const char* what, const Device& device);

// Aligned, uninitialised host memory. Also throws OutOfMemory if the system would promise more than
// it has and kill the process on first use.
[[nodiscard]] Memory allocate_host(std::int64_t bytes, const char* what);

}  // namespace annulus
