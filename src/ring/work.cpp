#include "ring/work.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <thread>
#include <tuple>

namespace annulus::ring {
namespace {

std::vector<RunTemplate> templates(const std::vector<PlacedRows>& rows, std::int64_t segment_start,
                                   std::int64_t offset, std::int64_t dilation) {
  std::vector<RunTemplate> out;
  out.reserve(rows.size());
  for (const PlacedRows& placed : rows) {
    RunTemplate run;
    run.parcel = placed.parcel;
    run.store_first = placed.store_first;
    run.store_stride = placed.store_stride;
    run.index = static_cast<std::int32_t>((placed.rows.first - segment_start - offset) / dilation);
    run.index_stride =
        static_cast<std::int32_t>(std::max<std::int64_t>(1, placed.rows.stride / dilation));
    run.count = static_cast<std::int32_t>(placed.rows.count);
    out.push_back(run);
  }
  return out;
}

// Rows of `runs` that count, and the runs that hold them.
struct Extent {
  std::int64_t rows = 0;
  std::size_t runs = 0;
};
Extent extent(const std::vector<RunTemplate>& runs, const IndexFilter& filter) {
  Extent out;
  for (const RunTemplate& run : runs) {
    filter.apply(run, [&](std::int32_t, std::int32_t count) {
      out.rows += count;
      ++out.runs;
    });
  }
  return out;
}

// Rough number of allowed pairs between two stretches of a group's rows, for balancing.
double pair_estimate(bool causal, const WorkItem& item, const WorkGroup& group,
                     const WorkRows& rows) {
  const auto q_begin = static_cast<double>(item.query_begin);
  const auto q_count = static_cast<double>(item.query_end - item.query_begin);
  const auto k_begin = static_cast<double>(item.key_begin);
  const auto k_count = static_cast<double>(item.key_end - item.key_begin);
  if (!causal || !group.whole) return q_count * k_count;
  // As if rows were spread evenly over their index range.
  const double q_first = rows.queries.front().index;
  const double q_span = rows.queries.back().last_index() + 1 - q_first;
  const double k_first = rows.keys.front().index;
  const double k_span = rows.keys.back().last_index() + 1 - k_first;
  double visible = 0;
  constexpr int kSamples = 8;
  for (int i = 0; i < kSamples; ++i) {
    const double q = q_first + q_span * (q_begin + (i + 0.5) / kSamples * q_count) /
                                   static_cast<double>(group.query_rows);
    const double upto = (q - k_first) / std::max(1.0, k_span) * static_cast<double>(group.key_rows);
    visible += std::clamp((upto - k_begin) / k_count, 0.0, 1.0);
  }
  return q_count * k_count * visible / kSamples;
}

std::int64_t pieces(std::int64_t rows, std::int64_t size) {
  return std::max<std::int64_t>(1, (rows + size - 1) / size);
}

}  // namespace

Work::Work(const Plan& plan, int first_step, int last_step, WorkKind kind, bool share,
           std::int64_t batch, int head_dim, int threads)
    : plan_(&plan) {
  add_groups(first_step, last_step, kind, share, batch, threads);

  // Phases: take branches in order and open a new phase when a K/V head is already in use.
  const int ratio = plan.pattern().heads / plan.options().kv_heads;
  std::vector<int> in_phase;
  std::set<int> used;
  int branch = -1;
  const auto close = [&] {
    if (in_phase.empty()) return;
    Phase phase;
    add_items(phase, in_phase, kind, batch, head_dim, threads);
    if (!phase.items.empty()) phases_.push_back(std::move(phase));
    in_phase.clear();
    used.clear();
  };
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].branch != branch) {
      branch = groups_[g].branch;
      std::set<int> heads;
      const Branch& b = plan.pattern().branches[static_cast<std::size_t>(branch)];
      for (int h = 0; h < plan.pattern().heads; ++h) {
        if (b.offset[static_cast<std::size_t>(h)] >= 0) heads.insert(h / ratio);
      }
      const bool clash =
          std::any_of(heads.begin(), heads.end(), [&](int h) { return used.contains(h); });
      if (clash) close();
      used.insert(heads.begin(), heads.end());
    }
    in_phase.push_back(static_cast<int>(g));
  }
  close();
  turns_ = std::make_unique<std::atomic<std::int32_t>[]>(turn_count_);
}

