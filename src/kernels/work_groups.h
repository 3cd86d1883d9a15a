#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "kernels/row_index.h"
#include "pattern/shared_pairs.h"

namespace annulus {

// The rows of a tile group; several work groups may share them.
struct WorkRows {
  std::span<const RunTemplate> queries;
  std::span<const RunTemplate> keys;
};

// Query rows against key rows of one segment, for all heads that compute the same pairs. If another
// branch, the host, computes a part of the branch's pairs (see shared_pairs.h), there is a group
// for each segment of the host: the rows of one side are within it, those of the other side
// outside.
struct WorkGroup {
  int branch = 0;
  std::int64_t offset = 0;
  std::int64_t segment = 0;
  EntryRange entries;                          // of the batch
  std::span<const Selection::Member> members;  // of a list that groups share
  std::span<const Repeat> repeats;
  int rows = 0;  // index of its WorkRows
  Band band;     // in indices
  IndexTokens tokens;
  bool whole = true;            // all pairs of the segment; otherwise of one segment of the host:
  std::int32_t host_begin = 0;  // first index in that segment
  IndexFilter queries;
  IndexFilter keys;
  std::int64_t query_rows = 0;
  std::int64_t key_rows = 0;
};

// Whether the branches have no key row of a K/V head, and no query row of its heads, in common:
// their heads are disjoint, or they differ in their offsets only. `ratio`: query heads per K/V
// head.
[[nodiscard]] bool apart(const Branch& a, const Branch& b, int ratio);

// The work groups of a stage. Each pair of any branch is in exactly one group.
class WorkGroups {
 public:
  // A stage of kind `gradients` shares pairs only if every guest still has at least `least_chains`
  // chains of groups that can run in parallel: the groups of a chain add to the same keys, one
  // after the other.
  WorkGroups(const Stage& stage, const Computation& computation, std::int64_t least_chains);

  WorkGroups(WorkGroups&&) = default;  // a copy's groups would point into the original
  WorkGroups& operator=(WorkGroups&&) = default;

  [[nodiscard]] const std::vector<WorkGroup>& all() const { return groups_; }
  [[nodiscard]] const WorkGroup& operator[](int group) const {
    return groups_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] const WorkRows& rows(const WorkGroup& group) const {
    return rows_[static_cast<std::size_t>(group.rows)];
  }
  [[nodiscard]] std::size_t longest_run_list() const { return longest_run_list_; }
  [[nodiscard]] std::int64_t bytes() const;

 private:
  // Heads of a selection that share pairs alike in documents of one length.
  struct Share {
    const PairSharing* sharing;
    std::vector<Selection::Member> members;
  };
  // By length, head and branch. Shares point into it.
  using Sharings = std::map<std::int64_t, std::vector<std::vector<PairSharing>>>;
  // By head class, selection and length. Groups point into it.
  using Shares = std::map<std::tuple<int, int, std::int64_t>, std::vector<Share>>;
  class Sharing;

  // `zero` is the token of index 0.
  std::span<RunTemplate> add_runs(const std::vector<PlacedRows>& rows, std::int64_t zero,
                                  std::int64_t dilation);
  void add(WorkGroup group);
  void add_shared(const WorkGroup& like, const PairSharing& sharing, Stage::Kind kind);

  Sharings sharings_;
  Shares shares_;
  std::vector<RunTemplate> runs_;  // of all rows
  std::vector<WorkRows> rows_;
  std::vector<WorkGroup> groups_;
  std::size_t longest_run_list_ = 0;
};

}  // namespace annulus
