#include "core/memory.h"

#include <cstdlib>

#include <fmt/format.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "annulus/error.h"

namespace annulus {

// Rows of many heads touch one page each: large pages save the TLB misses of every strided pass.
constexpr std::size_t kHugePage = std::size_t{2} << 20;

Memory allocate_host(std::int64_t bytes, const char* what) {
  if (bytes <= 0) return {};
  const std::size_t align = static_cast<std::size_t>(bytes) >= kHugePage ? kHugePage : 64;
  const std::size_t size = (static_cast<std::size_t>(bytes) + align - 1) / align * align;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(align, size));
  if (data == nullptr) {
    throw DeviceError(
        fmt::format("RingAttention: out of memory allocating {} bytes for {}: use more ranks, a "
                    "shorter sequence or a 16-bit dtype",
                    bytes, what));
  }
#if defined(__linux__)
  if (align == kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
  return {data, bytes, Device{}, [](std::byte* memory) { std::free(memory); }};
}

}  // namespace annulus
