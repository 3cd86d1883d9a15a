#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "pattern/segments.h"
#include "values.h"

// Documents from the arguments by which Python passes them.
namespace annulus::python {
namespace {

using Numbers = std::vector<std::int64_t>;

// One argument: nothing, a number, numbers, or numbers for each batch entry.
struct Argument {
  enum class Kind : std::uint8_t { none, one, list, lists };

  const char* name = "";
  Kind kind = Kind::none;
  std::vector<Numbers> lists;

  [[nodiscard]] bool given() const { return kind != Kind::none; }
  [[nodiscard]] bool is(Kind other) const { return kind == other; }
  // Of a batch entry.
  [[nodiscard]] const Numbers& of(std::size_t entry) const {
    return lists[kind == Kind::lists ? entry : 0];
  }
};

// For messages: long lists are cut.
std::string short_repr(nb::handle object) {
  constexpr std::size_t kMost = 200;
  std::string text = nb::repr(object).c_str();
  if (text.size() > kMost) text = text.substr(0, kMost) + " ...";
  return text;
}

nb::object listed(nb::handle object) {
  return nb::hasattr(object, "tolist") ? object.attr("tolist")() : nb::borrow(object);
}

bool is_sequence(nb::handle object) {
  return PySequence_Check(object.ptr()) != 0 && !nb::isinstance<nb::str>(object);
}

bool read_numbers(nb::handle list, Numbers& numbers) {
  if (!is_sequence(list) || !nb::try_cast(list, numbers)) return false;
  return std::ranges::none_of(nb::borrow<nb::sequence>(list), [](const nb::handle& number) {
    return PyBool_Check(number.ptr()) != 0;
  });
}

Argument read(const char* name, nb::handle object, const char* expected) {
  Argument argument;
  argument.name = name;
  if (object.is_none()) return argument;
  const nb::object list = listed(object);
  std::int64_t number = 0;
  Numbers numbers;
  if (PyBool_Check(list.ptr()) == 0 && nb::try_cast(list, number)) {
    argument.kind = Argument::Kind::one;
    argument.lists = {{number}};
  } else if (read_numbers(list, numbers)) {
    argument.kind = Argument::Kind::list;
    argument.lists = {std::move(numbers)};
  } else {
    argument.kind = Argument::Kind::lists;
    bool valid = is_sequence(list);
    if (valid) {
      for (const nb::handle of_entry : nb::borrow<nb::sequence>(list)) {
        Numbers& of = argument.lists.emplace_back();
        valid = valid && read_numbers(listed(of_entry), of);
      }
    }
    if (!valid || argument.lists.empty())
      throw ConfigError(fmt::format("{} is {}, expected {}", name, short_repr(object), expected));
  }
  return argument;
}

// All arguments of a call.
struct Request {
  Argument queries, keys, starts, used, left;

  // Every batch entry's documents, or one list that holds for all of them.
  [[nodiscard]] std::vector<std::vector<Document>> documents(
      const std::optional<SequenceLengths>& lengths) const {
    const std::size_t entries = entry_count();
    std::vector<std::vector<Document>> out;
    for (std::size_t entry = 0; entry < std::max<std::size_t>(entries, 1); ++entry) {
      out.push_back(queries.given() ? packed(entry) : padded(entry, lengths.value()));
      if (entries == 0) break;
      // Rows of tensors are padded with their last boundary.
      std::erase_if(out.back(), [](const Document& document) { return document.length() == 0; });
    }
    return out;
  }

  // How many batch entries have documents of their own; 0: they are the same for all.
  [[nodiscard]] std::size_t entry_count() const {
    std::size_t count = 0;
    const Argument* first = nullptr;
    const auto expect = [&](const Argument& argument, std::size_t found) {
      if (first != nullptr && found != count) {
        throw ConfigError(fmt::format("{} is of {} batch entries, {} of {}, expected as many",
                                      first->name, count, argument.name, found));
      }
      if (first == nullptr) first = &argument;
      count = found;
    };
    for (const Argument* argument : {&queries, &keys, &starts}) {
      if (argument->is(Argument::Kind::lists)) expect(*argument, argument->lists.size());
    }
    for (const Argument* argument : {&used, &left}) {
      if (argument->is(Argument::Kind::list)) expect(*argument, argument->lists[0].size());
    }
    if (starts_of_entries()) expect(starts, starts.lists[0].size());
    return count;
  }

 private:
  // A list of first positions is one for each document, but for each batch entry where these have
  // documents of their own, or one document each.
  [[nodiscard]] bool starts_of_entries() const {
    if (!starts.is(Argument::Kind::list)) return false;
    return queries.given() ? queries.is(Argument::Kind::lists) : starts.lists[0].size() != 1;
  }

