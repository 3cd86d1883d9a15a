#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/row_index.h"

// Dropout of probabilities. Whether a pair keeps its probability follows from the seed of the call
// and the pair's batch entry, query head, query token and key token, and from nothing else: it is
// the same on every device, for every placement, schedule and order of tiles, and in every branch.
//
// A strong mixer makes the words of a row and of a key, once for many pairs. A pair then costs two
// multiplications: its number is an affine function of the key's word, of which the row chooses
// both coefficients, and one round of a finaliser. Everything is constexpr, because CUDA kernels
// compile it, too.
namespace annulus {

// What a call says. Its tensors may be a part of those that the caller has (ring/pieces.h).
struct DropoutSeed {
  std::uint64_t seed = 0;
  std::int64_t first_batch = 0;
  int first_head = 0;
};

// A pair whose number is less than `threshold` loses its probability, the others are multiplied by
// `scale`. INT32_MIN: no pair, which is the one thing to ask for whether there is dropout; `scale`
// may be 1 after rounding all the same.
struct DropoutRate {
  std::int32_t threshold = INT32_MIN;
  float scale = 1.0F;  // 1 / (1 - p)

  [[nodiscard]] constexpr bool drops() const { return threshold != INT32_MIN; }
  [[nodiscard]] static DropoutRate of(double p) {
    const double dropped = std::min(std::round(p * 0x1p32), 0x1p32 - 1);  // of 2^32 numbers
    return {static_cast<std::int32_t>(dropped - 0x1p31), static_cast<float>(1 / (1 - p))};
  }
};

namespace dropout {

// The finaliser of splitmix64, and lowbias32 of Chris Wellons.
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}
[[nodiscard]] constexpr std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}
// Number n of a stream.
[[nodiscard]] constexpr std::uint64_t draw(std::uint64_t stream, std::int64_t n) {
  return mix(stream + 0x9e3779b97f4a7c15U * (static_cast<std::uint64_t>(n) + 1));
}

struct Row {
  std::uint32_t flip = 0;
  std::uint32_t factor = 1;  // odd
};

inline constexpr std::uint32_t kLastFactor = 0x9e3779b1U;

// Uniform over all numbers of 32 bits; vectors of the CPU do the same (cpu/dropout-inl.h).
[[nodiscard]] constexpr std::int32_t pair_number(const Row& row, std::uint32_t key) {
  std::uint32_t x = (key ^ row.flip) * row.factor;
  x = (x ^ (x >> 16)) * kLastFactor;
  return static_cast<std::int32_t>(x);
}

// Of one batch entry and query head.
struct Head {
  std::uint64_t rows = 0;
  std::uint32_t keys = 0;

  [[nodiscard]] constexpr Row row(std::int64_t token) const {
    const std::uint64_t words = draw(rows, token);
    return {static_cast<std::uint32_t>(words), static_cast<std::uint32_t>(words >> 32) | 1U};
  }
  [[nodiscard]] constexpr std::uint32_t key(std::int64_t token) const {
    const auto high = static_cast<std::uint32_t>(static_cast<std::uint64_t>(token) >> 32);
    return mix((static_cast<std::uint32_t>(token) + high * kLastFactor) ^ keys);
  }
};

[[nodiscard]] constexpr Head head_of(const DropoutSeed& call, std::int64_t batch, int head) {
  const std::uint64_t entry = draw(mix(call.seed), call.first_batch + batch);
  const std::uint64_t rows = draw(entry, call.first_head + head);
  return {rows, static_cast<std::uint32_t>(mix(rows))};
}

// A head's rows by their index in a segment.
struct Rows {
  Head head;
  IndexTokens tokens;

  [[nodiscard]] constexpr Row query(std::int32_t index) const {
    return head.row(tokens.query(index));
  }
  [[nodiscard]] constexpr std::uint32_t key(std::int32_t index) const {
    return head.key(tokens.key(index));
  }
};

}  // namespace dropout
}  // namespace annulus
