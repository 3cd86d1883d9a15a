#include "pattern/entry_groups.h"

#include <algorithm>
#include <iterator>

namespace annulus {
namespace {

// But for the entry.
bool same_tokens(const Document& a, const Document& b) {
  Document other = b;
  other.entry = a.entry;
  return a == other;
}

}  // namespace

std::span<const Document> documents_of(const Pattern& pattern, std::int64_t entry) {
  if (!pattern.by_entry()) return pattern.documents;
  const auto of_entry = std::ranges::equal_range(pattern.documents, entry, {}, &Document::entry);
  return {of_entry.begin(), of_entry.end()};
}

std::vector<EntryGroup> entry_groups(const Pattern& pattern) {
  const std::span<const Document> all(pattern.documents);
  if (!pattern.by_entry()) return {{{}, all, 0}};
  std::vector<EntryGroup> groups;
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const std::int64_t entry = all[begin].entry;
    while (end < all.size() && all[end].entry == entry) ++end;
    const auto documents = all.subspan(begin, end - begin);
    if (!groups.empty() && groups.back().entries.end == entry &&
        std::ranges::equal(groups.back().documents, documents, same_tokens)) {
      ++groups.back().entries.end;
    } else {
      groups.push_back({{entry, entry + 1}, documents, begin});
    }
  }
  return groups;
}

std::vector<Document> documents_of_part(const Pattern& pattern, std::int64_t begin,
                                        std::int64_t end) {
  if (!pattern.by_entry()) return pattern.documents;
  std::vector<Document> out;
  std::ranges::copy_if(pattern.documents, std::back_inserter(out), [&](const Document& document) {
    return document.entry >= begin && document.entry < end;
  });
  for (Document& document : out) document.entry -= begin;
  if (out.empty()) out.push_back({.entry = 0});  // no list at all would be one document
  return out;
}

}  // namespace annulus
