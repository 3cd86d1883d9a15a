#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "annulus/plan.h"
#include "draw/plan_text.h"
#include "draw/svg_canvas.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"
#include "plan/pair_counts.h"

namespace annulus {
namespace {

constexpr const char* kInk = "#1f2933";
constexpr const char* kMuted = "#667380";
constexpr double kMargin = 26;
constexpr const char* kIdle = "#f3f5f7";

// Up to 8 ranks get the colours of Okabe and Ito, which colour-blind readers can distinguish. More
// ranks get evenly spaced hues of alternating lightness.
std::string rank_color(int rank, int ranks) {
  static constexpr std::array<const char*, 8> kFew = {"#0072b2", "#e69f00", "#009e73", "#d55e00",
                                                      "#56b4e9", "#cc79a7", "#b8a800", "#6b7280"};
  if (ranks <= static_cast<int>(kFew.size())) return kFew[static_cast<std::size_t>(rank)];
  const double hue = 6.0 * rank / ranks;
  const auto channel = [&](double shift) {
    const double x = std::fmod(hue + shift, 6.0);
    return std::clamp(std::abs(x - 3.0) - 1.0, 0.0, 1.0);
  };
  const Color pure{channel(0.0), channel(4.0), channel(2.0)};
  return hex(mix(mix(pure, {0.5, 0.5, 0.5}, 0.3), rank % 2 == 0 ? Color{0, 0, 0} : Color{1, 1, 1},
                 rank % 2 == 0 ? 0.2 : 0.25));
}

// Lengths are often powers of two, and 32,768 is easier to recognise than 32.8K.
std::string readable(std::int64_t n) {
  return n < 10'000'000 ? with_commas(n) : compact(static_cast<double>(n));
}

Color heat(double share) { return mix({0.91, 0.945, 0.98}, {0.03, 0.25, 0.50}, share); }

// Sizes depend on the number of ranks. Cells are labelled up to 16 ranks; beyond, only coloured.
struct Layout {
  explicit Layout(const Plan& plan) : ranks(plan.ranks()), steps(plan.steps()) {
    struct Size {
      int ranks;
      double width, height, gap, row_gap;
    };
    static constexpr std::array<Size, 6> kSizes = {{{4, 92, 56, 92, 26},
                                                    {8, 84, 42, 76, 16},
                                                    {16, 66, 30, 56, 10},
                                                    {32, 22, 16, 26, 4},
                                                    {64, 13, 10, 15, 3},
                                                    {1 << 30, 6, 5, 5, 1}}};
    const auto size =
        std::find_if(kSizes.begin(), kSizes.end(), [&](const Size& s) { return ranks <= s.ranks; });
    cell_width = size->width;
    cell_height = size->height;
    row_gap = size->row_gap;
    // All transfers of a gather share one gap.
    gap = plan.options().schedule == Schedule::gather ? std::max(140.0, size->gap) : size->gap;
    labels = ranks <= 16;
    branch_left = left + axis_width + 14;
    const auto branches = static_cast<double>(branch_runs(plan.pattern()).size());
    branch_width = std::clamp(130.0 / branches, 6.0, 24.0);
    grid_left = std::max(branch_left + branches * branch_width, left + 100.0) + 84;
    grid_height = std::max(ranks * (cell_height + row_gap) - row_gap, 200.0);
    row_gap = ranks > 1 ? (grid_height - ranks * cell_height) / (ranks - 1) : 0.0;
    totals_left = column(steps) + cell_width + 26;
    width = std::max(totals_left + 226, 960.0);
    height = top + grid_height + 118;
  }

  [[nodiscard]] double column(int step) const { return grid_left + step * (cell_width + gap); }
  [[nodiscard]] double row(int rank) const { return top + rank * (cell_height + row_gap); }

