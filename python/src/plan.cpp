#include "annulus/plan.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <new>
#include <optional>
#include <string>

#include "annulus/error.h"
#include "bindings.h"
#include "ring/plans.h"
#include "values.h"

namespace annulus::python {
namespace {

void check_rank(const Plan& plan, const char* where, int rank) {
  if (rank >= 0 && rank < plan.ranks()) return;
  throw ConfigError(
      fmt::format("Plan.{}: rank is {}, expected 0..{}", where, rank, plan.ranks() - 1));
}

// Rows of any rank, from any view: an executor's plan is that of its rank.
RankTotals totals_of(const Plan& plan, const char* where, int rank) {
  check_rank(plan, where, rank);
  return plan.rank_totals()[static_cast<std::size_t>(rank)];
}

std::int64_t sent_rows(const Plan& plan, int rank) {
  return totals_of(plan, "sent_rows", rank).sent;
}

std::int64_t received_rows(const Plan& plan, int rank) {
  return totals_of(plan, "received_rows", rank).received;
}

// Of exact gradients: statistics of kept branches are more.
std::int64_t row_bytes(const Plan& plan, int head_dim, nb::handle dtype, std::int64_t batch) {
  if (head_dim < 1 || batch < 1) {
    throw ConfigError(
        fmt::format("Plan: head_dim is {} and batch {}, expected at least 1", head_dim, batch));
  }
  RingOptions options{.pattern = plan.pattern(), .placement = plan.query_placement()};
  options.head_dim = head_dim;
  options.dtype = parse_dtype(dtype);
  options.batch = batch;
  return ring::row_bytes(options, plan.options().travel, false).there;
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan",
                   R"(What moves where in which step of a ring, and who computes what.

A pure function of its arguments, the same on every rank: nothing is computed or allocated.
``print(plan)`` shows a table, notebooks show a picture.

Args:
    pattern: which pairs are allowed.
    placement: which rank holds which tokens.
    kv_heads: key/value heads, a divisor of the pattern's heads; None: as many.
    schedule: 'ring' (rows hop from rank to rank) or 'gather' (straight from owner to consumer).
    travel: 'keys' (forward) or 'queries' (backward).)")
      .def(
          "__init__",
          [](Plan* self, const Pattern& pattern, const Placement& placement,
             std::optional<int> kv_heads, const std::string& schedule, const std::string& travel) {
            pattern.validate();
            const int heads = kv_heads.value_or(pattern.heads);
            if (heads < 1 || pattern.heads % heads != 0) {
              throw ConfigError(
                  fmt::format("Plan: kv_heads is {}, expected a divisor of the {} query heads",
                              heads, pattern.heads));
            }
            if (parse_schedule(schedule) == Schedule::automatic) {
              throw ConfigError(
                  "Plan: schedule is 'auto', expected 'ring' or 'gather': only RingAttention, "
                  "which "
                  "knows dtype and head_dim, can choose");
            }
            new (self) Plan({pattern, placement, placement, heads, parse_schedule(schedule),
                             parse_travel(travel)},
                            0);
          },
          nb::arg("pattern"), nb::arg("placement"), nb::kw_only(), nb::arg("kv_heads") = nb::none(),
          nb::arg("schedule") = "ring", nb::arg("travel") = "keys",
          nb::sig("def __init__(self, pattern: Pattern, placement: Placement, *, kv_heads: int | "
                  "None = None, schedule: typing.Literal['ring', 'gather'] = 'ring', travel: "
                  "typing.Literal['keys', 'queries'] = 'keys') -> None"))
      .def_prop_ro(
          "pattern", [](const Plan& p) { return p.pattern(); }, "Which pairs are allowed.")
      .def_prop_ro(
          "placement", [](const Plan& p) { return p.query_placement(); },
          "Which rank holds which tokens.")
      .def_prop_ro(
          "schedule", [](const Plan& p) { return std::string(name_of(p.options().schedule)); },
          "'ring' or 'gather'.")
      .def_prop_ro(
          "travel", [](const Plan& p) { return std::string(name_of(p.options().travel)); },
          "'keys' or 'queries'.")
      .def_prop_ro(
          "kv_heads", [](const Plan& p) { return p.options().kv_heads; }, "Key/value heads.")
      .def_prop_ro("ranks", &Plan::ranks, "Ranks of the ring.")
      .def_prop_ro("steps", &Plan::steps,
                   "Communication steps; there is one more computing step, the first, local one.")
      .def_prop_ro("digest", &Plan::digest,
                   "A stable 64-bit digest of everything that the ranks must agree on.")
      .def("sent_rows", &sent_rows, nb::arg("rank"),
           "Rows x heads that a rank sends, over all steps. A head is a key/value head when keys "
           "travel, a query head when queries do.")
      .def("received_rows", &received_rows, nb::arg("rank"),
           "Rows x heads that a rank receives, over all steps.")
      .def(
          "pairs",
          [](const Plan& plan, int rank) { return totals_of(plan, "pairs", rank).query_pairs; },
          nb::arg("rank"), "Allowed pairs (branch, head, query, key) whose query a rank owns.")
      .def(
          "sent_bytes",
          [](const Plan& plan, int rank, int head_dim, nb::handle dtype, std::int64_t batch) {
            return sent_rows(plan, rank) * row_bytes(plan, head_dim, dtype, batch);
          },
          nb::arg("rank"), nb::kw_only(), nb::arg("head_dim"), nb::arg("dtype") = "float32",
          nb::arg("batch") = 1,
          "Bytes of travelling rows that a rank sends, over all steps; gradients that come back "
          "and the ranks' agreement on the call (predicted_forward_bytes has it) not included.")
      .def(
          "received_bytes",
          [](const Plan& plan, int rank, int head_dim, nb::handle dtype, std::int64_t batch) {
            return received_rows(plan, rank) * row_bytes(plan, head_dim, dtype, batch);
          },
          nb::arg("rank"), nb::kw_only(), nb::arg("head_dim"), nb::arg("dtype") = "float32",
          nb::arg("batch") = 1,
          "Bytes of travelling rows that a rank receives, over all steps; see :meth:`sent_bytes`.")
      .def("table", &plan_table, "A table of what each rank computes, receives and sends.")
      .def("svg", &plan_svg,
           "A picture of what each rank computes and sends in each step, as SVG text.")
      .def("_repr_svg_", &plan_svg, "The picture, for notebooks.")
      .def("__str__", &plan_table)
      .def("__repr__", [](const Plan& plan) {
        return fmt::format("<Plan {}, {}: {} tokens on {} ranks, {} schedule, {} travel, {} steps>",
                           plan.pattern().name, plan.query_placement().name(),
                           plan.query_placement().tokens(), plan.ranks(),
                           name_of(plan.options().schedule), name_of(plan.options().travel),
                           plan.steps());
      });
}

}  // namespace annulus::python
