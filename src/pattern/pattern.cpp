#include "annulus/pattern.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include "annulus/error.h"
#include "pattern/band_pairs.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"

namespace annulus {
namespace {

// The number of branches of a pattern with all offsets is limited, because plans and kernels treat
// each branch separately.
constexpr std::int64_t kMostBranches = 1024;

void require_at_least_one(const std::string& where, const std::string& what, std::int64_t found) {
  if (found >= 1) return;
  throw ConfigError(where + ": " + what + " is " + std::to_string(found) + ", expected at least 1");
}

// Checks the arguments of a preset before it computes offsets with them; Pattern::validate would
// come too late for a dilation of zero.
void check_preset(const std::string& where, int heads, std::span<const std::int64_t> segments,
                  std::span<const std::int64_t> dilations) {
  require_at_least_one(where, "heads", heads);
  if (segments.size() != dilations.size()) {
    throw ConfigError(where + ": found " + std::to_string(segments.size()) + " segments and " +
                      std::to_string(dilations.size()) +
                      " dilations, expected one of each per branch");
  }
  if (segments.empty()) {
    throw ConfigError(where + ": segments and dilations are empty, expected at least one branch");
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    require_at_least_one(where, "segments" + index, segments[i]);
    require_at_least_one(where, "dilations" + index, dilations[i]);
  }
}

// Documents are in the order of entries, and in that of their tokens on both sides.
void check_document(const Pattern& pattern, std::size_t index) {
  const Document& document = pattern.documents[index];
  Document before = index == 0 ? Document{} : pattern.documents[index - 1];
  const std::string where =
      "Pattern '" + pattern.name + "', document " + std::to_string(index) + ": ";
  const bool by_entry = pattern.by_entry();
  const std::int64_t least =
      by_entry ? std::max<std::int64_t>(0, before.entry) : Document::kEveryEntry;
  if (document.entry < least || (!by_entry && document.entry > least)) {
    throw ConfigError(where + "entry is " + std::to_string(document.entry) + ", expected " +
                      (by_entry ? std::to_string(least) + " or more: documents are in the order "
                                                          "of their batch entries"
                                : "-1 (every entry) in all documents, or in none"));
  }
  constexpr std::int64_t kMostEntries = std::int64_t{1} << 31;  // they are counted
  if (document.entry >= kMostEntries) {
    throw ConfigError(where + "entry is " + std::to_string(document.entry) +
                      ", expected less than " + std::to_string(kMostEntries));
  }
  if (document.entry != before.entry) before = {};
  const auto check = [&](const char* side, std::int64_t begin, std::int64_t end, std::int64_t first,
                         std::int64_t start) {
    if (begin < first || end < begin) {
      throw ConfigError(where + side + " tokens are [" + std::to_string(begin) + ", " +
                        std::to_string(end) + "), expected a range that begins at " +
                        std::to_string(first) + " or later");
    }
    constexpr std::int64_t kMostPositions = std::int64_t{1} << 40;  // keeps sums of positions small
    if (start < 0 || start > kMostPositions) {
      throw ConfigError(where + side + "_start is " + std::to_string(start) + ", expected 0.." +
                        std::to_string(kMostPositions));
    }
  };
  check("query", document.query_begin, document.query_end, before.query_end, document.query_start);
  check("key", document.key_begin, document.key_end, before.key_end, document.key_start);
}

Branch make_branch(int heads, std::int64_t segment_length, std::int64_t dilation) {
  Branch branch;
  branch.segment_length = segment_length;
  branch.dilation = dilation;
  branch.offset.assign(static_cast<std::size_t>(heads), -1);
  return branch;
}

}  // namespace

double band_pairs(const Band& band, const Stretch& queries, const Stretch& keys) {
  const std::int64_t most = keys.last - keys.first + 1;
  if (queries.last < queries.first || most <= 0 || band.empty()) return 0.0;
  // Pairs with key - query <= difference: the sum of clamp(query + ahead, 0, most).
  const auto up_to = [&](std::int64_t difference) {
    const std::int64_t ahead =
        std::clamp(difference + 1 - keys.first, -queries.last, most - queries.first);
    const auto sum_to = [&](std::int64_t x) {  // of clamp(i, 0, most) over i <= x
      const std::int64_t below = std::clamp<std::int64_t>(x, 0, most);
      const auto n = static_cast<double>(below);
      return n * (n + 1.0) / 2.0 +
             static_cast<double>(most) * static_cast<double>(std::max<std::int64_t>(0, x - most));
    };
    return sum_to(queries.last + ahead) - sum_to(queries.first - 1 + ahead);
  };
  return band.least == -Band::kUnlimited ? up_to(band.most)
                                         : up_to(band.most) - up_to(band.least - 1);
}

bool Pattern::allows(const Branch& branch, int head, std::int64_t query, std::int64_t key,
                     std::int64_t entry) const {
  if (!documents.empty()) {
    const std::span<const Document> here = documents_of(*this, entry);
    const auto document =
        std::ranges::find_if(here, [&](const Document& d) { return query < d.query_end; });
    if (document == here.end() || query < document->query_begin || key < document->key_begin ||
        key >= document->key_end) {
      return false;
    }
    query += document->query_start - document->query_begin;
    key += document->key_start - document->key_begin;
  }
  return branch.selects(head, query) && branch.selects(head, key) &&
         query / branch.segment_length == key / branch.segment_length && band().allows(query, key);
}

void Pattern::validate() const {
  const std::string where = "Pattern '" + name + "'";
  require_at_least_one(where, "heads", heads);
  if (branches.empty()) throw ConfigError(where + ": no branches, expected at least one");
  if (!std::isfinite(static_cast<float>(output_scale))) {
    throw ConfigError(where + ": output_scale is " + std::to_string(output_scale) +
                      ", expected a number that fp32 can hold");
  }
  const auto check_window = [&](const char* side, std::int64_t found) {
    if (found >= -1) return;
    throw ConfigError(where + ": window." + side + " is " + std::to_string(found) +
                      ", expected a number of tokens, or -1 for no limit");
  };
  check_window("before", window.before);
  check_window("after", window.after);
  if (causal && window.after > 0) {
    throw ConfigError(where + ": window.after is " + std::to_string(window.after) +
                      " in a causal pattern, expected 0 (or -1)");
  }
  for (std::size_t i = 0; i < documents.size(); ++i) check_document(*this, i);
  for (std::size_t i = 0; i < branches.size(); ++i) {
    const Branch& branch = branches[i];
    const std::string here = where + ", branch " + std::to_string(i);
    require_at_least_one(here, "segment_length", branch.segment_length);
    require_at_least_one(here, "dilation", branch.dilation);
    if (branch.offset.size() != static_cast<std::size_t>(heads)) {
      throw ConfigError(here + ": found " + std::to_string(branch.offset.size()) +
                        " offsets, expected one per head: " + std::to_string(heads));
    }
    for (std::size_t h = 0; h < branch.offset.size(); ++h) {
      const std::int64_t offset = branch.offset[h];
      if (offset >= -1 && offset < branch.dilation) continue;
      throw ConfigError(here + ": offset of head " + std::to_string(h) + " is " +
                        std::to_string(offset) + ", expected 0.." +
                        std::to_string(branch.dilation - 1) +
                        " (dilation - 1) or -1 (not in branch)");
    }
  }
}

Pattern dense(int heads, bool causal) {
  require_at_least_one("dense", "heads", heads);
  Pattern pattern;
  pattern.name = "dense";
  pattern.heads = heads;
  pattern.causal = causal;
  pattern.branches.push_back(make_branch(heads, kWholeSequence, 1));
  for (std::int64_t& offset : pattern.branches[0].offset) offset = 0;
  return pattern;
}

Pattern head_groups(int heads, std::span<const std::int64_t> segments,
                    std::span<const std::int64_t> dilations, bool causal, bool group_scale) {
  check_preset("head_groups", heads, segments, dilations);
  const auto head_count = static_cast<std::size_t>(heads);
  const std::size_t groups = segments.size();
  if (groups > head_count) {
    throw ConfigError("head_groups: found " + std::to_string(groups) + " branches for " +
                      std::to_string(heads) +
                      " heads, expected at most one branch per head: the last would have none");
  }
  Pattern pattern;
  pattern.name = "head_groups";
  pattern.heads = heads;
  pattern.causal = causal;
  if (group_scale) pattern.output_scale = 1.0 / static_cast<double>(groups);
  std::size_t head = 0;
  for (std::size_t i = 0; i < groups; ++i) {
    Branch branch = make_branch(heads, segments[i], dilations[i]);
    const std::size_t end = head + head_count / groups + (i < head_count % groups ? 1 : 0);
    for (; head < end; ++head) branch.offset[head] = static_cast<std::int64_t>(i) % dilations[i];
    pattern.branches.push_back(std::move(branch));
  }
  return pattern;
}

Pattern longnet(int heads, std::span<const std::int64_t> segments,
                std::span<const std::int64_t> dilations, bool causal, Offsets offsets,
                bool group_scale) {
  check_preset("longnet", heads, segments, dilations);
  Pattern pattern;
  pattern.name = "longnet";
  pattern.heads = heads;
  pattern.causal = causal;
  if (group_scale) pattern.output_scale = 1.0 / static_cast<double>(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    Branch branch = make_branch(heads, segments[i], dilations[i]);
    if (offsets == Offsets::all) {
      // Offsets behind the end of a segment select nothing.
      const std::int64_t count = std::min(segments[i], dilations[i]);
      if (count > kMostBranches - static_cast<std::int64_t>(pattern.branches.size())) {
        throw ConfigError("longnet: dilation " + std::to_string(dilations[i]) +
                          " with offsets 'all' makes a branch for each of " +
                          std::to_string(count) + " offsets, expected at most " +
                          std::to_string(kMostBranches) + " branches in all");
      }
      for (std::int64_t offset = 0; offset < count; ++offset) {
        std::fill(branch.offset.begin(), branch.offset.end(), offset);
        pattern.branches.push_back(branch);
      }
      continue;
    }
    // ceil(heads / dilation) without the overflow of heads + dilation - 1. The blocked offset is
    // below the dilation because head < heads <= dilation * heads_per_offset.
    const std::int64_t heads_per_offset = (heads - 1) / dilations[i] + 1;
    for (std::int64_t head = 0; head < heads; ++head) {
      branch.offset[static_cast<std::size_t>(head)] =
          offsets == Offsets::blocked ? head / heads_per_offset : head % dilations[i];
    }
    pattern.branches.push_back(std::move(branch));
  }
  return pattern;
}

std::vector<Document> packed_documents(std::span<const std::int64_t> boundaries) {
  return packed_documents(boundaries, boundaries, {});
}

std::vector<Document> packed_documents(std::span<const std::int64_t> queries,
                                       std::span<const std::int64_t> keys,
                                       std::span<const std::int64_t> query_starts) {
  const auto check = [](std::span<const std::int64_t> boundaries) {
    if (boundaries.empty() || boundaries.front() != 0) {
      throw ConfigError("document boundaries begin with " +
                        (boundaries.empty() ? "nothing" : std::to_string(boundaries.front())) +
                        ", expected 0, then the end of each document");
    }
    for (std::size_t i = 1; i < boundaries.size(); ++i) {
      if (boundaries[i] >= boundaries[i - 1]) continue;
      throw ConfigError("document boundary " + std::to_string(i) + " is " +
                        std::to_string(boundaries[i]) + ", expected at least the one before, " +
                        std::to_string(boundaries[i - 1]));
    }
  };
  check(queries);
  check(keys);
  const std::size_t count = queries.size() - 1;
  if (keys.size() != queries.size() || (!query_starts.empty() && query_starts.size() != count)) {
    throw ConfigError("found boundaries of " + std::to_string(count) + " documents of queries, " +
                      std::to_string(keys.size() - 1) + " documents of keys and " +
                      std::to_string(query_starts.size()) +
                      " positions of first queries, expected as many of each");
  }
  std::vector<Document> documents(count);
  for (std::size_t i = 0; i < count; ++i) {
    documents[i] = {.query_begin = queries[i],
                    .query_end = queries[i + 1],
                    .key_begin = keys[i],
                    .key_end = keys[i + 1],
                    .query_start = query_starts.empty() ? 0 : query_starts[i]};
  }
  return documents;
}

std::vector<Document> documents_of_entries(std::span<const std::vector<Document>> documents) {
  std::vector<Document> out;
  for (std::size_t entry = 0; entry < documents.size(); ++entry) {
    const std::size_t begin = out.size();
    out.insert(out.end(), documents[entry].begin(), documents[entry].end());
    if (out.size() == begin) out.emplace_back();  // else the batch would seem to be smaller
    for (std::size_t i = begin; i < out.size(); ++i)
      out[i].entry = static_cast<std::int64_t>(entry);
  }
  return out;
}

double allowed_pairs(const Pattern& pattern, std::int64_t query_tokens, std::int64_t key_tokens) {
  pattern.validate();
  const auto check = [](const char* what, std::int64_t found) {
    if (found >= 0) return;
    throw ConfigError("allowed_pairs: " + std::string(what) + " is " + std::to_string(found) +
                      ", expected at least 0");
  };
  check("query_tokens", query_tokens);
  check("key_tokens", key_tokens);
  check_documents(pattern, query_tokens, key_tokens);
  const Band band = pattern.band();
  double pairs = 0.0;
  for (const Branch& branch : pattern.branches) {
    std::map<std::int64_t, double> heads_of;  // by offset
    for (const std::int64_t offset : branch.offset) {
      if (offset >= 0) heads_of[offset] += 1.0;
    }
    for (const EntryGroup& group : entry_groups(pattern)) {
      const auto entries = static_cast<double>(group.entries.times());
      const Segments segments(group.documents, branch, query_tokens, key_tokens);
      for (std::int64_t s = segments.next_with_both(0), next = 0; s < segments.count();
           s = segments.next_with_both(next)) {
        next = segments.alike_until(s, segments.count());
        for (const auto& [offset, heads] : heads_of) {
          const auto indices = [&](Side side) {
            return selected_indices(segments.part(side, s), branch.dilation, offset);
          };
          pairs += entries * static_cast<double>(next - s) * heads *
                   band_pairs(band.divided_by(branch.dilation), indices(Side::queries),
                              indices(Side::keys));
        }
      }
    }
  }
  return pairs;
}

double allowed_pairs(const Pattern& pattern, std::int64_t tokens) {
  return allowed_pairs(pattern, tokens, tokens);
}

}  // namespace annulus