  int ranks, steps;
  double cell_width = 0, cell_height = 0, gap = 0, row_gap = 0;
  double left = 72, top = 142, header = 116, axis_width = 46;
  double branch_left = 0, branch_width = 0;
  double grid_left = 0, grid_height = 0, totals_left = 0;
  double width = 0, height = 0;
  bool labels = true;
};

// Letters of DejaVu, the widest of the fonts, are a little narrower on average, relative to their
// size.
constexpr double kLetter = 0.56;
constexpr double kBoldLetter = 0.62;

// At most `usual`, and so small that the words fit between the margins.
double fitting_size(const std::string& words, double usual, double letter, const Layout& at) {
  return std::min(usual, (at.width - 2 * kMargin) / (letter * static_cast<double>(words.size())));
}

// The token axis from top to bottom, in thin strips. A strip is divided among the ranks that own
// its tokens: contiguous shards give blocks, striped ones stripes.
void draw_tokens(Canvas& canvas, const Plan& plan, const Layout& at) {
  const Placement& placement = plan.travelling_placement();
  const std::int64_t tokens = placement.tokens();
  const auto strips = std::min(tokens, static_cast<std::int64_t>(at.grid_height / 2.0));
  std::vector<std::int64_t> cuts;
  for (std::int64_t i = 0; i <= strips; ++i) cuts.push_back(tokens * i / strips);
  for (int rank = 0; rank < plan.ranks(); ++rank) {  // blocks of visible size get exact edges
    for (const RowSet& range : placement.ranges(rank)) {
      if (range.stride != 1 || range.count < tokens / strips) continue;
      cuts.insert(cuts.end(), {range.first, range.last() + 1});
    }
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());

  using Shares =
      std::vector<std::pair<int, double>>;  // (rank, share), rounded so that equal is equal
  std::vector<Shares> owned(cuts.size() - 1);
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    for (const RowSet& range : placement.ranges(rank)) {
      auto i = static_cast<std::size_t>(std::upper_bound(cuts.begin(), cuts.end(), range.first) -
                                        cuts.begin() - 1);
      for (; i < owned.size() && cuts[i] <= range.last(); ++i) {
        const double count = static_cast<double>(clip(range, cuts[i], cuts[i + 1]).count);
        if (count == 0.0) continue;
        if (owned[i].empty() || owned[i].back().first != rank) owned[i].emplace_back(rank, 0.0);
        owned[i].back().second +=
            std::round(1e4 * count / static_cast<double>(cuts[i + 1] - cuts[i])) / 1e4;
      }
    }
  }
  const double scale = at.grid_height / static_cast<double>(tokens);
  for (std::size_t i = 0, end = 0; i < owned.size(); i = end) {
    for (end = i + 1; end < owned.size() && owned[end] == owned[i];) ++end;
    double x = at.left;
    for (const auto& [rank, share] : owned[i]) {
      canvas.rect(x, at.top + scale * static_cast<double>(cuts[i]), at.axis_width * share,
                  scale * static_cast<double>(cuts[end] - cuts[i]), rank_color(rank, plan.ranks()));
      x += at.axis_width * share;
    }
  }
  canvas.rect(at.left, at.top, at.axis_width, at.grid_height, "none",
              fmt::format("stroke=\"{}\" stroke-width=\"0.8\"", kMuted));
  canvas.text(at.left - 6, at.top + 9, 10, "0", "end", kMuted);
  canvas.text(at.left - 6, at.top + at.grid_height, 10, readable(tokens), "end", kMuted);
  canvas.text(at.left + at.axis_width / 2, at.header, 11, "tokens", "middle", kMuted);
}

// One column per branch: its segments next to the tokens they hold, paler where dilation selects
// fewer.
void draw_branches(Canvas& canvas, const Plan& plan, const Layout& at) {
  const std::int64_t tokens = plan.travelling_placement().tokens();
  const std::vector<BranchRun> runs = branch_runs(plan.pattern());
  const std::size_t branches = runs.size();
  std::string heading = branches == 1 ? "branch" : "branches";
  if (plan.pattern().by_entry()) heading += ", entry 0";
  canvas.text(at.branch_left, at.header, 11, heading, "start", kMuted);
  for (std::size_t b = 0; b < branches; ++b) {
    const Branch& branch = plan.pattern().branches[runs[b].first];
    const double x = at.branch_left + static_cast<double>(b) * at.branch_width;
    const double w = at.branch_width - 3;
    const Segments segments(documents_of(plan.pattern(), 0), branch,
                            plan.query_placement().tokens(), plan.key_placement().tokens());
    const Side side = plan.options().travel == Travel::keys ? Side::keys : Side::queries;
    const std::string fill = hex(
        mix({0.89, 0.91, 0.93}, {0.38, 0.44, 0.50},
            std::sqrt(static_cast<double>(runs[b].count) / static_cast<double>(branch.dilation))));
    const auto height = [&](std::int64_t rows) {
      return at.grid_height * static_cast<double>(rows) / static_cast<double>(tokens);
    };
    // Tokens outside all documents are left blank.
    const std::span<const Document> documents = documents_of(plan.pattern(), 0);
    if (documents.empty()) canvas.rect(x, at.top, w, at.grid_height, fill);
    for (const Document& document : documents) {
      const bool keys = side == Side::keys;
      const std::int64_t begin = keys ? document.key_begin : document.query_begin;
      const std::int64_t end = keys ? document.key_end : document.query_end;
      if (begin < end) canvas.rect(x, at.top + height(begin), w, height(end - begin), fill);
    }
    if (at.grid_height >= 3.0 * static_cast<double>(segments.count())) {
      for (std::int64_t s = 0; s < segments.count(); ++s) {
        const Segments::Part part = segments.part(side, s);
        const double y = at.top + height(part.begin);
        const double width = std::min(1.6, height(part.end - part.begin) / 4.0);
        if (part.begin > 0) canvas.line(x, y, x + w, y, "#ffffff", width);
      }
    }
    std::string label =
        branch.segment_length >= longer_side(plan)
            ? fmt::format("all, r {}", branch.dilation)
            : fmt::format("w {}, r {}", readable(branch.segment_length), branch.dilation);
    if (runs[b].count > 1) label += fmt::format(" x{}", runs[b].count);
    const double label_x = x + w / 2 + 3.5;
    const double label_y = at.top + at.grid_height + 8;
    canvas.text(label_x, label_y, 10, label, "end", kMuted,
                fmt::format("transform=\"rotate(-90 {:.2f} {:.2f})\"", label_x, label_y));
  }
}

struct Work {
  std::vector<std::vector<double>> pairs;  // [rank][step]
  double total = 0.0;
  double largest = 0.0;
};

void draw_cells(Canvas& canvas, const Plan& plan, const Layout& at, const Work& work) {
  const int every_step = plan.steps() <= 16 ? 1 : 8;
  for (int step = 0; step <= plan.steps(); step += every_step) {
    const std::string name = !at.labels  ? std::to_string(step)
                             : step == 0 ? "local"
                                         : fmt::format("step {}", step);
    canvas.text(at.column(step) + at.cell_width / 2, at.header, 11, name, "middle", kMuted);
  }
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const double y = at.row(rank);
    const double middle = y + at.cell_height / 2;
    if (at.labels) {
      canvas.rect(at.grid_left - 14, y, 5, at.cell_height, rank_color(rank, plan.ranks()));
      canvas.text(at.grid_left - 20, middle + 4, 11, fmt::format("rank {}", rank), "end");
    } else {
      canvas.rect(at.grid_left - 9, y, 5, at.cell_height, rank_color(rank, plan.ranks()));
      if (rank % 8 == 0) {
        canvas.text(at.grid_left - 14, middle + 4, 10, std::to_string(rank), "end", kMuted);
      }
    }
    for (int step = 0; step <= plan.steps(); ++step) {
      const double pairs =
          work.pairs[static_cast<std::size_t>(rank)][static_cast<std::size_t>(step)];
      const double strength = work.largest > 0.0 ? pairs / work.largest : 0.0;
      const double x = at.column(step);
      canvas.rect(x, y, at.cell_width, at.cell_height, pairs > 0.0 ? hex(heat(strength)) : kIdle,
                  at.labels ? "rx=\"3\"" : "");
      if (!at.labels) continue;
      const std::string ink = strength > 0.45 ? "#ffffff" : kInk;
      const double center = x + at.cell_width / 2;
      if (pairs == 0.0) {
        canvas.text(center, middle + 4, 10, "idle", "middle", "#9aa5b1");
        continue;
      }
      const bool two_lines = at.cell_height >= 40;
      canvas.text(center, two_lines ? middle - 1 : middle + 4, two_lines ? 13 : 11,
                  percent(pairs / work.total), "middle", ink);
      if (two_lines) {
        canvas.text(center, middle + 14, 10, compact(pairs) + " pairs", "middle",
                    strength > 0.45 ? "#dbe7f3" : kMuted);
      }
    }
  }
}

