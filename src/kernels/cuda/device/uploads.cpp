#include "kernels/cuda/device/uploads.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "kernels/cuda/device/runtime.h"

namespace annulus::cuda {
namespace {

// Most tables are smaller.
constexpr std::size_t kLeastBytes = 64 * 1024;
// A host that is so many copies ahead waits for the device.
constexpr std::size_t kMostBlocks = 128;

}  // namespace

Uploads::Block& Uploads::free_block(std::size_t bytes) {
  const auto fits = [&](const Block& block) { return block.memory.span().size() >= bytes; };
  auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    return fits(block) && has_happened(block.read);
  });
  if (found == blocks_.end() && blocks_.size() >= kMostBlocks) {
    found = blocks_.begin();
    found->read.wait();
    if (!fits(*found)) {
      blocks_.erase(found);
      found = blocks_.end();
    }
  }
  if (found == blocks_.end()) {
    const std::size_t size = std::bit_ceil(std::max(bytes, kLeastBytes));
    blocks_.push_back(
        {allocate_pinned(device_, static_cast<std::int64_t>(size), "tables on their way"), {}});
  } else {
    std::rotate(found, found + 1, blocks_.end());
  }
  return blocks_.back();
}

void Uploads::copy(std::byte* to, std::span<const std::byte> from, const char* what, Queue& queue) {
  if (from.empty()) return;
  // Each run of the graph would copy what the block holds by then.
  if (cuda_capturing(stream_of(queue)))
    throw DeviceError(fmt::format("cuda: copying {}: a graph is being captured", what));
  Block& block = free_block(from.size());
  std::memcpy(block.memory.data(), from.data(), from.size());
  const DeviceScope scope(device_);
  check(cudaMemcpyAsync(to, block.memory.data(), from.size(), cudaMemcpyHostToDevice,
                        stream_of(queue)),
        fmt::format("copying {}", what));
  block.read = queue.record();
}

}  // namespace annulus::cuda
