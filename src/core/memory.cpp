#include "core/memory.h"

#include <atomic>
#include <cstdlib>

#include <fmt/format.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "core/memory_state.h"

namespace annulus {
namespace {

// Rows of many heads touch one page each. Huge pages save the TLB misses of every strided pass.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// From this size on, checking the available memory first is worth its 50 us.
constexpr std::int64_t kLarge = std::int64_t{64} << 20;

std::atomic<AllocationHook> allocation_hook{nullptr};
std::atomic<std::int64_t> bytes_in_use{0};

Memory allocate_new_host(std::int64_t bytes, const char* what) {
  admit(bytes, what);
  if (bytes >= kLarge) {
    const std::optional<MemoryState> state = memory_state(Device{});
    if (state && state->free < bytes) throw out_of_memory(bytes, what, Device{});
  }
  const std::size_t align = static_cast<std::size_t>(bytes) >= kHugePage ? kHugePage : 64;
  const std::size_t size = (static_cast<std::size_t>(bytes) + align - 1) / align * align;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(align, size));
  if (data == nullptr) throw out_of_memory(bytes, what, Device{});
#if defined(__linux__)
  if (align == kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
  return {data, bytes, Device{}, [](std::byte* memory) { std::free(memory); }};
}

}  // namespace

void count_memory(std::int64_t bytes) noexcept {
  bytes_in_use.fetch_add(bytes, std::memory_order_relaxed);
}

std::int64_t memory_in_use() noexcept { return bytes_in_use.load(); }

AllocationHook set_allocation_hook(AllocationHook hook) { return allocation_hook.exchange(hook); }

void admit(std::int64_t bytes, const char* what, const Device& device) {
  const AllocationHook hook = allocation_hook.load(std::memory_order_relaxed);
  if (hook != nullptr && !hook(bytes, what)) throw out_of_memory(bytes, what, device);
}

OutOfMemory out_of_memory(std::int64_t bytes, const char* what, const Device& device) {
  std::string text =
      fmt::format("{}: out of memory: {} bytes for {}", name_of(device), bytes, what);
  Shortage numbers{.asked = bytes};
  if (const std::optional<MemoryState> state = memory_state(device)) {
    text += fmt::format(", {} of {} are free", state->free, state->total);
    numbers.free = state->free;
  }
  return OutOfMemory(text, numbers);
}

Memory allocate_host(std::int64_t bytes, const char* what) {
  return SpareMemory::allocate(bytes, what, Device{},
                               [&](std::int64_t size) { return allocate_new_host(size, what); });
}

}  // namespace annulus