struct Arrow {
  int sender = 0;
  int receiver = 0;
  std::int64_t rows = 0;
};

// The rows that each pair of ranks exchanges in a step, summed over all parcels.
std::vector<std::vector<Arrow>> arrows_by_step(const std::vector<Plan>& views) {
  const int steps = views.front().steps();
  std::vector<std::vector<Arrow>> arrows(static_cast<std::size_t>(steps) + 1);
  for (int step = 1; step <= steps; ++step) {
    for (const Plan& view : views) {
      std::map<int, std::vector<Hop>> by_peer;
      for (const Hop& hop : view.outgoing(step)) by_peer[hop.peer].push_back(hop);
      for (const auto& [peer, hops] : by_peer) {
        arrows[static_cast<std::size_t>(step)].push_back({view.rank(), peer, view.unit_rows(hops)});
      }
    }
  }
  return arrows;
}

// Arrows between the columns of two steps, from sender to receiver. Their widths are proportional
// to rows. Arrows at the same cell are spread in the order of their other ends.
void draw_arrows(Canvas& canvas, const std::vector<Plan>& views, const Layout& at,
                 const std::vector<std::vector<Arrow>>& by_step, std::int64_t most_rows) {
  const double widest = std::clamp(at.cell_height / 10.0, 0.6, 5.0);
  const double head = at.labels ? 7.0 : at.ranks <= 32 ? 4.0 : 0.0;
  for (int step = 1; step <= at.steps; ++step) {
    const std::vector<Arrow>& arrows = by_step[static_cast<std::size_t>(step)];
    std::vector<int> sent(static_cast<std::size_t>(at.ranks), 0);
    std::vector<int> received(sent);
    for (const Arrow& arrow : arrows) {
      ++sent[static_cast<std::size_t>(arrow.sender)];
      ++received[static_cast<std::size_t>(arrow.receiver)];
    }
    std::vector<int> nth_sent(sent.size(), 0);
    std::vector<int> nth_received(sent.size(), 0);
    const auto spread = [&](int rank, const std::vector<int>& count, std::vector<int>& nth) {
      const auto r = static_cast<std::size_t>(rank);
      return at.row(rank) + at.cell_height * ++nth[r] / (count[r] + 1.0);
    };
    // Sorted by sender, then receiver, so that both fans are in order.
    for (const Arrow& arrow : arrows) {
      const double share = static_cast<double>(arrow.rows) / static_cast<double>(most_rows);
      const double from = spread(arrow.sender, sent, nth_sent);
      const double to = spread(arrow.receiver, received, nth_received);
      const double x1 = at.column(step - 1) + at.cell_width + (at.labels ? 3 : 1);
      canvas.arrow(x1, from, at.column(step) - (at.labels ? 3 : 1), to,
                   rank_color(arrow.sender, at.ranks), std::max(0.12 * widest, share * widest),
                   head);
    }
    if (at.ranks > 8) continue;
    for (int rank = 0; rank < at.ranks; ++rank) {  // the rows of the cell, above its corner
      const Plan& view = views[static_cast<std::size_t>(rank)];
      const std::int64_t rows = view.unit_rows(view.incoming(step));
      if (rows == 0) continue;
      canvas.text(at.column(step) + at.cell_width / 2, at.row(rank) - 4, 9.5,
                  readable(rows) + " rows in", "middle", kMuted);
    }
  }
}

