#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "annulus/pattern.h"

namespace annulus {

// Neighbouring batch entries with the same documents, in the order of entries. Plans and work lists
// treat a group as one: its entries differ in nothing but their rows' addresses. Entries without
// documents attend nothing and are in no group.
struct EntryGroup {
  EntryRange entries;
  std::span<const Document> documents;  // of the pattern; empty: all tokens are one
  std::size_t first_document = 0;       // index of the first into Pattern::documents
};

[[nodiscard]] std::vector<EntryGroup> entry_groups(const Pattern& pattern);

// The documents of one batch entry, a part of the pattern's. None where the pattern has none.
[[nodiscard]] std::span<const Document> documents_of(const Pattern& pattern, std::int64_t entry);

// The documents of batch entries [begin, end) as those of a batch that begins with the first.
[[nodiscard]] std::vector<Document> documents_of_part(const Pattern& pattern, std::int64_t begin,
                                                      std::int64_t end);

}  // namespace annulus
