#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "annulus/plan.h"
#include "draw/plan_text.h"

namespace annulus {

namespace {

std::string heading(const Plan& plan) {
  std::string text = plan_title(plan) + "\n" + plan_subtitle(plan) + "\n";
  for (const BranchRun& run : branch_runs(plan.pattern())) {
    text += run.count == 1
                ? fmt::format("  branch {}: ", run.first)
                : fmt::format("  branches {} to {}: ", run.first, run.first + run.count - 1);
    text += branch_label(plan, run) + "\n";
  }
  return text;
}

std::string line(const char* what, const std::string& value) {
  return fmt::format("{:<18} {}\n", what, value);
}

// Totals over all ranks.
std::string totals_text(const Plan& plan, const PlanTotals& totals) {
  const std::string unit = unit_label(plan);
  return line("allowed pairs", compact(totals.pairs)) +
         line("work balance", percent(totals.balance) + " (mean over largest share)") +
         line("moved",
              fmt::format("{} rows x {}, {} per rank on average", with_commas(totals.moved), unit,
                          with_commas(totals.moved / plan.ranks()))) +
         line("by an all-gather", all_gather_label(totals)) +
         line("steps", fmt::format("{} ({})", plan.steps(), name_of(plan.options().schedule)));
}

std::string share_of(const PlanTotals& totals, const RankTotals& rank) {
  return percent(totals.pairs > 0.0 ? rank.work / totals.pairs : 0.0);
}

// "rank 17, 18, 19", or how many where they are many.
std::string peers_text(const std::set<int>& peers) {
  if (peers.size() > 8) return fmt::format("{} ranks", peers.size());
  return peers.empty() ? "nobody" : fmt::format("rank {}", fmt::join(peers, ", "));
}

}  // namespace

std::string plan_table(const Plan& plan) {
  const PlanTotals totals = plan_totals(plan);
  std::string text = heading(plan);
  text += fmt::format("\n{:>5} {:>13} {:>10} {:>8} {:>14} {:>14} {:>14}\n", "rank", "tokens",
                      "pairs", "share", "received", "sent", "largest step");
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const RankTotals& mine = totals.ranks[static_cast<std::size_t>(rank)];
    text += fmt::format("{:>5} {:>13} {:>10} {:>8} {:>14} {:>14} {:>14}\n", rank,
                        with_commas(plan.query_placement().local_tokens(rank)), compact(mine.work),
                        share_of(totals, mine), with_commas(mine.received), with_commas(mine.sent),
                        with_commas(mine.largest_step));
  }
  text += fmt::format("      received, sent, largest step: rows x {}\n\n", unit_label(plan));
  return text + totals_text(plan, totals);
}

std::string plan_rank_table(const Plan& plan) {
  const PlanTotals totals = plan_totals(plan);
  const RankTotals& mine = totals.ranks[static_cast<std::size_t>(plan.rank())];
  std::set<int> from;
  std::set<int> to;
  for (int step = 1; step <= plan.steps(); ++step) {
    for (const Hop& hop : plan.incoming(step)) from.insert(hop.peer);
    for (const Hop& hop : plan.outgoing(step)) to.insert(hop.peer);
  }
  const std::string unit = unit_label(plan);
  return heading(plan) + "\n" + line("rank", fmt::format("{} of {}", plan.rank(), plan.ranks())) +
         line("tokens", with_commas(plan.query_placement().local_tokens(plan.rank()))) +
         line("work",
              fmt::format("{} pairs, {} of all", compact(mine.work), share_of(totals, mine))) +
         line("receives",
              fmt::format("{} rows x {} from {}, at most {} in a step", with_commas(mine.received),
                          unit, peers_text(from), with_commas(mine.largest_step))) +
         line("sends",
              fmt::format("{} rows x {} to {}", with_commas(mine.sent), unit, peers_text(to))) +
         line("parcels", with_commas(static_cast<std::int64_t>(plan.parcels().size()))) +
         "\nAll ranks together\n" + totals_text(plan, totals);
}

}  // namespace annulus
