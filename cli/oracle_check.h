#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "cli/tensors.h"
#include "cli/world.h"

namespace annulus::cli {

// Root mean square of one tensor's error over that of its scale (kernels/reference/error.h), and
// its limit.
struct Deviation {
  std::string tensor;
  double found = 0.0;
  double allowed = 0.0;

  [[nodiscard]] bool ok() const { return found <= allowed; }  // NaN fails
};

// One small problem on synthetic data with the fp64 oracle's answer, for any number of rings.
//
// fp32 results must be within 1e-6, on a GPU within 2e-6. 16-bit results may be off by twice the
// error of an exact computation that rounds its results, and o between forward and backward. (Its
// inputs are rounded already, so they add no error.)
//
// This checks whole tensors of a small problem. sample_check.h checks a few rows of a problem of
// any size with any input. Both ask kernels/reference for the right results and the scale of
// errors.
class OracleCheck {
 public:
  struct Outcome {
    std::vector<Deviation> deviations;  // one per output
    std::string kernels;                // that ran
  };

  // `options` describe the problem; only the number of tokens of the placement matters. In an MPI
  // job (world), only rank 0 has the right results and returns deviations.
  OracleCheck(const RingOptions& options, std::uint64_t seed, World* world = nullptr);

  // Runs the problem on the ring that `options` describe. Only placement, schedule and travel may
  // differ from the constructor's options.
  [[nodiscard]] Outcome run(const RingOptions& options) const;

 private:
  struct Expected {
    std::vector<double> values;  // in the order of the sequence
    double unit = 1.0;           // the scales of errors
    double allowed = 0.0;        // relative to the scale
  };
  [[nodiscard]] static Deviation compare(const char* name, const JobTensors& tensors,
                                         const RingTensor& found, const Expected& expected);

  std::uint64_t seed_;
  World* world_;
  Expected o_, lse_, dq_, dk_, dv_;
};

}  // namespace annulus::cli
