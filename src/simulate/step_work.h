#pragma once

#include <cstddef>
#include <vector>

#include "annulus/plan.h"

namespace annulus::simulation {

// Computed pairs, by rank and step: the allowed pairs less those that a finer branch computes for a
// coarser one (pattern/shared_pairs.h).
class StepWork {
 public:
  // Tiles are not counted if all ranks together have more row sets than this, because counting
  // would take more than about 10 s. Long striped sequences have as many row sets as segments.
  static constexpr double kMostRowSets = 1.2e7;

  // `plan` is the view of a rank with a typical number of parcels. `share`: branches share pairs,
  // which they do unless mixing is detached.
  StepWork(const Plan& plan, bool share, double most_row_sets = kMostRowSets);

  [[nodiscard]] double pairs(int rank, int step) const { return pairs_[index(rank, step)]; }
  [[nodiscard]] double pairs(int rank) const;
  [[nodiscard]] double total() const;
  // If false, only the sums over steps are exact (Forecast::counted).
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
