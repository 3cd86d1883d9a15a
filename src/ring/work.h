#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "annulus/plan.h"
#include "kernels/cpu/kernel.h"
#include "pattern/shared_pairs.h"
#include "ring/parcels.h"
#include "ring/row_runs.h"

namespace annulus::ring {

// The rows of a tile group; several work groups may share them.
struct WorkRows {
  std::vector<RunTemplate> queries;
  std::vector<RunTemplate> keys;
};

// Query rows against key rows of one segment, for heads that do the same. A branch whose pairs are
// partly computed by another one (see shared_pairs.h) has a group for each segment of that other
// branch: the rows of one side lie within it, those of the other side outside.
struct WorkGroup {
  int branch = 0;
  std::int64_t offset = 0;
  std::int64_t segment = 0;
  std::vector<Selection::Member> members;
  std::vector<Repeat> repeats;
  int rows = 0;             // index of its WorkRows
  std::int32_t window = 0;  // first index within; 0 also where the group has the whole segment
  bool whole = true;        // it has all pairs of the segment
  IndexFilter queries;
  IndexFilter keys;
  std::int64_t query_rows = 0;
  std::int64_t key_rows = 0;
};

// Where one channel of a kernel's rows comes from: the shard, and for received rows a courier's
// section.
struct ChannelSource {
  int channel = 0;
  LocalRows local;
  const Courier* courier = nullptr;        // received rows, or
  const ReturnCourier* returns = nullptr;  // their gradients
  const ParcelShape* shape = nullptr;
  int section = 0;
  std::int64_t byte_offset = 0;  // within a row, local or received
};

// One kernel call. Rows are counted through the group's runs.
struct WorkItem {
  int group = 0;
  int member = 0;
  std::int32_t batch = 0;
  std::int64_t query_begin = 0;
  std::int64_t query_end = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  // Backward adds into rows that other items add into as well. Each such block of rows has a turn
  // counter, and an item waits for its turn: sums are made in one fixed order, whatever the threads
  // do. -1: nobody else writes there.
  std::int32_t query_turns = -1;
  std::int32_t query_turn = 0;
  std::int32_t key_turns = -1;
  std::int32_t key_turn = 0;
  double cost = 0;
};

enum class WorkKind : std::uint8_t {
  forward,         // items own query rows
  gradients,       // items add into query and key rows
  query_gradient,  // canonical: items own query rows
  key_gradient,    // canonical: items add into key rows
};

// The compute of one or several steps of a plan on one rank: phases that run one after the other,
// items within a phase in parallel. Branches whose K/V heads are disjoint share a phase.
class Work {
 public:
  // `share`: compute pairs that several branches have in common once. Must be false where branches
  // are kept apart.
  Work(const Plan& plan, int first_step, int last_step, WorkKind kind, bool share,
       std::int64_t batch, int head_dim, int threads);

  struct Phase {
    std::vector<WorkItem> items;
  };

  [[nodiscard]] const std::vector<Phase>& phases() const { return phases_; }
  [[nodiscard]] const WorkGroup& group(const WorkItem& item) const {
    return groups_[static_cast<std::size_t>(item.group)];
  }
  [[nodiscard]] const Selection::Member& member(const WorkItem& item) const {
    return group(item).members[static_cast<std::size_t>(item.member)];
  }
  [[nodiscard]] std::size_t longest_run_list() const { return longest_run_list_; }
  [[nodiscard]] bool empty() const { return phases_.empty(); }
  [[nodiscard]] std::int64_t bytes() const;  // of the lists themselves

  // Expands a group's rows for one head and batch entry into `runs`. `local_head` is the head of
  // local tensors.
  void expand(const WorkItem& item, bool queries, std::span<const ChannelSource> channels,
              int local_head, std::vector<cpu::RowRun>& runs) const;

  // Turn counters; begin_phase resets them.
  void begin_phase() const;
  void wait_turn(const WorkItem& item) const;
  void pass_turn(const WorkItem& item) const;

 private:
  void add_groups(int first_step, int last_step, WorkKind kind, bool share, std::int64_t batch,
                  int threads);
  void add_group(WorkGroup group);
  void add_shared_groups(const WorkGroup& like, const PairSharing& sharing, WorkKind kind);
  void add_items(Phase& phase, const std::vector<int>& groups, WorkKind kind, std::int64_t batch,
                 int head_dim, int threads);
  void assign_turns(Phase& phase, bool query_rows, int threads);

  const Plan* plan_;
  std::vector<WorkRows> rows_;
  std::vector<WorkGroup> groups_;
  std::vector<Phase> phases_;
  std::size_t longest_run_list_ = 0;
  std::size_t turn_count_ = 0;
  std::unique_ptr<std::atomic<std::int32_t>[]> turns_;
};

}  // namespace annulus::ring
