#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/reference.h"
#include "annulus/ring_attention.h"
#include "cli/tensors.h"

namespace annulus::cli {

// Relative RMS error of one tensor, and the most that is right.
struct Deviation {
  std::string tensor;
  double found = 0.0;
  double allowed = 0.0;

  [[nodiscard]] bool ok() const { return found <= allowed; }  // NaN is not
};

// One small problem on synthetic data with the fp64 oracle's answer, for any number of rings.
class OracleCheck {
 public:
  // Everything in `options` that describes the problem counts; its placement only by its tokens.
  OracleCheck(const RingOptions& options, std::uint64_t seed);

  // Runs the problem on the ring that `options` describe: they must agree with the constructor's in
  // all but placement, schedule, and how things travel. One entry per output.
  [[nodiscard]] std::vector<Deviation> run(const RingOptions& options) const;

 private:
  [[nodiscard]] Deviation compare(const char* name, const JobTensors& tensors,
                                  const RingTensor& found, const std::vector<double>& expected) const;

  std::uint64_t seed_;
  DType dtype_;
  reference::Output output_;
  reference::Gradients gradients_;
};

}  // namespace annulus::cli
