#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "annulus/device.h"
#include "core/memory.h"

namespace annulus::cuda {

// Copies tables to a device in the order of a queue: kernels that were enqueued before may still
// read what they replace. The host does not wait. A copy is made from a block of pinned memory,
// which serves the next one when it has been read.
class Uploads {
 public:
  explicit Uploads(int device) : device_(device) {}

  // `from` may change when this returns. `what` names the table in errors.
  void copy(std::byte* to, std::span<const std::byte> from, const char* what, Queue& queue);

 private:
  struct Block {
    Memory memory;
    Event read;
  };
  // One that nothing is read from any more, at the end of the list.
  [[nodiscard]] Block& free_block(std::size_t bytes);

  const int device_;
  std::vector<Block> blocks_;  // the one that was used last at the end
};

}  // namespace annulus::cuda
