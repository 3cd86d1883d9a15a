#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/moves.h"
#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "bindings.h"

namespace annulus::python {
namespace {

using Rows = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // first, count, stride
using State = std::tuple<std::string, std::int64_t, std::vector<std::vector<Rows>>>;

void check_rank(const Placement& placement, const char* where, int rank) {
  if (rank >= 0 && rank < placement.ranks()) return;
  throw ConfigError(
      fmt::format("Placement.{}: rank is {}, expected 0..{}", where, rank, placement.ranks() - 1));
}

bool equal(const Placement& a, const Placement& b) {
  if (a.tokens() != b.tokens() || a.ranks() != b.ranks()) return false;
  for (int rank = 0; rank < a.ranks(); ++rank) {
    const auto x = a.ranges(rank);
    const auto y = b.ranges(rank);
    if (!std::equal(x.begin(), x.end(), y.begin(), y.end())) return false;
  }
  return true;
}

State state_of(const Placement& placement) {
  std::vector<std::vector<Rows>> ranges;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    std::vector<Rows>& mine = ranges.emplace_back();
    for (const RowSet& rows : placement.ranges(rank)) {
      mine.emplace_back(rows.first, rows.count, rows.stride);
    }
  }
  return {placement.name(), placement.tokens(), std::move(ranges)};
}

Placement from_state(const State& state) {
  const auto& [name, tokens, all] = state;
  std::vector<std::vector<RowSet>> ranges;
  for (const std::vector<Rows>& rank : all) {
    std::vector<RowSet>& mine = ranges.emplace_back();
    for (const auto& [first, count, stride] : rank) mine.push_back({first, count, stride});
  }
  return Placement::explicit_ranges(tokens, std::move(ranges), name);
}

// Python has a type for arithmetic progressions.
RowSet row_set_of(nb::handle object) {
  if (!PyRange_Check(object.ptr())) {
    throw ConfigError(
        "Placement.explicit: found a " +
        std::string(nb::str(object.type().attr("__name__")).c_str()) +
        " among the ranges, expected range objects: one list of ranges for each rank");
  }
  return {nb::cast<std::int64_t>(object.attr("start")), static_cast<std::int64_t>(nb::len(object)),
          nb::cast<std::int64_t>(object.attr("step"))};
}

nb::object range_of(const RowSet& rows) {
  return nb::borrow(reinterpret_cast<PyObject*>(&PyRange_Type))(rows.first, rows.last() + 1,
                                                                rows.stride);
}

nb::list ranges_of(const std::vector<RowSet>& rows) {
  nb::list ranges;
  for (const RowSet& set : rows) ranges.append(range_of(set));
  return ranges;
}

nb::list list_of(const std::vector<Move>& moves) {
  nb::list list;
  for (const Move& move : moves) list.append(nb::make_tuple(move.peer, ranges_of(move.rows)));
  return list;
}

using Positions = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

Positions positions_of(const Placement& placement, int rank) {
  check_rank(placement, "positions", rank);
  auto all = std::make_unique<std::vector<std::int64_t>>(placement.positions(rank));
  std::vector<std::int64_t>* positions = all.get();
  nb::capsule owner(positions, [](void* pointer) noexcept {
    delete static_cast<std::vector<std::int64_t>*>(pointer);
  });
  (void)all.release();  // owned by the capsule from here on
  return Positions(positions->data(), {positions->size()}, owner);
}

}  // namespace

