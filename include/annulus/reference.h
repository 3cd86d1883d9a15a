#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "annulus/pattern.h"

namespace annulus::reference {

// The oracle of all tests: the definitions of docs/concepts.md in fp64, as plain loops that can be
// checked by reading. Tensors are dense [batch, tokens, heads, head_dim]; lse is [batch, tokens,
// heads]; sinks have one number per query head, or are empty. Slow on purpose.
struct Shape {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;  // of queries, and of keys unless key_tokens is set
  int q_heads = 1;
  int kv_heads = 1;
  int head_dim = 0;
  std::optional<std::int64_t> key_tokens = std::nullopt;

  [[nodiscard]] std::int64_t keys() const { return key_tokens.value_or(tokens); }
};

struct Output {
  std::vector<double> o;
  std::vector<double> lse;  // -inf if a row attends to nothing and its head has no sink
};

struct Gradients {
  std::vector<double> dq, dk, dv, dsinks;
};

// What stands around the softmax, as RingOptions and OptionalInputs have it.
struct SoftmaxOptions {
  double softcap = 0;    // c > 0: scores are c * tanh(scale * q.k / c)
  double dropout_p = 0;  // each pair keeps its probability with probability 1 - p, divided by that
  std::uint64_t dropout_seed = 0;
};

// `scale` multiplies q.k before the softmax; 1/sqrt(head_dim) when absent.
[[nodiscard]] Output forward(const Pattern& pattern, const Shape& shape, std::span<const double> q,
                             std::span<const double> k, std::span<const double> v,
                             std::optional<double> scale = std::nullopt,
                             std::span<const double> sinks = {},
                             const SoftmaxOptions& softmax = {});

[[nodiscard]] Gradients backward(const Pattern& pattern, const Shape& shape,
                                 std::span<const double> q, std::span<const double> k,
                                 std::span<const double> v, std::span<const double> dout,
                                 MixGradient mix = MixGradient::full,
                                 std::optional<double> scale = std::nullopt,
                                 std::span<const double> sinks = {},
                                 const SoftmaxOptions& softmax = {});

}  // namespace annulus::reference
