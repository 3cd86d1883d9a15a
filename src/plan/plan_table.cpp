#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "annulus/plan.h"
#include "plan/plan_text.h"

namespace annulus {

std::string plan_table(const Plan& plan) {
  const PlanTotals totals = plan_totals(plan);
  std::string text = plan_title(plan) + "\n" + plan_subtitle(plan) + "\n";
  for (std::size_t b = 0; b < plan.pattern().branches.size(); ++b) {
    text += fmt::format("  branch {}: {}\n", b, branch_label(plan, b));
  }

  text += fmt::format("\n{:>5} {:>13} {:>10} {:>8} {:>14} {:>14} {:>14}\n", "rank", "tokens",
                      "pairs", "share", "received", "sent", "largest step");
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    std::int64_t sent = 0;
    for (int step = 1; step <= plan.steps(); ++step) {
      sent += plan.unit_rows(plan.outgoing(rank, step));
    }
    const double pairs = totals.work[static_cast<std::size_t>(rank)];
    text += fmt::format("{:>5} {:>13} {:>10} {:>8} {:>14} {:>14} {:>14}\n", rank,
                        with_commas(plan.query_placement().local_tokens(rank)), compact(pairs),
                        percent(totals.pairs > 0.0 ? pairs / totals.pairs : 0.0),
                        with_commas(plan.received_unit_rows(rank)), with_commas(sent),
                        with_commas(plan.largest_step_unit_rows(rank)));
  }
  const std::string unit = unit_label(plan);
  text += fmt::format("      received, sent, largest step: rows x {}\n\n", unit);

  const auto line = [&](const char* what, const std::string& value) {
    text += fmt::format("{:<18} {}\n", what, value);
  };
  line("allowed pairs", compact(totals.pairs));
  line("work balance", fmt::format("{} (mean over largest share)", percent(totals.balance)));
  line("moved", fmt::format("{} rows x {}, {} per rank on average", with_commas(totals.moved), unit,
                            with_commas(totals.moved / plan.ranks())));
  line("by an all-gather", all_gather_label(totals));
  line("steps", fmt::format("{} ({})", plan.steps(), name_of(plan.options().schedule)));
  return text;
}

}  // namespace annulus
