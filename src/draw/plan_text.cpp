#include "draw/plan_text.h"

#include <fmt/format.h>

#include <algorithm>

namespace annulus {

PlanTotals plan_totals(const Plan& plan) {
  PlanTotals totals;
  totals.ranks = plan.rank_totals();
  double largest = 0.0;
  for (const RankTotals& rank : totals.ranks) {
    totals.pairs += rank.work;
    largest = std::max(largest, rank.work);
  }
  if (largest > 0.0) totals.balance = totals.pairs / plan.ranks() / largest;
  totals.moved = plan.total_unit_rows();
  const int units =
      plan.options().travel == Travel::keys ? plan.options().kv_heads : plan.pattern().heads;
  totals.all_gather = plan.travelling_placement().tokens() * (plan.ranks() - 1) * units *
                      plan.pattern().counted_entries();
  return totals;
}

// ", causal, window (4095, 0), 3 documents".
std::string mask_text(const Pattern& pattern) {
  std::string text = pattern.causal ? ", causal" : "";
  if (pattern.window != Window{})
    text += fmt::format(", window ({}, {})", pattern.window.before, pattern.window.after);
  if (!pattern.documents.empty())
    text += fmt::format(", {} documents", with_commas(std::ssize(pattern.documents)));
  if (pattern.by_entry())
    text += fmt::format(" in {} batch entries", with_commas(pattern.counted_entries()));
  return text;
}

std::string plan_title(const Plan& plan) {
  const Pattern& pattern = plan.pattern();
  std::string tokens = with_commas(plan.query_placement().tokens()) + " tokens";
  if (!plan.self_attention()) {
    tokens += fmt::format(" against {}", with_commas(plan.key_placement().tokens()));
  }
  return fmt::format("{}{}: {}, {} query head{}, {} K/V head{}",
                     pattern.name.empty() ? "pattern" : pattern.name, mask_text(pattern), tokens,
                     pattern.heads, pattern.heads == 1 ? "" : "s", plan.options().kv_heads,
                     plan.options().kv_heads == 1 ? "" : "s");
}

std::string plan_subtitle(const Plan& plan) {
  std::string placement = plan.query_placement().name() + " placement";
  if (!plan.self_attention()) placement += " against " + plan.key_placement().name();
  return fmt::format("{} on {} rank{}, {} schedule, {} travel", placement, plan.ranks(),
                     plan.ranks() == 1 ? "" : "s", name_of(plan.options().schedule),
                     name_of(plan.options().travel));
}

std::int64_t longer_side(const Plan& plan) {
  return std::max(plan.query_placement().tokens(), plan.key_placement().tokens());
}

std::vector<BranchRun> branch_runs(const Pattern& pattern) {
  std::vector<BranchRun> runs;
  for (std::size_t b = 0; b < pattern.branches.size(); ++b) {
    const Branch& branch = pattern.branches[b];
    const Branch& first = pattern.branches[runs.empty() ? b : runs.back().first];
    if (runs.empty() || branch.segment_length != first.segment_length ||
        branch.dilation != first.dilation) {
      runs.push_back({b, 0});
    }
    ++runs.back().count;
  }
  return runs;
}

std::string branch_label(const Plan& plan, const BranchRun& run) {
  const Branch& b = plan.pattern().branches[run.first];
  std::string text = b.segment_length >= longer_side(plan)
                         ? "whole sequence"
                         : fmt::format("segments of {}", with_commas(b.segment_length));
  text += fmt::format(", dilation {}", b.dilation);
  return run.count == 1 ? text : text + fmt::format(", {} offsets", run.count);
}

std::string branches_text(const Pattern& pattern) {
  std::string text;
  for (const BranchRun& run : branch_runs(pattern)) {
    const Branch& branch = pattern.branches[run.first];
    text += branch.segment_length == kWholeSequence
                ? fmt::format(" all/{}", branch.dilation)
                : fmt::format(" {}/{}", branch.segment_length, branch.dilation);
    if (run.count > 1) text += fmt::format(" x{}", run.count);
  }
  return text;
}

std::string all_gather_label(const PlanTotals& totals) {
  std::string rows = with_commas(totals.all_gather);
  if (totals.moved == 0) return rows;
  if (totals.moved == totals.all_gather) return rows + " (as much)";
  const double ratio = static_cast<double>(totals.all_gather) / static_cast<double>(totals.moved);
  const int digits = ratio < 10.0 ? 2 : ratio < 100.0 ? 1 : 0;
  return fmt::format("{} ({:.{}f} times as much)", rows, ratio, digits);
}

std::string unit_label(const Plan& plan) {
  return plan.options().travel == Travel::keys ? "K/V heads" : "query heads";
}

std::string with_commas(std::int64_t n) {
  const std::string digits = std::to_string(n);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const bool group_starts = i > (n < 0 ? 1U : 0U) && (digits.size() - i) % 3 == 0;
    if (group_starts) text += ',';
    text += digits[i];
  }
  return text;
}

std::string compact(double n) {
  if (n < 1000.0) return fmt::format("{:.0f}", n);
  const char* suffix = "KMGTPE";
  for (n /= 1000.0; n >= 999.5 && suffix[1] != '\0'; n /= 1000.0) ++suffix;
  return fmt::format("{:.{}f}{}", n, n < 9.995 ? 2 : n < 99.95 ? 1 : 0, *suffix);
}

std::string percent(double share) {
  const double p = 100.0 * share;
  return fmt::format("{:.{}f} %", p, p < 9.995 && p > 0.0 ? 2 : p < 99.95 ? 1 : 0);
}

}  // namespace annulus
