#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "bindings.h"
#include "draw/plan_text.h"
#include "values.h"

namespace annulus::python {
namespace {

using BranchTuple = std::tuple<std::int64_t, std::int64_t, std::vector<std::int64_t>>;
using DocumentTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t>;
using PatternTuple = std::tuple<std::string, int, bool, std::vector<Branch>, double,
                                std::tuple<std::int64_t, std::int64_t>, std::vector<DocumentTuple>>;

std::vector<DocumentTuple> tuples_of(const std::vector<Document>& documents) {
  std::vector<DocumentTuple> tuples;
  for (const Document& d : documents) {
    tuples.emplace_back(d.query_begin, d.query_end, d.key_begin, d.key_end, d.query_start,
                        d.key_start, d.entry);
  }
  return tuples;
}

std::vector<Document> documents_of(const std::vector<DocumentTuple>& tuples) {
  std::vector<Document> documents;
  for (const auto& [query_begin, query_end, key_begin, key_end, query_start, key_start, entry] :
       tuples)
    documents.push_back(
        {query_begin, query_end, key_begin, key_end, query_start, key_start, entry});
  return documents;
}

std::optional<std::int64_t> segment_length(const Branch& branch) {
  if (branch.segment_length == kWholeSequence) return std::nullopt;
  return branch.segment_length;
}

std::string length_text(const Branch& branch, const char* whole) {
  const std::optional<std::int64_t> length = segment_length(branch);
  return length ? std::to_string(*length) : whole;
}

std::string repr(const Branch& branch) {
  return fmt::format("Branch(segment_length={}, dilation={}, offset=[{}])",
                     length_text(branch, "None"), branch.dilation, fmt::join(branch.offset, ", "));
}

std::string repr(const Pattern& pattern) {
  return fmt::format("<Pattern {}: {} heads{}, segments/dilations{}{}>", pattern.name,
                     pattern.heads, mask_text(pattern), branches_text(pattern),
                     pattern.output_scale == 1.0
                         ? ""
                         : fmt::format(", output scaled by {:.6g}", pattern.output_scale));
}

bool equal(const Branch& a, const Branch& b) {
  return a.segment_length == b.segment_length && a.dilation == b.dilation && a.offset == b.offset;
}

// The name is for messages: patterns that allow the same pairs are equal.
bool equal(const Pattern& a, const Pattern& b) {
  if (a.heads != b.heads || a.band() != b.band() || a.output_scale != b.output_scale ||
      a.documents != b.documents || a.branches.size() != b.branches.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.branches.size(); ++i) {
    if (!equal(a.branches[i], b.branches[i])) return false;
  }
  return true;
}

std::int64_t hash(const nb::object& value) { return PyObject_Hash(value.ptr()); }

// Only other values of the same type are comparable.
template <typename T>
nb::object compare(const T& a, nb::handle other) {
  if (!nb::isinstance<T>(other)) return nb::borrow(Py_NotImplemented);
  return nb::bool_(equal(a, nb::cast<const T&>(other)));
}

#define ANNULUS_WINDOW "window: tuple[int, int] | None = None"

void bind_branch(nb::module_& module) {
  nb::class_<Branch>(module, "Branch", R"(One set of allowed (query, key) pairs of a pattern.

Position t is selected for head h iff ``offset[h] >= 0`` and ``(t % segment_length) % dilation ==
offset[h]``. Query t attends key p iff both are selected, they lie in the same segment, the pattern's
window allows p and, in a causal pattern, ``p <= t``. Positions are those of the whole sequence, or of the
document if the pattern has documents, never of a shard.

Args:
    segment_length: tokens per segment; None: one segment, the whole sequence.
    dilation: every how many tokens one is selected.
    offset: per query head; -1: the head is not in this branch.)")
      .def(
          "__init__",
          [](Branch* self, std::optional<std::int64_t> length, std::int64_t dilation,
             std::vector<std::int64_t> offset) {
            new (self) Branch{length.value_or(kWholeSequence), dilation, std::move(offset)};
          },
          nb::arg("segment_length") = nb::none(), nb::arg("dilation") = 1, nb::kw_only(),
          nb::arg("offset"))
      .def_prop_ro("segment_length", segment_length,
                   "Tokens per segment; None: the whole sequence.")
      .def_ro("dilation", &Branch::dilation, "Every how many tokens one is selected.")
      .def_ro("offset", &Branch::offset, "Per query head; -1: the head is not in this branch.")
      .def(
          "__eq__", [](const Branch& a, nb::handle b) { return compare(a, b); },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const Branch& b) {
             return hash(
                 nb::make_tuple(b.segment_length, b.dilation, nb::tuple(nb::cast(b.offset))));
           })
      .def("__repr__", [](const Branch& branch) { return repr(branch); })
      .def("__getstate__",
           [](const Branch& b) {
             return BranchTuple{b.segment_length, b.dilation, b.offset};
           })
      .def("__setstate__", [](Branch& self, const BranchTuple& state) {
        new (&self) Branch{std::get<0>(state), std::get<1>(state), std::get<2>(state)};
      });
}

}  // namespace

