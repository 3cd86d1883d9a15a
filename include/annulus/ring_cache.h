#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "annulus/device.h"
#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/ring_attention.h"
#include "annulus/tensor.h"
#include "annulus/transport.h"

namespace annulus {

struct CacheOptions {
  std::int64_t batch = 1;  // entries: sequences of lengths of their own
  // Tokens that an entry may have, over all ranks. With a window: tokens that it has to hold at a
  // time, which is the window and the new tokens of one append.
  std::int64_t capacity = 0;
  int heads = 1;     // of queries
  int kv_heads = 1;  // divides the query heads: head h uses K/V head h / (heads / kv_heads)
  int head_dim = 64;
  DType dtype = DType::f32;
  std::optional<double> scale;  // of q.k, above 0; 1/sqrt(head_dim) when absent
  // New tokens see those before them, and themselves. false: all tokens of their entry.
  bool causal = true;
  // As Pattern::window. Tokens that no later query can see give their memory to new ones.
  Window window;
  // Neighbouring tokens stay on one rank in blocks of this length, and blocks go round the ranks:
  // ranks hold equal shares, to a block, whatever an entry's length.
  std::int64_t block = 128;
  Device device;    // of all tensors
  int threads = 0;  // as RingOptions::threads
};

// What a call is about. Every rank passes the same.
struct NewTokens {
  // How many of an entry's rows in the tensors count, from the first on; empty: all of them. Other
  // rows are not read. Their o is 0, and their lse -inf.
  std::span<const std::int64_t> counts;
  // Every rank passes the rows that this gives it, and gets the results of its own queries. Absent:
  // every rank passes all rows, with the same numbers, and gets all results.
  std::optional<Placement> placement;
};

// Keys and values of growing sequences, spread over the ranks of a ring, and attention of new
// queries to them. Keys and values stay on their ranks: queries go there, and partial results come
// back in fp32, so that a call sends as many bytes for a long sequence as for a short one. They are
// merged in the order of the ranks; where every rank gets all results, it gets the same bits. For
// inference: there are no gradients.
//
// append, attend and step are collective, like construction: every rank makes the same calls in the
// same order, and whatever one rank finds wrong is a ConfigError on every rank, a lack of memory an
// OutOfMemory, after which the cache is as it was before the call. One caller at a time.
class RingCache {
 public:
  RingCache(CacheOptions options, Transport& transport);
  ~RingCache();
  RingCache(RingCache&&) noexcept;
  RingCache& operator=(RingCache&&) noexcept;

  // k, v: [batch, new tokens, kv heads, head_dim], behind what the entries have. With a placement:
  // this rank's rows, which go to the ranks that keep them.
  void append(const ConstTensorView& k, const ConstTensorView& v, const NewTokens& tokens = {});
  // q: [batch, tokens, heads, head_dim], the last tokens that an entry has; o like q, lse fp32
  // [batch, tokens, heads]. Tokens may be fewer than the last append's, or more. Sinks as in
  // RingAttention::forward.
  void attend(const ConstTensorView& q, const TensorView& o, const TensorView& lse,
              const NewTokens& tokens = {}, const OptionalInputs& more = {});
  // append and attend with one agreement.
  void step(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
            const TensorView& o, const TensorView& lse, const NewTokens& tokens = {},
            const OptionalInputs& more = {});

  // Without messages, but on every rank: the next call compares the lengths.
  // Forgets an entry's tokens from `length` on: 0 for a new sequence. ConfigError where the window
  // of a next token begins before the oldest token that is left.
  void truncate(std::int64_t entry, std::int64_t length);
  // Entry `to` becomes a copy of `from`: for beams.
  void copy_entry(std::int64_t from, std::int64_t to);

  [[nodiscard]] std::span<const std::int64_t> lengths() const;  // tokens appended, by entry
  [[nodiscard]] const CacheOptions& options() const;

  // Bytes that this rank sends in a call with `new_tokens` rows in every entry, or `tokens.counts`
  // of them, as things stand: equals what the transport counts, with the agreement.
  [[nodiscard]] std::int64_t predicted_append_bytes(std::int64_t new_tokens,
                                                    const NewTokens& tokens = {}) const;
  [[nodiscard]] std::int64_t predicted_attend_bytes(std::int64_t new_tokens,
                                                    const NewTokens& tokens = {}) const;

  // Waits for what calls have enqueued, as RingAttention::synchronize.
  void synchronize();
  [[nodiscard]] Queue& queue();
  void use_queue(std::shared_ptr<Queue> queue);

  [[nodiscard]] std::int64_t cache_bytes() const;      // K and V of this rank
  [[nodiscard]] std::int64_t workspace_bytes() const;  // messages and partial results
  [[nodiscard]] std::string kernels() const;
  [[nodiscard]] std::string transfers() const;  // as RingAttention::transfers

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus
