#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "annulus/band.h"
#include "annulus/pattern.h"
#include "pattern/side.h"

namespace annulus {

// ConfigError unless every document lies within the tokens of both sides, of its batch entry.
void check_documents(const Pattern& pattern, std::int64_t query_tokens, std::int64_t key_tokens);

// Whether every query of a batch of so many entries sees at least one key, in every head.
[[nodiscard]] bool every_query_attends(const Pattern& pattern, std::int64_t query_tokens,
                                       std::int64_t key_tokens, std::int64_t batch);

// The segments of a branch in one batch entry, numbered through all documents. A query sees keys of
// its own segment only, so the numbers are the same on both sides. A segment may have no tokens on
// one side.
class Segments {
 public:
  // The tokens of a segment on one side: [begin, end). `origin` is the token at position 0 of the
  // segment; it may lie before `begin`, and even before token 0.
  struct Part {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t origin = 0;
  };

  // No documents: all tokens are one.
  Segments(std::span<const Document> documents, const Branch& branch, std::int64_t query_tokens,
           std::int64_t key_tokens);

  [[nodiscard]] std::int64_t count() const { return first_segment_.back(); }
  // Positions per segment: the branch's segment length, or the length of the longest document if
  // that is smaller.
  [[nodiscard]] std::int64_t length() const { return length_; }
  [[nodiscard]] std::size_t document_of(std::int64_t segment) const;
  // The first segment from this one on that has tokens on both sides; count() if there is none.
  [[nodiscard]] std::int64_t next_with_both(std::int64_t segment) const;
  [[nodiscard]] Part part(Side side, std::int64_t segment) const {
    return part(side, segment, document_of(segment));
  }
  // The segment of a token. For a token outside all documents, at_or_after returns the first
  // segment with later tokens or one before it, or count(); at_or_before returns the last segment
  // with earlier tokens, or -1.
  [[nodiscard]] std::int64_t at_or_after(Side side, std::int64_t token) const;
  [[nodiscard]] std::int64_t at_or_before(Side side, std::int64_t token) const;
  // The segments from this one up to the result (exclusive, at most `end`) have the same number of
  // tokens on both sides and belong to one document. They include this one, unless `end` excludes
  // it.
  [[nodiscard]] std::int64_t alike_until(std::int64_t segment, std::int64_t end) const;
  // A segment's document, and Part::origin on both sides.
  struct Origins {
    std::size_t document = 0;
    std::int64_t query = 0;
    std::int64_t key = 0;

    // Converts a band in positions to a band in the segment's tokens.
    [[nodiscard]] Band in_tokens(const Band& band) const { return band.shifted_by(key - query); }
  };
  [[nodiscard]] Origins origins(std::int64_t segment) const;
  [[nodiscard]] Band in_tokens(const Band& band, std::int64_t segment) const {
    return origins(segment).in_tokens(band);
  }

 private:
  [[nodiscard]] Part part(Side side, std::int64_t segment, std::size_t document) const;

  std::vector<Document> documents_;          // at least one
  std::vector<std::int64_t> first_segment_;  // of each document, and the number of segments
  std::int64_t length_ = 1;
};

// Indices of the rows that a branch selects in a part of a segment: row i is at position
// offset + i * dilation. Empty if the last is before the first.
[[nodiscard]] Stretch selected_indices(const Segments::Part& part, std::int64_t dilation,
                                       std::int64_t offset);

}  // namespace annulus