void Work::add_groups(int first_step, int last_step, WorkKind kind, bool share, std::int64_t batch,
                      int threads) {
  const Pattern& pattern = plan_->pattern();
  const std::vector<TileGroup> tile_groups = plan_->tile_groups(first_step, last_step);
  const auto selection_of = [&](const TileGroup& tiles) -> const Selection& {
    return plan_->classes()[static_cast<std::size_t>(tiles.head_class)]
        .selections[static_cast<std::size_t>(tiles.selection)];
  };

  std::vector<std::vector<PairSharing>> sharing(static_cast<std::size_t>(pattern.heads));
  for (int h = 0; h < pattern.heads; ++h) {
    sharing[static_cast<std::size_t>(h)] =
        share ? share_pairs(
                    pattern,
                    {plan_->query_placement().tokens(), pattern.mask(), plan_->self_attention()}, h)
              : std::vector<PairSharing>(pattern.branches.size());
  }
  if (kind == WorkKind::gradients) {
    // Groups that leave out pairs take turns at a segment's keys (see assign_turns). If that would
    // leave threads idle, every branch computes all its pairs.
    std::vector<std::int64_t> chains(pattern.branches.size(), 0);
    std::vector<bool> guest(pattern.branches.size(), false);
    for (const TileGroup& tiles : tile_groups) {
      const Selection& selection = selection_of(tiles);
      const auto branch = static_cast<std::size_t>(selection.branch);
      chains[branch] += batch * static_cast<std::int64_t>(selection.members.size());
      for (const Selection::Member& member : selection.members) {
        if (sharing[static_cast<std::size_t>(member.q_head)][branch].host >= 0)
          guest[branch] = true;
      }
    }
    for (std::size_t branch = 0; branch < chains.size(); ++branch) {
      if (guest[branch] && chains[branch] < 4 * static_cast<std::int64_t>(threads))
        for (auto& of_head : sharing) of_head.assign(pattern.branches.size(), {});
    }
  }

  for (const TileGroup& tiles : tile_groups) {
    const Selection& selection = selection_of(tiles);
    const Branch& branch = pattern.branches[static_cast<std::size_t>(selection.branch)];
    const std::int64_t start = tiles.segment == 0 ? 0 : tiles.segment * branch.segment_length;
    rows_.push_back({templates(tiles.queries, start, selection.offset, branch.dilation),
                     templates(tiles.keys, start, selection.offset, branch.dilation)});
    // One group for all members that share alike.
    std::vector<bool> done(selection.members.size(), false);
    for (std::size_t m = 0; m < selection.members.size(); ++m) {
      if (done[m]) continue;
      const auto sharing_of = [&](std::size_t member) -> const PairSharing& {
        return sharing[static_cast<std::size_t>(selection.members[member].q_head)]
                      [static_cast<std::size_t>(selection.branch)];
      };
      WorkGroup group;
      group.branch = selection.branch;
      group.offset = selection.offset;
      group.segment = tiles.segment;
      group.rows = static_cast<int>(rows_.size()) - 1;
      group.repeats = sharing_of(m).repeats;
      for (std::size_t other = m; other < selection.members.size(); ++other) {
        if (done[other] || !(sharing_of(other) == sharing_of(m))) continue;
        done[other] = true;
        group.members.push_back(selection.members[other]);
      }
      if (sharing_of(m).host < 0) {
        add_group(std::move(group));
      } else {
        add_shared_groups(group, sharing_of(m), kind);
      }
    }
  }
}

void Work::add_group(WorkGroup group) {
  const WorkRows& rows = rows_[static_cast<std::size_t>(group.rows)];
  const Extent queries = extent(rows.queries, group.queries);
  const Extent keys = extent(rows.keys, group.keys);
  if (queries.rows == 0 || keys.rows == 0) return;
  group.query_rows = queries.rows;
  group.key_rows = keys.rows;
  longest_run_list_ = std::max({longest_run_list_, queries.runs, keys.runs});
  groups_.push_back(std::move(group));
}