void bind_placement(nb::module_& module) {
  nb::class_<Placement>(module, "Placement",
                        R"(Which rank of a ring holds which tokens, and in which order.

Every token is held by exactly one rank; results never depend on the placement. Made by
:meth:`contiguous`, :meth:`zigzag`, :meth:`striped`, :meth:`hilbert`, :meth:`explicit` or
:meth:`named`. Any number of tokens goes with any number of ranks: where it does not divide, some ranks
hold one token more than others, and with fewer tokens than ranks some hold none. A value: immutable,
comparable and picklable; the name does not count in comparisons.)")
      .def_static("contiguous", &Placement::contiguous, nb::arg("tokens"), nb::arg("ranks"),
                  nb::arg("align") = 1,
                  R"(Neighbouring tokens stay together: rank 0 holds the first ones, and so on.

Shards are multiples of `align` tokens, except the last one, and differ by at most `align`: segments of
a length that divides `align` stay on one rank.)")
      .def_static(
          "balanced", &Placement::balanced, nb::arg("pattern"), nb::arg("tokens"), nb::arg("ranks"),
          "Equal shares of the tokens, in as few stretches per rank (1 to 16) as give every "
          "rank nearly equal shares of the pattern's allowed pairs: zigzag for plain causal "
          "attention, and as balanced for packed documents and padding.")
      .def_static("zigzag", &Placement::zigzag, nb::arg("tokens"), nb::arg("ranks"),
                  R"(For causal patterns: an early and a late chunk for every rank.

The sequence is cut into 2P chunks; of P ranks, rank r holds chunks r and 2P-1-r, in this order. All
ranks then have the same number of causal pairs, but for what the rounding of the chunks leaves.)")
      .def_static("striped", &Placement::striped, nb::arg("tokens"), nb::arg("ranks"),
                  "Token t lives on rank t mod P, of P ranks: balances causal work, too, but cuts "
                  "every segment up among all ranks.")
      .def_static("hilbert", &Placement::hilbert, nb::arg("tokens"), nb::arg("ranks"),
                  nb::arg("rows") = 0, nb::arg("cols") = 0,
                  R"(For images: a rank holds neighbours in two dimensions.

Tokens are the cells of a rows x cols grid, row by row; the last row may be ragged. A rank holds the
cells of one stretch of a Hilbert curve over the grid, in ascending position. rows = cols = 0: the
squarest grid, of ceil(sqrt(tokens)) columns.)")
      .def_static(
          "explicit",
          [](std::int64_t tokens, const std::vector<std::vector<nb::object>>& ranges) {
            std::vector<std::vector<RowSet>> sets;
            for (const std::vector<nb::object>& rank : ranges) {
              std::vector<RowSet>& mine = sets.emplace_back();
              for (const nb::object& range : rank) mine.push_back(row_set_of(range));
            }
            return Placement::explicit_ranges(tokens, std::move(sets));
          },
          nb::arg("tokens"), nb::arg("ranges"),
          nb::sig("def explicit(tokens: int, ranges: Sequence[Sequence[range]]) -> Placement"),
          "Anything else: ranges[r] are the positions of rank r in storage order, as Python "
          "ranges with positive steps.")
      .def_static("named", &Placement::named, nb::arg("name"), nb::arg("tokens"), nb::arg("ranks"),
                  "By name: 'contiguous', 'zigzag', 'striped' or 'hilbert'.")
      .def_prop_ro(
          "name", [](const Placement& p) { return p.name(); }, "For messages and pictures.")
      .def_prop_ro("tokens", &Placement::tokens, "Tokens of the whole sequence.")
      .def_prop_ro("ranks", &Placement::ranks, "Ranks of the ring.")
      .def(
          "local_tokens",
          [](const Placement& p, int rank) {
            check_rank(p, "local_tokens", rank);
            return p.local_tokens(rank);
          },
          nb::arg("rank"), "How many tokens a rank holds.")
      .def(
          "ranges",
          [](const Placement& p, int rank) {
            check_rank(p, "ranges", rank);
            nb::list ranges;
            const nb::object range = nb::borrow(reinterpret_cast<PyObject*>(&PyRange_Type));
            for (const RowSet& rows : p.ranges(rank)) {
              ranges.append(range(rows.first, rows.last() + 1, rows.stride));
            }
            return ranges;
          },
          nb::arg("rank"), nb::sig("def ranges(self, rank: int) -> list[range]"),
          "The positions of a rank's tokens in storage order, as Python ranges.")
      .def("positions", &positions_of, nb::arg("rank"),
           nb::sig("def positions(self, rank: int) -> numpy.typing.NDArray[numpy.int64]"),
           "Global position of each of a rank's tokens, int64 [local tokens]: what rotary "
           "embeddings "
           "need.")
      .def("position", &Placement::position, nb::arg("rank"), nb::arg("i"),
           "Global position of a rank's local token i.")
      .def(
          "__eq__",
          [](const Placement& a, nb::handle b) -> nb::object {
            if (!nb::isinstance<Placement>(b)) return nb::borrow(Py_NotImplemented);
            return nb::bool_(equal(a, nb::cast<const Placement&>(b)));
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const Placement& p) {
             const nb::object key = nb::make_tuple(p.tokens(), p.ranks(), p.local_tokens(0));
             return static_cast<std::int64_t>(PyObject_Hash(key.ptr()));
           })
      .def("__repr__",
           [](const Placement& p) {
             return fmt::format("<Placement {}: {} tokens on {} ranks>", p.name(), p.tokens(),
                                p.ranks());
           })
      .def("__getstate__", &state_of)
      .def("__setstate__",
           [](Placement& self, const State& state) { new (&self) Placement(from_state(state)); });

  module.def(
      "moves",
      [](const Placement& source, const Placement& target, int rank) {
        const Moves found = moves(source, target, rank);
        nb::dict dict;
        dict["sends"] = list_of(found.sends);
        dict["receives"] = list_of(found.receives);
        nb::list kept;
        for (std::size_t i = 0; i < found.old_rows.size(); ++i) {
          kept.append(nb::make_tuple(range_of(found.old_rows[i]), range_of(found.new_rows[i])));
        }
        dict["kept"] = kept;
        return dict;
      },
      nb::arg("source"), nb::arg("target"), nb::arg("rank"),
      nb::sig("def moves(source: Placement, target: Placement, rank: int) -> "
              "dict[str, list[typing.Any]]"),
      R"(What a rank sends, receives and keeps when tokens are placed anew, with the fewest bytes.

Args:
    source: where the tokens are.
    target: where they are to be; of the same number of tokens, on the same processes. One of the two
        may have more ranks: these join or leave.
    rank: whose part it is.

Returns:
    'sends': pairs of a rank and the ranges of local tokens that go there, in the order in which they travel; 'receives':
    likewise the places in the new shard of what comes; 'kept': pairs of a range of the old shard and its place in the new one.)");
}

}  // namespace annulus::python