void draw_totals(Canvas& canvas, const PlanTotals& totals, const Layout& at, const Work& work) {
  const double bar_left = at.totals_left;
  const double bar_width = 64;
  const double rows_right = bar_left + bar_width + 140;
  double most = 0.0;
  for (const std::vector<double>& steps : work.pairs) {
    most = std::max(most, std::accumulate(steps.begin(), steps.end(), 0.0));
  }
  canvas.text(bar_left, at.header, 11, "work", "start", kMuted);
  canvas.text(rows_right, at.header, 11, "rows received", "end", kMuted);
  for (int rank = 0; rank < at.ranks; ++rank) {
    const std::vector<double>& steps = work.pairs[static_cast<std::size_t>(rank)];
    const double pairs = std::accumulate(steps.begin(), steps.end(), 0.0);
    const double middle = at.row(rank) + at.cell_height / 2;
    const double thick = std::min(at.cell_height, 16.0);
    canvas.rect(bar_left, middle - thick / 2, bar_width, thick, kIdle);
    if (most > 0.0) {
      canvas.rect(bar_left, middle - thick / 2, bar_width * pairs / most, thick,
                  rank_color(rank, at.ranks));
    }
    if (!at.labels && rank % 8 != 0) continue;
    canvas.text(bar_left + bar_width + 56, middle + 4, 10.5,
                percent(work.total > 0.0 ? pairs / work.total : 0.0), "end");
    canvas.text(rows_right, middle + 4, 10.5,
                with_commas(totals.ranks[static_cast<std::size_t>(rank)].received), "end");
  }
}