// A group per segment of the host. Where items own key rows, the keys lie within that segment and
// the queries outside; else the other way round.
void Work::add_shared_groups(const WorkGroup& like, const PairSharing& sharing, WorkKind kind) {
  const bool keys_within = kind == WorkKind::key_gradient;
  const bool causal = plan_->pattern().causal;
  const WorkRows& rows = rows_[static_cast<std::size_t>(like.rows)];
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  std::int64_t last = -1;
  for (const RunTemplate& run : keys_within ? rows.keys : rows.queries) {
    first = std::min<std::int64_t>(first, run.index);
    last = std::max<std::int64_t>(last, run.last_index());
  }
  for (std::int64_t begin = first / sharing.host_rows * sharing.host_rows; begin <= last;
       begin += sharing.host_rows) {
    WorkGroup group = like;
    group.whole = false;
    group.window = static_cast<std::int32_t>(begin);
    const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(
        begin + sharing.host_rows, std::numeric_limits<std::int32_t>::max()));
    IndexFilter within;
    within.begin = group.window;
    within.end = end;
    IndexFilter outside;
    if (!causal) {
      outside.gap = {group.window, end};
    } else if (keys_within) {
      outside.begin = end;
    } else {
      outside.end = group.window;
    }
    group.queries = keys_within ? outside : within;
    group.keys = keys_within ? within : outside;
    add_group(std::move(group));
  }
}

