#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "annulus/band.h"

namespace annulus {

// Segment length of a branch whose only segment is the whole sequence.
inline constexpr std::int64_t kWholeSequence = std::numeric_limits<std::int64_t>::max();

// How heads differ in the rows that dilated branches select; see longnet().
enum class Offsets : std::uint8_t { blocked, interleaved, all };

// full: the exact gradient. detached: the branch weights exp(L_b - L) are constants.
enum class MixGradient : std::uint8_t { full, detached };

// Query t attends key p only if t - before <= p <= t + after; -1: no limit. As flash-attention's
// window_size. Counts positions, not selected rows. `after` of a causal pattern is 0 or -1.
struct Window {
  std::int64_t before = -1;
  std::int64_t after = -1;

  bool operator==(const Window&) const = default;
};

// One set of allowed pairs. Position t is selected for head h iff offset[h] >= 0 and
// (t mod segment_length) mod dilation == offset[h]. Query t attends key p iff both are selected,
// they lie in the same segment of the same document and the pattern's band allows the pair.
// Positions are counted from the start of the document, whichever rank holds the tokens.
struct Branch {
  std::int64_t segment_length = kWholeSequence;
  std::int64_t dilation = 1;
  std::vector<std::int64_t> offset;  // per query head; -1: the head is not in this branch

  [[nodiscard]] bool selects(int head, std::int64_t position) const {
    const std::int64_t o = offset[static_cast<std::size_t>(head)];
    return o >= 0 && position % segment_length % dilation == o;
  }
};

// A range of queries that attend only a range of keys, in one batch entry or in all. Positions are
// counted within the document: the first query of the range has position query_start, the first key
// position key_start. For a chunk of a prompt or a decoded token, query_start is the number of
// positions before it, whose keys are in a cache. A cache whose oldest keys were dropped has a
// key_start.
struct Document {
  std::int64_t query_begin = 0;  // tokens [begin, end) of the query and of the key tensors
  std::int64_t query_end = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  std::int64_t query_start = 0;
  std::int64_t key_start = 0;
  std::int64_t entry = kEveryEntry;  // of the batch

  static constexpr std::int64_t kEveryEntry = -1;

  // One more than the last position of either side.
  [[nodiscard]] std::int64_t length() const {
    return std::max(query_end - query_begin + query_start, key_end - key_begin + key_start);
  }
  // Queries and keys are the same tokens at the same positions.
  [[nodiscard]] bool same_sides() const {
    return query_begin == key_begin && query_end == key_end && query_start == key_start;
  }
  // A token has the same position on both sides, where both have it.
  [[nodiscard]] bool same_positions() const {
    return query_begin - query_start == key_begin - key_start;
  }
  bool operator==(const Document&) const = default;
};

// Batch entries [begin, end) that have the same documents. Without documents of single entries, all
// entries, however many there are.
struct EntryRange {
  static constexpr std::int64_t kNoEnd = std::numeric_limits<std::int64_t>::max();
  std::int64_t begin = 0;
  std::int64_t end = kNoEnd;

  // In a batch of so many entries.
  [[nodiscard]] std::int64_t end_in(std::int64_t batch) const { return std::min(end, batch); }
  [[nodiscard]] std::int64_t count_in(std::int64_t batch) const { return end_in(batch) - begin; }
  // How often they count in what is counted of a pattern: see Pattern::times_in.
  [[nodiscard]] std::int64_t times() const { return end == kNoEnd ? 1 : end - begin; }
  bool operator==(const EntryRange&) const = default;
};

// Branches are merged per (token, head) by log-sum-exp: one softmax over the multiset of the
// branches' keys.
struct Pattern {
  std::string name;     // for messages and pictures
  int heads = 0;        // query heads
  bool causal = false;  // p <= t
  std::vector<Branch> branches;
  double output_scale = 1.0;  // multiplies O after the merge (group_scale)
  Window window;
  // In the order of their tokens, with gaps allowed on either side: tokens outside all documents
  // attend nothing, and nothing attends them. Empty: all tokens are one document. The same for
  // every batch entry; or each has its entry, and they are in the order of entries first.
  std::vector<Document> documents;

  // Whether a query token attends a key token of the same batch entry. Sharding never enters.
  [[nodiscard]] bool allows(const Branch& branch, int head, std::int64_t query, std::int64_t key,
                            std::int64_t entry = 0) const;
  // Whether batch entries have documents of their own.
  [[nodiscard]] bool by_entry() const {
    return !documents.empty() && documents.front().entry != Document::kEveryEntry;
  }
  // What is counted of a pattern (pairs, rows of a plan) is of so many batch entries: one, or all
  // if they have documents of their own. A batch has it times_in(batch) times.
  [[nodiscard]] std::int64_t counted_entries() const {
    return by_entry() ? documents.back().entry + 1 : 1;
  }
  [[nodiscard]] std::int64_t times_in(std::int64_t batch) const { return by_entry() ? 1 : batch; }
  // The intersection of causal and window.
  [[nodiscard]] Band band() const {
    Band out = causal ? Band::causal() : Band{};
    if (window.before >= 0) out.least = std::max(out.least, -window.before);
    if (window.after >= 0) out.most = std::min(out.most, window.after);
    return out;
  }

  // ConfigError unless every branch is well formed for `heads` heads.
  void validate() const;
};

// Presets. `group_scale` multiplies the output by 1 / (number of branches), here, in Python and in
// the tool.

// Plain attention: one branch, one segment.
[[nodiscard]] Pattern dense(int heads, bool causal = false);

// Every head is in one branch: branch i gets floor(H/G) contiguous heads, the first H mod G
// branches one more; every head of branch i has offset i mod r_i.
[[nodiscard]] Pattern head_groups(int heads, std::span<const std::int64_t> segments,
                                  std::span<const std::int64_t> dilations, bool causal = false,
                                  bool group_scale = false);

// Every head is in every branch; offset of head h is h / ceil(H/r) (blocked) or h mod r
// (interleaved). all: every head has every offset; there is a branch for each offset of each
// segment length and dilation, and group_scale divides by the number of segment lengths. With a
// window, this is the dilated sliding window: query t sees keys t - i * r.
[[nodiscard]] Pattern longnet(int heads, std::span<const std::int64_t> segments,
                              std::span<const std::int64_t> dilations, bool causal = false,
                              Offsets offsets = Offsets::blocked, bool group_scale = false);

// Documents [boundaries[i], boundaries[i + 1]) of the same tokens on both sides; as
// flash-attention's cu_seqlens. ConfigError unless the boundaries begin with 0 and never decrease.
[[nodiscard]] std::vector<Document> packed_documents(std::span<const std::int64_t> boundaries);
// With boundaries of their own for queries and keys, as cu_seqlens_q and cu_seqlens_k, and the
// first query's position in each document (empty: 0).
[[nodiscard]] std::vector<Document> packed_documents(std::span<const std::int64_t> queries,
                                                     std::span<const std::int64_t> keys,
                                                     std::span<const std::int64_t> query_starts);

// Element i are the documents of batch entry i: the same documents with their entries.
[[nodiscard]] std::vector<Document> documents_of_entries(
    std::span<const std::vector<Document>> documents);

// Number of allowed (branch, head, query, key) pairs: see Pattern::times_in.
[[nodiscard]] double allowed_pairs(const Pattern& pattern, std::int64_t query_tokens,
                                   std::int64_t key_tokens);
// The same for as many keys as queries.
[[nodiscard]] double allowed_pairs(const Pattern& pattern, std::int64_t tokens);

}  // namespace annulus