void bind_pattern(nb::module_& module) {
  bind_branch(module);
  nb::class_<Pattern>(
      module, "Pattern",
      R"(Which queries attend to which keys: branches, a causal flag, a window and documents.

Branches are merged per (token, head) by log-sum-exp: one softmax over the multiset of the branches'
keys. A row that attends to nothing gives zeros, and -inf as its log-sum-exp. Usually made by
:meth:`dense`, :meth:`longnet` or :meth:`head_groups`. A value: immutable, comparable, hashable and
picklable; the name is for messages and does not count in comparisons.

Args:
    heads: query heads.
    branches: at least one :class:`Branch`, each with one offset per head.
    causal: only keys at or before the query.
    output_scale: multiplies the output after the merge.
    name: for messages and pictures.
    window: (before, after): the query at t attends only to keys p with ``t - before <= p <= t + after``;
        -1: no limit on that side. Counts tokens, in dilated branches, too. None: no window. A causal
        pattern has after = 0 (or -1).)")
      .def(
          "__init__",
          [](Pattern* self, int heads, std::vector<Branch> branches, Flag causal,
             double output_scale, std::string name, nb::handle window) {
            new (self) Pattern(windowed(
                {std::move(name), heads, causal, std::move(branches), output_scale, {}, {}},
                window));
          },
          nb::arg("heads"), nb::arg("branches"), nb::kw_only(), nb::arg("causal") = false,
          nb::arg("output_scale") = 1.0, nb::arg("name") = "custom",
          nb::arg("window").none() = nb::none(),
          nb::sig("def __init__(self, heads: int, branches: Sequence[Branch], *, causal: bool = "
                  "False, output_scale: float = 1.0, name: str = 'custom', " ANNULUS_WINDOW
                  ") -> None"))
      .def_static(
          "dense",
          [](int heads, Flag causal, nb::handle window) {
            return windowed(dense(heads, causal), window);
          },
          nb::arg("heads"), nb::arg("causal") = false, nb::arg("window").none() = nb::none(),
          nb::sig("def dense(heads: int, causal: bool = False, " ANNULUS_WINDOW ") -> Pattern"),
          "Plain attention: every query attends to every key (not after it, when causal; near it, "
          "with a window).")
      .def_static(
          "head_groups",
          [](int heads, const std::vector<std::int64_t>& segments,
             const std::vector<std::int64_t>& dilations, Flag causal, Flag group_scale,
             nb::handle window) {
            return windowed(head_groups(heads, segments, dilations, causal, group_scale), window);
          },
          nb::arg("heads"), nb::arg("segment_lengths"), nb::arg("dilation_rates"),
          nb::arg("causal") = false, nb::arg("group_scale") = false,
          nb::arg("window").none() = nb::none(),
          nb::sig("def head_groups(heads: int, segment_lengths: Sequence[int], dilation_rates: "
                  "Sequence[int], causal: bool = False, group_scale: bool = False, " ANNULUS_WINDOW
                  ") -> Pattern"),
          R"(The branches share the heads out: each head is in exactly one branch.

Branch i of G gets heads // G neighbouring heads (the first heads % G branches one more), all with
offset i % dilation_rates[i]. group_scale multiplies the output by 1/G.)")
      .def_static(
          "longnet", &make_longnet, nb::arg("heads"), nb::arg("segment_lengths"),
          nb::arg("dilation_rates"), nb::arg("causal") = false, nb::arg("offsets") = "blocked",
          nb::arg("group_scale") = false, nb::arg("window").none() = nb::none(),
          nb::sig("def longnet(heads: int, segment_lengths: Sequence[int], dilation_rates: "
                  "Sequence[int], causal: bool = False, offsets: typing.Literal['blocked', "
                  "'interleaved', 'all'] = 'blocked', group_scale: bool = False, " ANNULUS_WINDOW
                  ") -> Pattern"),
          R"(LongNet: every head is in every branch.

With dilation r, head h of H has offset h // ceil(H / r) (offsets='blocked': heads that share a
key/value head share rows, too) or h % r ('interleaved'). With 'all' every head has all r offsets: there is
a branch for each, and every query attends to the keys of its segment at multiples of r from it. group_scale
multiplies the output by one over the number of segment lengths.)")
      .def_prop_ro(
          "name", [](const Pattern& p) { return p.name; }, "For messages and pictures.")
      .def_ro("heads", &Pattern::heads, "Query heads.")
      .def_ro("causal", &Pattern::causal, "Whether keys after the query are left out.")
      .def_prop_ro(
          "window", [](const Pattern& p) { return object_of(p.window); },
          nb::sig("def window(self) -> tuple[int, int] | None"),
          "(before, after), how far from the query its keys may be, with -1 for no limit; None: "
          "anywhere.")
      .def_prop_ro(
          "branches", [](const Pattern& p) { return p.branches; }, "A copy of the branches.")
      .def_ro("output_scale", &Pattern::output_scale, "Multiplies the output after the merge.")
      .def_prop_ro(
          "documents", [](const Pattern& p) { return tuples_of(p.documents); },
          "The documents, each as (query_begin, query_end, key_begin, key_end, query_start, "
          "key_start, batch entry or -1 for all); empty: all tokens are one document.")
      .def(
          "with_documents",
          [](const Pattern& p, nb::handle queries, nb::handle keys, nb::handle starts,
             nb::handle used, nb::handle left, std::optional<std::int64_t> tokens,
             std::optional<std::int64_t> key_tokens) {
            std::optional<SequenceLengths> lengths;
            if (tokens) lengths = {*tokens, key_tokens.value_or(*tokens)};
            return with_documents(p, {queries, keys, starts, used, left}, lengths);
          },
          nb::arg("cu_seqlens").none() = nb::none(), nb::arg("cu_seqlens_k").none() = nb::none(),
          nb::arg("query_start").none() = nb::none(), nb::kw_only(),
          nb::arg("seqused_k").none() = nb::none(), nb::arg("leftpad_k").none() = nb::none(),
          nb::arg("tokens") = nb::none(), nb::arg("key_tokens") = nb::none(),
          nb::sig("def with_documents(self, cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | "
                  "None = None, cu_seqlens_k: Sequence[int] | Sequence[Sequence[int]] | None = "
                  "None, query_start: int | Sequence[int] | Sequence[Sequence[int]] | None = None, "
                  "*, seqused_k: int | Sequence[int] | None = None, leftpad_k: int | Sequence[int] "
                  "| None = None, tokens: int | None = None, key_tokens: int | None = None) -> "
                  "Pattern"),
          R"(The same pattern for packed documents, whose tokens attend only tokens of their own document.

Positions, segments, offsets and windows start anew in each document. Tokens behind the last one attend
nothing. Lists and tensors of any of the arguments may be of single batch entries; the others hold for all.

Args:
    cu_seqlens: 0, then the end of each document in the sequence; never decreasing. Of single batch entries: a
        list of these or a 2-D tensor, whose rows may be padded with their last number. None: one document of
        all tokens.
    cu_seqlens_k: likewise of the keys; None: as of the queries.
    query_start: position of a document's first query among its keys: one number for all; one for each document,
        or for each batch entry where cu_seqlens is of single entries or None; or a list of those of each
        document for each batch entry. None: 0.
    seqused_k: number of keys, the rest is padding: for all batch entries, or one for each. Without cu_seqlens.
    leftpad_k: number of keys of padding at the beginning, likewise. The other keys keep their positions.
    tokens, key_tokens: length of the sequence of queries, and of keys if it is another one. Needed without
        cu_seqlens.)")
      .def(
          "allows",
          [](const Pattern& p, int branch, int head, std::int64_t query, std::int64_t key,
             std::int64_t entry) {
            if (branch < 0 || static_cast<std::size_t>(branch) >= p.branches.size() || head < 0 ||
                head >= p.heads || query < 0 || key < 0) {
              throw nb::index_error("branch, head or position out of range");
            }
            return p.allows(p.branches[static_cast<std::size_t>(branch)], head, query, key, entry);
          },
          nb::arg("branch"), nb::arg("head"), nb::arg("query"), nb::arg("key"),
          nb::arg("entry") = 0,
          "Whether one query token attends to one key token of the same batch entry in a branch.")
      .def(
          "allowed_pairs",
          [](const Pattern& p, std::int64_t tokens, std::optional<std::int64_t> key_tokens) {
            return allowed_pairs(p, tokens, key_tokens.value_or(tokens));
          },
          nb::arg("tokens"), nb::arg("key_tokens") = nb::none(),
          "Number of allowed (branch, head, query, key) pairs for so many queries, and as many "
          "keys unless key_tokens says otherwise: of one batch entry, or of all if they have "
          "documents of their own.")
      .def(
          "__eq__", [](const Pattern& a, nb::handle b) { return compare(a, b); },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const Pattern& p) {
             const Band band = p.band();
             return hash(nb::make_tuple(p.heads, band.least, band.most, p.output_scale,
                                        nb::tuple(nb::cast(p.branches)),
                                        nb::tuple(nb::cast(tuples_of(p.documents)))));
           })
      .def("__repr__", [](const Pattern& pattern) { return repr(pattern); })
      .def("__getstate__",
           [](const Pattern& p) {
             return PatternTuple{p.name,
                                 p.heads,
                                 p.causal,
                                 p.branches,
                                 p.output_scale,
                                 {p.window.before, p.window.after},
                                 tuples_of(p.documents)};
           })
      .def("__setstate__", [](Pattern& self, const PatternTuple& state) {
        const auto& [name, heads, causal, branches, output_scale, window, documents] = state;
        new (&self) Pattern{name,
                            heads,
                            causal,
                            branches,
                            output_scale,
                            {std::get<0>(window), std::get<1>(window)},
                            documents_of(documents)};
      });
}

}  // namespace annulus::python