void Work::add_items(Phase& phase, const std::vector<int>& groups, WorkKind kind,
                     std::int64_t batch, int head_dim, int threads) {
  const bool causal = plan_->pattern().causal;
  // Enough items to keep all threads busy to the end; fewer, larger ones reuse packed rows better.
  const std::int64_t wanted = 4 * static_cast<std::int64_t>(threads);
  std::int64_t heads = 0;
  for (int g : groups) {
    const WorkGroup& group = groups_[static_cast<std::size_t>(g)];
    heads += batch * static_cast<std::int64_t>(group.members.size());
  }
  const std::int64_t split = pieces(wanted, heads);  // pieces per head that would be enough

  for (int g : groups) {
    const WorkGroup& group = groups_[static_cast<std::size_t>(g)];
    std::int64_t q_size = group.query_rows;
    std::int64_t k_size = group.key_rows;
    const auto cut = [&](std::int64_t rows, std::int64_t least, std::int64_t into) {
      return std::max(least, (pieces(rows, into) + 31) / 32 * 32);
    };
    switch (kind) {
      case WorkKind::forward:
        q_size = std::min<std::int64_t>(cpu::kQueryBlock, cut(q_size, 64, split));
        break;
      case WorkKind::gradients:
        // A grid of pieces x pieces: items that touch other rows can run side by side.
        if (split > 1) {
          q_size = cut(q_size, 2 * cpu::kGradBlock, split);
          k_size = cut(k_size, 2 * cpu::kGradBlock, split);
        }
        break;
      case WorkKind::query_gradient:
        q_size = std::min<std::int64_t>(cpu::kQueryBlock, cut(q_size, cpu::kGradBlock, split));
        break;
      case WorkKind::key_gradient:
        k_size = std::min<std::int64_t>(cpu::max_key_chunk(head_dim),
                                        cut(k_size, cpu::kGradBlock, split));
        break;
    }
    q_size = std::max<std::int64_t>(1, q_size);
    k_size = std::max<std::int64_t>(1, k_size);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::size_t m = 0; m < group.members.size(); ++m) {
        for (std::int64_t q = 0; q < group.query_rows; q += q_size) {
          for (std::int64_t k = 0; k < group.key_rows; k += k_size) {
            WorkItem item;
            item.group = g;
            item.member = static_cast<int>(m);
            item.batch = static_cast<std::int32_t>(b);
            item.query_begin = q;
            item.query_end = std::min(group.query_rows, q + q_size);
            item.key_begin = k;
            item.key_end = std::min(group.key_rows, k + k_size);
            item.cost =
                pair_estimate(causal, item, group, rows_[static_cast<std::size_t>(group.rows)]);
            phase.items.push_back(item);
          }
        }
      }
    }
  }
  // Few items: the longest first, so that threads end together. Many: segment by segment, so that
  // heads, whose rows share pages, follow each other; the last item is then a small part of the
  // whole anyway.
  constexpr std::size_t kManyPerThread = 32;
  if (phase.items.size() > kManyPerThread * static_cast<std::size_t>(threads)) {
    std::stable_sort(
        phase.items.begin(), phase.items.end(), [&](const WorkItem& a, const WorkItem& b) {
          const auto key = [&](const WorkItem& item) {
            const WorkGroup& group = groups_[static_cast<std::size_t>(item.group)];
            return std::tuple(item.batch, group.segment, group.branch, member(item).q_head);
          };
          return key(a) < key(b);
        });
  } else {
    std::stable_sort(phase.items.begin(), phase.items.end(),
                     [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
  }
  if (kind == WorkKind::gradients || kind == WorkKind::key_gradient) {
    assign_turns(phase, kind == WorkKind::gradients, threads);
  }
}

// Finds which items add into the same rows, orders the items so that neighbours in the list rarely
// do, and numbers their turns.
void Work::assign_turns(Phase& phase, bool query_rows, int threads) {
  const int ratio = plan_->pattern().heads / plan_->options().kv_heads;
  // Items that add into the same key rows but cut them differently count as touching all keys of
  // the segment: where queries travel, query heads that share a K/V head may be in different
  // groups; and groups that leave out pairs cut them at the window, if they own key rows, or have
  // them on both sides of it.
  std::set<int> with_gaps;
  for (const WorkGroup& group : groups_)
    if (!group.whole && (query_rows || ratio > 1)) with_gaps.insert(group.branch);
  const auto coarse = [&](const WorkGroup& group) {
    return (plan_->options().travel == Travel::queries && ratio > 1) ||
           with_gaps.contains(group.branch);
  };
  using Key = std::tuple<int, int, std::int64_t, std::int64_t, std::int32_t, std::int64_t>;
  std::map<Key, std::int32_t> query_ids;
  std::map<Key, std::int32_t> key_ids;
  const auto id = [](std::map<Key, std::int32_t>& ids, const Key& key) {
    return ids.try_emplace(key, static_cast<std::int32_t>(ids.size())).first->second;
  };
  for (WorkItem& item : phase.items) {
    const WorkGroup& group = groups_[static_cast<std::size_t>(item.group)];
    const int q_head = member(item).q_head;
    if (query_rows) {
      item.query_turns = id(query_ids, {q_head, group.branch, group.offset, group.segment,
                                        item.batch, group.window + item.query_begin});
    }
    item.key_turns = id(key_ids, {q_head / ratio, group.branch, group.offset, group.segment,
                                  item.batch, coarse(group) ? -1 : group.window + item.key_begin});
  }
  // The canonical order of a key row's sum is by query head.
  if (!query_rows) {
    std::stable_sort(phase.items.begin(), phase.items.end(),
                     [&](const WorkItem& a, const WorkItem& b) {
                       return member(a).q_head % ratio < member(b).q_head % ratio;
                     });
  } else {
    // Greedy: the next item is the first that shares rows with none of the last threads - 1.
    std::vector<WorkItem> ordered;
    ordered.reserve(phase.items.size());
    std::vector<WorkItem> rest = std::move(phase.items);
    std::size_t front = 0;
    std::vector<bool> taken(rest.size(), false);
    constexpr std::size_t kWindow = 256;
    while (ordered.size() < rest.size()) {
      while (taken[front]) ++front;
      std::size_t pick = front;
      for (std::size_t i = front; i < std::min(rest.size(), front + kWindow); ++i) {
        if (taken[i]) continue;
        bool clash = false;
        const std::size_t recent = std::min(ordered.size(), static_cast<std::size_t>(threads - 1));
        for (std::size_t j = ordered.size() - recent; j < ordered.size(); ++j) {
          clash = clash || ordered[j].query_turns == rest[i].query_turns ||
                  ordered[j].key_turns == rest[i].key_turns;
        }
        if (clash) continue;
        pick = i;
        break;
      }
      taken[pick] = true;
      ordered.push_back(rest[pick]);
    }
    phase.items = std::move(ordered);
  }
  std::vector<std::int32_t> query_next(query_ids.size(), 0);
  std::vector<std::int32_t> key_next(key_ids.size(), 0);
  const auto key_base = static_cast<std::int32_t>(query_ids.size());
  for (WorkItem& item : phase.items) {
    if (query_rows) item.query_turn = query_next[static_cast<std::size_t>(item.query_turns)]++;
    item.key_turn = key_next[static_cast<std::size_t>(item.key_turns)]++;
    item.key_turns += key_base;
  }
  turn_count_ = std::max(turn_count_, query_ids.size() + key_ids.size());
}

std::int64_t Work::bytes() const {
  std::size_t bytes = turn_count_ * sizeof(std::int32_t);
  for (const WorkRows& rows : rows_) {
    bytes +=
        sizeof(WorkRows) + (rows.queries.capacity() + rows.keys.capacity()) * sizeof(RunTemplate);
  }
  for (const WorkGroup& group : groups_) {
    bytes += sizeof(WorkGroup) + group.members.capacity() * sizeof(Selection::Member) +
             group.repeats.capacity() * sizeof(Repeat);
  }
  for (const Phase& phase : phases_) bytes += phase.items.capacity() * sizeof(WorkItem);
  return static_cast<std::int64_t>(bytes);
}

void Work::expand(const WorkItem& item, bool queries, std::span<const ChannelSource> channels,
                  int local_head, std::vector<cpu::RowRun>& runs) const {
  const WorkGroup& group = groups_[static_cast<std::size_t>(item.group)];
  const WorkRows& rows = rows_[static_cast<std::size_t>(group.rows)];
  const IndexFilter& filter = queries ? group.queries : group.keys;
  const int unit_slot = member(item).unit_index;
  runs.clear();
  for (const RunTemplate& run : queries ? rows.queries : rows.keys) {
    filter.apply(run, [&](std::int32_t first, std::int32_t count) {
      cpu::RowRun& out = runs.emplace_back();
      out.index = run.index + first * run.index_stride;
      out.index_stride = run.index_stride;
      out.count = count;
      for (const ChannelSource& source : channels) {
        const auto c = static_cast<std::size_t>(source.channel);
        std::byte* base = nullptr;
        std::int64_t row = 0;
        if (run.parcel < 0) {
          base = source.local.at(item.batch, local_head);
          row = source.local.row_step;
        } else {
          base = source.courier != nullptr ? source.courier->parcel(run.parcel)
                                           : source.returns->parcel(run.parcel);
          base += source.shape->offset(run.parcel, item.batch, unit_slot, source.section);
          row = source.shape->section_bytes(source.section);
        }
        out.base[c] =
            base + (run.store_first + first * run.store_stride) * row + source.byte_offset;
        out.step[c] = run.store_stride * row;
      }
    });
  }
  if (!filter.keeps_all()) sort_by_index(runs);
}

void Work::begin_phase() const {
  for (std::size_t i = 0; i < turn_count_; ++i) turns_[i].store(0, std::memory_order_relaxed);
}

// Items start in list order and an item's predecessors come before it: they run already, on another
// thread.
void Work::wait_turn(const WorkItem& item) const {
  const auto wait = [&](std::int32_t counter, std::int32_t turn) {
    if (counter < 0) return;
    for (int spins = 0;
         turns_[static_cast<std::size_t>(counter)].load(std::memory_order_acquire) != turn;
         ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
  };
  wait(item.query_turns, item.query_turn);
  wait(item.key_turns, item.key_turn);
}

void Work::pass_turn(const WorkItem& item) const {
  if (item.query_turns >= 0)
    turns_[static_cast<std::size_t>(item.query_turns)].fetch_add(1, std::memory_order_release);
  if (item.key_turns >= 0)
    turns_[static_cast<std::size_t>(item.key_turns)].fetch_add(1, std::memory_order_release);
}

}  // namespace annulus::ring
