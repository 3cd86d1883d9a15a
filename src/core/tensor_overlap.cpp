#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <tuple>
#include <utility>

#include "annulus/tensor.h"

namespace annulus {
namespace {

struct Bytes {
  std::intptr_t begin;
  std::intptr_t end;
};

Bytes bounds(const ConstTensorView& view) {
  const auto size = static_cast<std::intptr_t>(size_of(view.dtype));
  const auto start = reinterpret_cast<std::intptr_t>(view.data);
  Bytes bytes{start, start + size};
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    const std::intptr_t extent = (view.shape[axis] - 1) * view.stride[axis] * size;
    (extent < 0 ? bytes.begin : bytes.end) += extent;
  }
  return bytes;
}

// Whether an element of a and an element of b can be `distance` elements apart, considering axes
// from `axis` on. Axes are ordered from the largest stride to the smallest; each spans the ones
// after it.
bool meet(const ConstTensorView& a, const ConstTensorView& b, std::span<const std::size_t> axes,
          std::int64_t distance) {
  if (axes.empty()) return distance == 0;
  const std::size_t axis = axes.front();
  const std::int64_t stride = std::abs(a.stride[axis]);
  // Index in a minus index in b; the reverse for negative strides.
  std::int64_t least = 1 - b.shape[axis];
  std::int64_t most = a.shape[axis] - 1;
  if (a.stride[axis] < 0) std::tie(least, most) = std::pair(-most, -least);
  const std::int64_t below = distance / stride - (distance % stride < 0 ? 1 : 0);
  for (const std::int64_t steps : {below, below + 1}) {
    if (steps < least || steps > most) continue;
    if (meet(a, b, axes.subspan(1), distance - steps * stride)) return true;
  }
  return false;
}

}  // namespace

bool share_memory(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.data == nullptr || b.data == nullptr || a.elements() == 0 || b.elements() == 0)
    return false;
  const Bytes here = bounds(a);
  const Bytes there = bounds(b);
  if (here.end <= there.begin || there.end <= here.begin) return false;
  std::array<std::size_t, 4> order{};
  std::size_t count = 0;
  bool alike = a.rank == b.rank && a.dtype == b.dtype;
  for (std::size_t axis = 0; alike && axis < static_cast<std::size_t>(a.rank); ++axis) {
    if (a.shape[axis] == 1 && b.shape[axis] == 1) continue;
    alike = a.stride[axis] == b.stride[axis] && a.stride[axis] != 0;
    order[count++] = axis;
  }
  const std::intptr_t distance =
      reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  const auto size = static_cast<std::intptr_t>(size_of(a.dtype));
  if (!alike || distance % size != 0) return true;
  const std::span<std::size_t> axes(order.data(), count);
  std::ranges::sort(axes, [&](std::size_t x, std::size_t y) {
    return std::abs(a.stride[x]) > std::abs(a.stride[y]);
  });
  return meet(a, b, axes, distance / size);
}

}  // namespace annulus
