#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/ring_cache.h"
#include "core/function_ref.h"
#include "kernels/cached_rows.h"

namespace annulus::kv_cache {

// Neighbouring tokens of one entry that one rank keeps in neighbouring rows.
struct Place {
  int rank = 0;
  std::int64_t token = 0;  // the first one's number within the call
  std::int64_t row = 0;    // of the rank's ring of rows
  std::int64_t count = 0;
};

// Where the tokens of a cache are: pure arithmetic, the same on every rank. Tokens go round the
// ranks in blocks; a stripe is one block of every rank. A rank has a ring of rows for each entry,
// where a stripe takes the place of the oldest one. So rows never move, and memory is bounded where
// a window lets old stripes go.
class Sequences {
 public:
  Sequences(const CacheOptions& options, int ranks);

  [[nodiscard]] std::int64_t ring_rows() const { return ring_rows_; }
  [[nodiscard]] const std::vector<std::int64_t>& lengths() const { return lengths_; }
  [[nodiscard]] RowPositions positions(int rank) const;
  [[nodiscard]] Band band() const { return band_; }

  // What is wrong with so many new tokens; empty: nothing.
  [[nodiscard]] std::string append_complaint(std::span<const std::int64_t> counts) const;
  // The same for queries that are the last tokens of entries, after so many new ones.
  [[nodiscard]] std::string attend_complaint(std::span<const std::int64_t> counts,
                                             std::span<const std::int64_t> fresh) const;
  void append(std::span<const std::int64_t> counts);
  void truncate(std::int64_t entry, std::int64_t length);  // ConfigError
  void copy(std::int64_t from, std::int64_t to);
  void check_entry(const char* name, std::int64_t entry) const;  // ConfigError

  // The places of tokens [first, first + count) behind those of the entry.
  void for_each_place(std::int64_t entry, std::int64_t first, std::int64_t count,
                      FunctionRef<void(const Place&)> use) const;
  // Rows of a rank's ring that tokens of the entry are in: at most two runs.
  void for_each_kept(std::int64_t entry, int rank,
                     FunctionRef<void(std::int64_t row, std::int64_t count)> use) const;

 private:
  // The oldest position that is still there when the highest that ever was is length - 1.
  [[nodiscard]] std::int64_t oldest(std::int64_t length) const;
  // The oldest that a query at this position sees.
  [[nodiscard]] std::int64_t needed(std::int64_t position) const {
    return band_.least == -Band::kUnlimited ? 0 : std::max<std::int64_t>(0, position + band_.least);
  }
  [[nodiscard]] std::int64_t stripe() const { return block_ * ranks_; }

  int ranks_;
  std::int64_t block_;
  std::int64_t capacity_;
  Band band_;
  std::int64_t stripes_;
  std::int64_t ring_rows_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int64_t> highest_;  // the greatest length since an entry was last empty
};

}  // namespace annulus::kv_cache
