#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "annulus/band.h"
#include "annulus/device.h"
#include "kernels/backend.h"

// The arithmetic of a cache of keys and values: few queries, many keys that lie where they are.
// Whatever takes a queue only enqueues, as in backend.h, and spans may go when a call returns.
namespace annulus {

// Which positions of a sequence the rows of one shard have. Row j, counted from the beginning of
// the sequence, has position j / block * period + first + j % block.
struct RowPositions {
  std::int64_t block = 1;
  std::int64_t period = 1;
  std::int64_t first = 0;

  // Rows whose positions are below this one.
  [[nodiscard]] constexpr std::int64_t before(std::int64_t position) const {
    if (position <= 0) return 0;
    const std::int64_t rest = position % period - first;
    const std::int64_t part = rest < 0 ? 0 : rest < block ? rest : block;
    return position / period * block + part;
  }
};

// Rows [begin, end).
struct RowInterval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The cached rows of one shard. Row j of an entry is at row j % ring_rows of k and v, which have
// padded_head_dim(head_dim) elements, those past head_dim being 0.
struct CachedKeys {
  TensorRows k, v;
  std::int64_t ring_rows = 0;
  RowPositions positions;
  Band band;  // in positions

  // What a query sees of the first `length` positions of its entry.
  [[nodiscard]] constexpr RowInterval seen_from(std::int64_t position, std::int64_t length) const {
    const std::int64_t first = band.least == -Band::kUnlimited ? 0 : position + band.least;
    const std::int64_t end =
        band.most == Band::kUnlimited ? length : std::min(length, position + band.most + 1);
    return {positions.before(first), positions.before(end)};
  }
};

struct CacheShape {
  DType dtype = DType::f32;
  int head_dim = 0;
  int heads = 1;
  int kv_heads = 1;
  double scale = 1;  // of q.k
  int ranks = 1;     // whose results are merged
};

// Neighbouring tokens of one entry, and where their results go: O of token i and head h to
// o + (i * heads + h) * head_dim, its log-sum-exp to lse + i * heads + h, in fp32.
struct QueryRun {
  std::int64_t entry = 0;  // of the cache
  std::int64_t batch = 0;  // of q
  std::int64_t row = 0;    // of q, of the first token
  std::int64_t tokens = 0;
  std::int64_t position = 0;  // of the first token
  std::int64_t length = 0;    // positions that the entry has
  float* o = nullptr;
  float* lse = nullptr;
};

// `count` rows from (from_batch, from_row) on to (to_batch, to_row) on.
struct RowCopy {
  std::int64_t from_batch = 0;
  std::int64_t from_row = 0;
  std::int64_t to_batch = 0;
  std::int64_t to_row = 0;
  std::int64_t count = 0;
};

// O and log-sum-exps of the same rows, from different keys: [row][head][head_dim], [row][head].
struct PartialRows {
  const float* o = nullptr;
  const float* lse = nullptr;
};

class CacheKernels {
 public:
  virtual ~CacheKernels() = default;

  // Rows of `row_bytes` bytes of all heads.
  virtual void copy(const TensorRows& from, const TensorRows& to, int heads, std::int64_t row_bytes,
                    std::span<const RowCopy> copies, Queue& queue) = 0;
  // Takes the memory that attend needs for these runs, wherever their results go. OutOfMemory.
  virtual void reserve(const CachedKeys& keys, std::span<const QueryRun> runs, Queue& queue) = 0;
  // Of runs for which memory was reserved: takes none. A row without keys gets O = 0 and a
  // log-sum-exp of -inf. The order of a row's sum depends on the keys that its run sees, and on
  // nothing else.
  virtual void attend(const TensorRows& q, const CachedKeys& keys, std::span<const QueryRun> runs,
                      Queue& queue) = 0;
  // Parts are merged in their order, then with the sinks; O is rounded to the shape's dtype.
  // `copies` says which row of the parts (from_row) is which row of o and lse. Without parts, rows
  // are those without keys.
  virtual void merge(std::span<const PartialRows> parts, const HeadNumbers& sinks,
                     std::span<const RowCopy> copies, const TensorRows& o, const TensorRows& lse,
                     Queue& queue) = 0;
  // Bytes of memory that it holds for its own use.
  [[nodiscard]] virtual std::int64_t workspace_bytes() const = 0;
};

}  // namespace annulus
