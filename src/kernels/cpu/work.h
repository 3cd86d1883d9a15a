#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_packs.h"
#include "kernels/work_groups.h"

namespace annulus::cpu {

// Where one channel of a kernel's rows is: in the shard and in received parcels.
struct ChannelSource {
  int channel = 0;
  TensorRows local;
  const ParcelRows* received = nullptr;  // null: only local rows have this channel
  int section = 0;
  std::int64_t byte_offset = 0;  // within a row, local or received
  bool kept = false;             // local rows are in BranchOutputs (kept_rows.h)
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
  // In backward, several items may add to the same block of rows. Each such block has a turn
  // counter, and items wait for their turns, so that sums are made in a fixed order. -1: no other
  // item writes there.
  std::int32_t query_turns = -1;
  std::int32_t query_turn = 0;
  std::int32_t key_turns = -1;
  std::int32_t key_turn = 0;

  bool operator==(const WorkItem&) const = default;
};

// Items that run in parallel.
struct Phase {
  std::vector<WorkItem> items;
  std::size_t turn_counters = 0;
  // Packed keys and the items that use them (key_packs.h). Empty if nothing is packed.
  std::vector<KeyList> lists;
  std::vector<KeyShare> shares;
  std::vector<std::int32_t> wave_items;  // per wave: items that use its lists
  std::int64_t packed_bytes = 0;

  bool operator==(const Phase&) const = default;
};

// The compiled form of a stage: phases that run one after the other. Branches without common rows
// share a phase: their K/V heads are disjoint, or they differ only in their offsets.
class Work {
 public:
  Work(const Stage& stage, const Computation& computation, int threads,
       const PackedBytes& packed_bytes = {});

  [[nodiscard]] const std::vector<Phase>& phases() const { return *phases_; }
  [[nodiscard]] const WorkGroup& group(const WorkItem& item) const { return groups_[item.group]; }
  [[nodiscard]] const Selection::Member& member(const WorkItem& item) const {
    return group(item).members[static_cast<std::size_t>(item.member)];
  }
  [[nodiscard]] Stage::Kind kind() const { return kind_; }
  [[nodiscard]] std::size_t longest_run_list() const { return groups_.longest_run_list(); }
  [[nodiscard]] std::size_t turn_counters() const;

  // Most steps of a ring use the same work list and differ only in row addresses, so equal lists
  // are stored once. Returns true if the lists are equal; this object then uses those of `other`.
  bool share_phases(const Work& other);
  [[nodiscard]] std::int64_t bytes(bool with_phases) const;

  // Expands a group's rows for one head and batch entry into `runs`. `local_head` is the head of
  // local tensors.
  void expand(const WorkItem& item, bool queries, std::span<const ChannelSource> channels,
              int local_head, std::vector<RowRun>& runs) const;
  // The same for all rows of a list.
  void expand(const KeyList& list, std::span<const ChannelSource> channels, int local_head,
              std::vector<RowRun>& runs) const;
  [[nodiscard]] int q_head(const KeyList& list) const {
    return groups_[list.group].members[static_cast<std::size_t>(list.member)].q_head;
  }

 private:
  void expand(std::span<const RunTemplate> from, const IndexFilter& filter, std::int32_t batch,
              int unit, std::span<const ChannelSource> channels, int local_head,
              std::vector<RowRun>& runs) const;
  void add_items(Phase& phase, const std::vector<int>& groups, const Computation& computation,
                 int threads, bool packs) const;

  Stage::Kind kind_;
  WorkGroups groups_;
  std::shared_ptr<const std::vector<Phase>> phases_;
};

}  // namespace annulus::cpu
