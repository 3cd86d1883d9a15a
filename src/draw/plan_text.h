#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/plan.h"

namespace annulus {

// Texts that the tables and the picture of a plan share.

// A table of what the plan's rank computes, sends and receives.
[[nodiscard]] std::string plan_rank_table(const Plan& plan);

struct PlanTotals {
  std::vector<RankTotals> ranks;
  double pairs = 0.0;           // of all ranks
  double balance = 1.0;         // mean over largest of the work
  std::int64_t moved = 0;       // rows x units
  std::int64_t all_gather = 0;  // rows x units if every rank got every row
};
[[nodiscard]] PlanTotals plan_totals(const Plan& plan);

[[nodiscard]] std::int64_t longer_side(const Plan& plan);  // tokens of the longer side
[[nodiscard]] std::string mask_text(const Pattern& pattern);
[[nodiscard]] std::string plan_title(const Plan& plan);
[[nodiscard]] std::string plan_subtitle(const Plan& plan);
// Neighbouring branches with one segment length and dilation, which differ in their offsets only.
struct BranchRun {
  std::size_t first = 0;
  std::size_t count = 0;
};
[[nodiscard]] std::vector<BranchRun> branch_runs(const Pattern& pattern);
[[nodiscard]] std::string branch_label(const Plan& plan, const BranchRun& run);
// " 2048/1 4096/2 all/4 x4": segment length and dilation, and how many branches have them.
[[nodiscard]] std::string branches_text(const Pattern& pattern);
[[nodiscard]] std::string all_gather_label(const PlanTotals& totals);
[[nodiscard]] std::string unit_label(const Plan& plan);  // what a row is counted per

[[nodiscard]] std::string with_commas(std::int64_t n);  // 1,048,576
[[nodiscard]] std::string compact(double n);            // 980, 65.5K, 1.05M, 2.31G, ...
[[nodiscard]] std::string percent(double share);        // 12.5 %

}  // namespace annulus
