#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "annulus/plan.h"
#include "kernels/cpu/kernel.h"
#include "ring/parcels.h"

namespace annulus::ring {

// Rows of a tile group as the kernels see them, for no head in particular yet.
struct RunTemplate {
  int parcel = -1;  // < 0: the local shard
  std::int64_t store_first = 0;
  std::int64_t store_stride = 1;
  std::int32_t index = 0;  // within the segment's progression
  std::int32_t index_stride = 1;
  std::int32_t count = 0;
};

struct WorkGroup {
  int branch = 0;
  int head_class = 0;
  int selection = 0;
  std::int64_t segment = 0;
  std::vector<RunTemplate> queries;
  std::vector<RunTemplate> keys;
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
  Work(const Plan& plan, int rank, int first_step, int last_step, WorkKind kind, std::int64_t batch,
       int head_dim, int threads);

  struct Phase {
    std::vector<WorkItem> items;
  };

  [[nodiscard]] const std::vector<Phase>& phases() const { return phases_; }
  [[nodiscard]] const WorkGroup& group(const WorkItem& item) const {
    return groups_[static_cast<std::size_t>(item.group)];
  }
  [[nodiscard]] const Selection::Member& member(const WorkItem& item) const;
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
  void add_groups(int rank, int first_step, int last_step);
  void add_items(Phase& phase, const std::vector<int>& groups, WorkKind kind, std::int64_t batch,
                 int head_dim, int threads);
  void assign_turns(Phase& phase, bool query_rows, int threads);

  const Plan* plan_;
  std::vector<WorkGroup> groups_;
  std::vector<Phase> phases_;
  std::size_t longest_run_list_ = 0;
  std::size_t turn_count_ = 0;
  std::unique_ptr<std::atomic<std::int32_t>[]> turns_;
};

// Rows of a causal task that none of its other rows can be paired with: they would be packed for
// nobody, and in canonical order they may leave gaps (a row can be here for another branch's sake).
void drop_keys_after(std::vector<cpu::RowRun>& keys, std::int32_t last_query);
void drop_queries_before(std::vector<cpu::RowRun>& queries, std::int32_t first_key);
// Smallest and largest index among rows [begin, end) of the concatenated runs; empty: first > last.
struct IndexSpan {
  std::int32_t first;
  std::int32_t last;
};
[[nodiscard]] IndexSpan index_span(const std::vector<cpu::RowRun>& runs, std::int64_t begin,
                                   std::int64_t end);
[[nodiscard]] std::int64_t row_count(const std::vector<cpu::RowRun>& runs);

}  // namespace annulus::ring