  [[nodiscard]] Numbers starts_of(std::size_t entry, std::size_t documents) const {
    if (!starts.given()) return {};
    if (starts.is(Argument::Kind::one)) return Numbers(documents, starts.lists[0][0]);
    if (starts_of_entries()) return Numbers(documents, starts.lists[0][entry]);
    return starts.of(entry);
  }

  [[nodiscard]] std::vector<Document> packed(std::size_t entry) const {
    const Numbers& of_queries = queries.of(entry);
    const Numbers& of_keys = keys.given() ? keys.of(entry) : of_queries;
    const std::size_t count = of_queries.empty() ? 0 : of_queries.size() - 1;
    return packed_documents(of_queries, of_keys, starts_of(entry, count));
  }

  // One document of all queries and the keys that are no padding.
  [[nodiscard]] std::vector<Document> padded(std::size_t entry,
                                             const SequenceLengths& lengths) const {
    const auto number = [&](const Argument& argument, std::int64_t otherwise) {
      if (!argument.given()) return otherwise;
      return argument.lists[0][argument.is(Argument::Kind::list) ? entry : 0];
    };
    const std::int64_t begin = number(left, 0);
    const std::int64_t end = number(used, lengths.keys);
    if (begin < 0 || end < begin || end > lengths.keys) {
      throw ConfigError(fmt::format(
          "keys [{}, {}) are used (leftpad_k, seqused_k){}, expected a range of the {} "
          "keys",
          begin, end, entry_count() == 0 ? "" : fmt::format(" in batch entry {}", entry),
          lengths.keys));
    }
    const Numbers start = starts_of(entry, 1);
    if (start.size() > 1) {
      throw ConfigError(fmt::format(
          "query_start has {} positions for the one document of a batch entry", start.size()));
    }
    return {{0, lengths.queries, begin, end, start.empty() ? 0 : start[0], begin}};
  }
};

// Whether keys are hidden by their distance from the query.
bool has_positions(const Pattern& pattern) {
  return !pattern.band().full() || pattern.branches.size() > 1 ||
         pattern.branches[0].segment_length != kWholeSequence || pattern.branches[0].dilation > 1;
}

}  // namespace

Pattern with_documents(Pattern pattern, const DocumentArguments& arguments,
                       const std::optional<SequenceLengths>& lengths) {
  const char* boundaries = "a sequence of whole numbers, or one for each batch entry";
  const char* numbers = "a whole number, or one for each batch entry";
  const Request request{
      read("cu_seqlens", arguments.cu_seqlens, boundaries),
      read("cu_seqlens_k", arguments.cu_seqlens_k, boundaries),
      read("query_start", arguments.query_start,
           "None, a whole number, or one for each document, or for each of each batch entry"),
      read("seqused_k", arguments.seqused_k, numbers),
      read("leftpad_k", arguments.leftpad_k, numbers)};
  for (const Argument* argument : {&request.queries, &request.keys}) {
    if (argument->is(Argument::Kind::one)) {
      throw ConfigError(
          fmt::format("{} is {}, expected {}", argument->name, argument->lists[0][0], boundaries));
    }
  }
  for (const Argument* argument : {&request.used, &request.left}) {
    if (argument->is(Argument::Kind::lists)) {
      throw ConfigError(fmt::format("{} is a list of lists, expected {}", argument->name, numbers));
    }
    if (argument->given() && request.queries.given()) {
      throw ConfigError(
          fmt::format("{} and cu_seqlens are given: cu_seqlens_k says where the keys "
                      "of packed documents end",
                      argument->name));
    }
  }
  if (request.keys.given() && !request.queries.given()) {
    throw ConfigError("cu_seqlens_k is given without cu_seqlens, which the queries need, too");
  }
  const bool given = request.queries.given() || request.starts.given() || request.used.given() ||
                     request.left.given();
  if (given && !pattern.documents.empty()) {
    throw ConfigError(
        "pattern is a Pattern with documents: leave cu_seqlens, cu_seqlens_k, query_start, "
        "seqused_k and leftpad_k out");
  }
  if (lengths && lengths->queries != lengths->keys && !request.queries.given() &&
      !request.starts.given() && pattern.documents.empty() && has_positions(pattern)) {
    throw ConfigError(fmt::format(
        "q has {} tokens and k {}: query_start, the position of the first query among the keys, is "
        "needed where there is a mask",
        lengths->queries, lengths->keys));
  }
  if (!given) return pattern;
  if (!request.queries.given() && !lengths) {
    throw ConfigError("documents of whole sequences need the number of tokens");
  }
  const std::vector<std::vector<Document>> documents = request.documents(lengths);
  pattern.documents =
      request.entry_count() == 0 ? documents.front() : documents_of_entries(documents);
  pattern.validate();
  if (lengths) check_documents(pattern, lengths->queries, lengths->keys);
  return pattern;
}

}  // namespace annulus::python
