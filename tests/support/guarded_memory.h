#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace annulus::test {

// Bytes that end at the end of a page, before a protected one. Reading or writing past the end
// raises SIGSEGV, with or without a sanitizer.
class GuardedMemory {
 public:
  GuardedMemory(std::size_t bytes, std::byte filling) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t pages = (bytes + page - 1) / page * page;
    mapped_ = pages + page;
    start_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED) throw std::bad_alloc();
    std::byte* const guard = static_cast<std::byte*>(start_) + pages;
    if (mprotect(guard, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = guard - bytes;
    std::memset(data_, static_cast<int>(filling), bytes);
  }
  ~GuardedMemory() {
    if (start_ != nullptr) munmap(start_, mapped_);
  }
  GuardedMemory(GuardedMemory&& other) noexcept
      : start_(std::exchange(other.start_, nullptr)), mapped_(other.mapped_), data_(other.data_) {}
  GuardedMemory& operator=(GuardedMemory&&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  void* start_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace annulus::test
