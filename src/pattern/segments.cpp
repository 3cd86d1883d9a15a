#include "pattern/segments.h"

#include <algorithm>
#include <string>

#include "annulus/error.h"
#include "pattern/division.h"
#include "pattern/entry_groups.h"

namespace annulus {
namespace {

// One side of a document.
struct Range {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t start;  // position of the first token

  [[nodiscard]] std::int64_t origin() const { return begin - start; }
};

Range range_of(const Document& document, Side side) {
  if (side == Side::queries)
    return {document.query_begin, document.query_end, document.query_start};
  return {document.key_begin, document.key_end, document.key_start};
}

std::vector<Document> or_whole(std::span<const Document> documents, std::int64_t query_tokens,
                               std::int64_t key_tokens) {
  if (documents.empty()) return {{.query_end = query_tokens, .key_end = key_tokens}};
  return {documents.begin(), documents.end()};
}

std::string of_entry(const Document& document) {
  if (document.entry == Document::kEveryEntry) return "";
  return " of batch entry " + std::to_string(document.entry);
}

// See every_query_attends: each query is in a document that has a key at the same position.
bool every_query_has_its_key(std::span<const Document> documents, std::int64_t query_tokens,
                             std::int64_t key_tokens) {
  std::int64_t covered = 0;
  for (const Document& document : or_whole(documents, query_tokens, key_tokens)) {
    const Range queries = range_of(document, Side::queries);
    const Range keys = range_of(document, Side::keys);
    if (queries.begin == queries.end) continue;
    if (queries.begin != covered || queries.start < keys.start ||
        queries.end - queries.origin() > keys.end - keys.origin()) {
      return false;
    }
    covered = queries.end;
  }
  return covered == query_tokens;
}

}  // namespace

void check_documents(const Pattern& pattern, std::int64_t query_tokens, std::int64_t key_tokens) {
  for (const EntryGroup& group : entry_groups(pattern)) {
    if (group.documents.empty()) return;
    const Document& last = group.documents.back();
    const auto check = [&](const char* side, std::int64_t found, std::int64_t tokens) {
      if (found <= tokens) return;
      throw ConfigError("Pattern '" + pattern.name + "': the last document" + of_entry(last) +
                        " ends at " + side + " token " + std::to_string(found) +
                        ", expected at most the number of " + side + " tokens, " +
                        std::to_string(tokens));
    };
    check("query", last.query_end, query_tokens);
    check("key", last.key_end, key_tokens);
  }
}

bool every_query_attends(const Pattern& pattern, std::int64_t query_tokens, std::int64_t key_tokens,
                         std::int64_t batch) {
  // A sufficient condition: each query has a key at its own position, in a branch without gaps.
  if (!pattern.band().allows(0, 0)) return false;
  for (std::size_t head = 0; head < static_cast<std::size_t>(pattern.heads); ++head) {
    if (std::none_of(pattern.branches.begin(), pattern.branches.end(), [&](const Branch& branch) {
          return branch.dilation == 1 && branch.offset[head] == 0;
        })) {
      return false;
    }
  }
  std::int64_t entries = 0;
  for (const EntryGroup& group : entry_groups(pattern)) {
    if (!every_query_has_its_key(group.documents, query_tokens, key_tokens)) return false;
    entries += group.entries.count_in(batch);
  }
  return entries == batch;
}

Segments::Segments(std::span<const Document> documents, const Branch& branch,
                   std::int64_t query_tokens, std::int64_t key_tokens)
    : documents_(or_whole(documents, query_tokens, key_tokens)) {
  for (const Document& document : documents_) length_ = std::max(length_, document.length());
  length_ = std::min(length_, branch.segment_length);
  first_segment_.reserve(documents_.size() + 1);
  first_segment_.push_back(0);
  for (const Document& document : documents_) {
    first_segment_.push_back(first_segment_.back() + ceil_div(document.length(), length_));
  }
}

std::size_t Segments::document_of(std::int64_t segment) const {
  if (documents_.size() == 1) return 0;
  const auto next = std::upper_bound(first_segment_.begin(), first_segment_.end() - 1, segment);
  return static_cast<std::size_t>(next - first_segment_.begin()) - 1;
}

std::int64_t Segments::next_with_both(std::int64_t segment) const {
  if (segment >= count()) return count();
  for (std::size_t d = document_of(segment); d < documents_.size(); ++d) {
    const Range queries = range_of(documents_[d], Side::queries);
    const Range keys = range_of(documents_[d], Side::keys);
    if (queries.begin == queries.end || keys.begin == keys.end) continue;
    const std::int64_t begin = std::max(queries.start, keys.start) / length_;
    const std::int64_t end =
        (std::min(queries.end - queries.origin(), keys.end - keys.origin()) - 1) / length_ + 1;
    const std::int64_t next = std::max(segment, first_segment_[d] + begin);
    if (next < first_segment_[d] + end) return next;
  }
  return count();
}

Segments::Part Segments::part(Side side, std::int64_t segment, std::size_t document) const {
  const Range range = range_of(documents_[document], side);
  const std::int64_t origin = range.origin() + (segment - first_segment_[document]) * length_;
  const std::int64_t begin = std::clamp(origin, range.begin, range.end);
  return {begin, std::clamp(origin + length_, begin, range.end), origin};
}

std::int64_t Segments::at_or_after(Side side, std::int64_t token) const {
  const auto found = std::partition_point(
      documents_.begin(), documents_.end(),
      [&](const Document& document) { return range_of(document, side).end <= token; });
  if (found == documents_.end()) return count();
  const Range range = range_of(*found, side);
  const std::int64_t position = std::max(token, range.begin) - range.origin();
  return first_segment_[static_cast<std::size_t>(found - documents_.begin())] + position / length_;
}

std::int64_t Segments::at_or_before(Side side, std::int64_t token) const {
  auto next = std::partition_point(
      documents_.begin(), documents_.end(),
      [&](const Document& document) { return range_of(document, side).begin <= token; });
  // Skips documents without tokens on this side. They end where the one before them that has tokens
  // does, if there is no gap: the first that ends there.
  while (next != documents_.begin()) {
    const std::int64_t end = range_of(*(next - 1), side).end;
    next = std::partition_point(documents_.begin(), next - 1, [&](const Document& document) {
      return range_of(document, side).end < end;
    });
    const Range range = range_of(*next, side);
    if (range.begin == range.end) continue;
    const std::int64_t position = std::min(token, range.end - 1) - range.origin();
    return first_segment_[static_cast<std::size_t>(next - documents_.begin())] + position / length_;
  }
  return -1;
}

std::int64_t Segments::alike_until(std::int64_t segment, std::int64_t end) const {
  const std::size_t d = document_of(segment);
  const auto whole = [&](Side side) {
    const Part here = part(side, segment, d);
    return here.begin == here.origin && here.end - here.begin == length_;
  };
  if (!whole(Side::queries) || !whole(Side::keys)) return segment + 1;
  const Document& document = documents_[d];
  const Range queries = range_of(document, Side::queries);
  const Range keys = range_of(document, Side::keys);
  const std::int64_t positions = std::min(queries.end - queries.origin(), keys.end - keys.origin());
  return std::clamp(first_segment_[d] + positions / length_, segment + 1,
                    std::max(end, segment + 1));
}

Segments::Origins Segments::origins(std::int64_t segment) const {
  const std::size_t d = document_of(segment);
  const std::int64_t before = (segment - first_segment_[d]) * length_;
  return {d, range_of(documents_[d], Side::queries).origin() + before,
          range_of(documents_[d], Side::keys).origin() + before};
}

Stretch selected_indices(const Segments::Part& part, std::int64_t dilation, std::int64_t offset) {
  const std::int64_t zero = part.origin + offset;
  return {std::max<std::int64_t>(0, ceil_div(part.begin - zero, dilation)),
          floor_div(part.end - 1 - zero, dilation)};
}

}  // namespace annulus
