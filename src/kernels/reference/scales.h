#pragma once

#include <optional>
#include <span>
#include <vector>

#include "annulus/reference.h"

namespace annulus::reference {

// The scale of errors for every element of the results (error.h), in the layout of the results.
struct Scales {
  std::vector<double> o, dq, dk, dv;
  std::vector<double> dsinks;  // one per head
};

[[nodiscard]] Scales error_scales(const Pattern& pattern, const Shape& shape,
                                  std::span<const double> q, std::span<const double> k,
                                  std::span<const double> v, std::span<const double> dout,
                                  MixGradient mix = MixGradient::full,
                                  std::optional<double> scale = std::nullopt,
                                  std::span<const double> sinks = {},
                                  const SoftmaxOptions& softmax = {});

}  // namespace annulus::reference