void draw_legend(Canvas& canvas, const Plan& plan, const Layout& at, const Work& work,
                 std::int64_t most_rows) {
  const double y = at.top + at.grid_height + 40;
  double x = at.grid_left;
  canvas.text(x, y - 8, 10.5, "pairs computed by a rank in a step", "start", kMuted);
  constexpr int kShades = 24;
  for (int i = 0; i < kShades; ++i) {
    canvas.rect(x + 7.0 * i, y, 7.3, 10, hex(heat((i + 0.5) / kShades)));
  }
  canvas.text(x, y + 23, 10, "0", "start", kMuted);
  canvas.text(x + 7.0 * kShades, y + 23, 10,
              percent(work.total > 0.0 ? work.largest / work.total : 0.0), "end", kMuted);
  x += 7.0 * kShades + 56;
  canvas.text(x, y - 8, 10.5, "rows sent from rank to rank in a step", "start", kMuted);
  if (most_rows == 0) {
    canvas.text(x, y + 9, 10.5, "none: every segment is local", "start", kMuted);
    return;
  }
  const double widest = std::clamp(at.cell_height / 10.0, 0.6, 5.0);
  canvas.arrow(x, y + 5, x + 46, y + 5, kMuted, widest, 7);
  canvas.text(x + 54, y + 9, 10.5,
              fmt::format("{} (rows x {})", with_commas(most_rows), unit_label(plan)), "start",
              kMuted);
}

}  // namespace

std::string plan_svg(const Plan& plan) {
  const Layout at(plan);
  const PlanTotals totals = plan_totals(plan);
  Work work;
  const std::vector<Plan> views = Plan::of_all_ranks(plan.options());
  for (const Plan& view : views) {
    work.pairs.push_back(pairs_by_step(view));
    for (const double pairs : work.pairs.back()) {
      work.total += pairs;
      work.largest = std::max(work.largest, pairs);
    }
  }
  const std::vector<std::vector<Arrow>> arrows = arrows_by_step(views);
  std::int64_t most_rows = 0;
  for (const std::vector<Arrow>& step : arrows) {
    for (const Arrow& arrow : step) most_rows = std::max(most_rows, arrow.rows);
  }

  Canvas canvas;
  const std::string title = plan_title(plan);
  canvas.text(kMargin, 40, fitting_size(title, 19.0, kBoldLetter, at), title, "start", kInk,
              "font-weight=\"600\"");
  const std::string subtitle = plan_subtitle(plan);
  canvas.text(kMargin, 62, fitting_size(subtitle, 13.0, kLetter, at), subtitle, "start", kMuted);
  const std::string moved = fmt::format(
      "{} pairs, work balance {}; moved in {} step{}: {} rows x {}, by an all-gather {}",
      compact(totals.pairs), percent(totals.balance), plan.steps(), plan.steps() == 1 ? "" : "s",
      with_commas(totals.moved), unit_label(plan), all_gather_label(totals));
  canvas.text(kMargin, 82, fitting_size(moved, 13.0, kLetter, at), moved, "start", kMuted);
  draw_tokens(canvas, plan, at);
  draw_branches(canvas, plan, at);
  draw_arrows(canvas, views, at, arrows, most_rows);
  draw_cells(canvas, plan, at, work);
  draw_totals(canvas, totals, at, work);
  draw_legend(canvas, plan, at, work, most_rows);
  return canvas.finish(at.width, at.height);
}

}  // namespace annulus
