#include <algorithm>
#include <cstring>
#include <utility>

#include "core/memory.h"

namespace annulus {
namespace {

thread_local SpareMemory* active = nullptr;

}  // namespace

void Memory::Deleter::operator()(std::byte* data) const noexcept {
  if (!free) return;
  if (reuse_as != nullptr && active != nullptr) {
    try {
      active->blocks_.push_back({data, *this});
      return;
    } catch (const std::exception&) {
      // No memory for the list of spare memory.
    }
  }
  free(data);
  count_memory(-capacity);
}

SpareMemory::~SpareMemory() { clear(); }

void SpareMemory::clear() noexcept {
  while (!blocks_.empty()) release(blocks_.size() - 1);
}

SpareMemory::Scope::Scope(SpareMemory& spare, Event used) : before_(std::exchange(active, &spare)) {
  spare.used_ = std::move(used);
}
SpareMemory::Scope::~Scope() { active = before_; }

void SpareMemory::release(std::size_t block) noexcept {
  const Block released = blocks_[block];
  blocks_[block] = blocks_.back();
  blocks_.pop_back();
  try {
    used_.wait();
  } catch (const std::exception&) {  // the device failed and uses nothing any more
  }
  released.deleter.free(released.data);
  count_memory(-released.deleter.capacity);
}

Memory SpareMemory::take(std::int64_t bytes, const char* what, const Device& device) {
  std::size_t best = blocks_.size();
  std::size_t largest = blocks_.size();  // of those that are too small
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Memory::Deleter& block = blocks_[i].deleter;
    if (std::strcmp(block.reuse_as, what) != 0 || block.device != device) continue;
    std::size_t& candidate = block.capacity >= bytes ? best : largest;
    if (candidate == blocks_.size() ||
        (block.capacity < blocks_[candidate].deleter.capacity) == (block.capacity >= bytes))
      candidate = i;
  }
  if (best == blocks_.size()) {
    if (largest < blocks_.size()) release(largest);
    return {};
  }
  const Block block = std::move(blocks_[best]);
  blocks_[best] = std::move(blocks_.back());
  blocks_.pop_back();
  Memory memory;
  memory.data_ = std::unique_ptr<std::byte, Memory::Deleter>(block.data, block.deleter);
  memory.bytes_ = bytes;
  memory.device_ = device;
  return memory;
}

Memory SpareMemory::add(std::int64_t bytes, FunctionRef<Memory(std::int64_t)> allocate) {
  try {
    return allocate(bytes + bytes / 8);
  } catch (const OutOfMemory&) {
    clear();
  }
  return allocate(bytes);
}

Memory SpareMemory::allocate(std::int64_t bytes, const char* what, const Device& device,
                             FunctionRef<Memory(std::int64_t)> allocate) {
  if (bytes <= 0) return {};
  Memory memory;
  if (active != nullptr) memory = active->take(bytes, what, device);
  if (memory.data() == nullptr)
    memory = active == nullptr ? allocate(bytes) : active->add(bytes, allocate);
  memory.bytes_ = bytes;
  memory.data_.get_deleter().reuse_as = what;
  return memory;
}

std::int64_t SpareMemory::bytes() const {
  std::int64_t sum = 0;
  for (const Block& block : blocks_) sum += block.deleter.capacity;
  return sum;
}

}  // namespace annulus
