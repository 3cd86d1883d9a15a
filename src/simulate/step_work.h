#pragma once

#include <cstddef>
#include <vector>

#include "annulus/plan.h"

namespace annulus::simulation {

// Pairs that are computed, by rank and step: allowed ones less those that a finer branch computes
// for a coarser one (pattern/shared_pairs.h).
class StepWork {
 public:
  // Row sets of all ranks together beyond which their tiles are not walked: some 10 s. Long striped
  // sequences have as many row sets as segments.
  static constexpr double kMostRowSets = 1.2e7;

  // The view of a rank that has about as many parcels as any other. `share`: branches share pairs,
  // as they do unless mixing is detached.
  StepWork(const Plan& plan, bool share, double most_row_sets = kMostRowSets);

  [[nodiscard]] double pairs(int rank, int step) const { return pairs_[index(rank, step)]; }
  [[nodiscard]] double pairs(int rank) const;
  [[nodiscard]] double total() const;
  // False: only sums over steps are exact (Forecast::counted).
  [[nodiscard]] bool counted() const { return counted_; }

 private:
  [[nodiscard]] std::size_t index(int rank, int step) const {
    return static_cast<std::size_t>(rank) * (static_cast<std::size_t>(steps_) + 1) +
           static_cast<std::size_t>(step);
  }
  void count(const Plan& plan, bool share);
  void estimate(const Plan& plan);

  int steps_ = 0;
  bool counted_ = true;
  std::vector<double> pairs_;  // [rank][step]
};

}  // namespace annulus::simulation
