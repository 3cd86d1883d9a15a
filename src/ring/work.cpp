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
                                   std::int64_t offset, std::int64_t dilation,
                                   std::int64_t& total) {
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
    total += placed.rows.count;
    out.push_back(run);
  }
  return out;
}

std::int32_t last_index(const RunTemplate& run) {
  return run.index + (run.count - 1) * run.index_stride;
}

// Rough number of allowed pairs between two stretches of a group's rows, for balancing.
double pair_estimate(bool causal, std::int64_t q_begin, std::int64_t q_end, std::int64_t q_rows,
                     std::int64_t k_begin, std::int64_t k_end, std::int64_t k_rows,
                     const WorkGroup& group) {
  const double all = static_cast<double>(q_end - q_begin) * static_cast<double>(k_end - k_begin);
  if (!causal || q_rows == 0 || k_rows == 0) return all;
  // As if rows were spread evenly over their index range.
  const double q_first = group.queries.front().index;
  const double q_span = last_index(group.queries.back()) + 1 - q_first;
  const double k_first = group.keys.front().index;
  const double k_span = last_index(group.keys.back()) + 1 - k_first;
  double visible = 0;
  constexpr int kSamples = 8;
  for (int i = 0; i < kSamples; ++i) {
    const double q = q_first + q_span *
                                   (static_cast<double>(q_begin) +
                                    (i + 0.5) / kSamples * static_cast<double>(q_end - q_begin)) /
                                   static_cast<double>(q_rows);
    const double upto = (q - k_first) / std::max(1.0, k_span) * static_cast<double>(k_rows);
    visible += std::clamp(
        (upto - static_cast<double>(k_begin)) / static_cast<double>(k_end - k_begin), 0.0, 1.0);
  }
  return all * visible / kSamples;
}

std::int64_t pieces(std::int64_t rows, std::int64_t size) {
  return std::max<std::int64_t>(1, (rows + size - 1) / size);
}

}  // namespace

Work::Work(const Plan& plan, int rank, int first_step, int last_step, WorkKind kind,
           std::int64_t batch, int head_dim, int threads)
    : plan_(&plan) {
  add_groups(rank, first_step, last_step);

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

void Work::add_groups(int rank, int first_step, int last_step) {
  for (const TileGroup& tiles : plan_->tile_groups(rank, first_step, last_step)) {
    const Selection& selection = plan_->classes()[static_cast<std::size_t>(tiles.head_class)]
                                     .selections[static_cast<std::size_t>(tiles.selection)];
    const Branch& branch = plan_->pattern().branches[static_cast<std::size_t>(selection.branch)];
    const std::int64_t start = tiles.segment == 0 ? 0 : tiles.segment * branch.segment_length;
    WorkGroup group;
    group.branch = selection.branch;
    group.head_class = tiles.head_class;
    group.selection = tiles.selection;
    group.segment = tiles.segment;
    group.queries =
        templates(tiles.queries, start, selection.offset, branch.dilation, group.query_rows);
    group.keys = templates(tiles.keys, start, selection.offset, branch.dilation, group.key_rows);
    longest_run_list_ = std::max({longest_run_list_, group.queries.size(), group.keys.size()});
    groups_.push_back(std::move(group));
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
    heads += batch *
             static_cast<std::int64_t>(plan_->classes()[static_cast<std::size_t>(group.head_class)]
                                           .selections[static_cast<std::size_t>(group.selection)]
                                           .members.size());
  }
  const std::int64_t split = pieces(wanted, heads);  // pieces per head that would be enough

  for (int g : groups) {
    const WorkGroup& group = groups_[static_cast<std::size_t>(g)];
    const auto& members = plan_->classes()[static_cast<std::size_t>(group.head_class)]
                              .selections[static_cast<std::size_t>(group.selection)]
                              .members;
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
      for (std::size_t m = 0; m < members.size(); ++m) {
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
            item.cost = pair_estimate(causal, q, item.query_end, group.query_rows, k, item.key_end,
                                      group.key_rows, group);
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
  // Where queries travel, query heads that share a K/V head may be in different groups whose local
  // key rows are cut differently: such items count as touching the whole segment's keys.
  const bool coarse = plan_->options().travel == Travel::queries && ratio > 1;
  using Key = std::tuple<int, int, std::int64_t, std::int64_t, std::int32_t, std::int64_t>;
  std::map<Key, std::int32_t> query_ids;
  std::map<Key, std::int32_t> key_ids;
  const auto id = [](std::map<Key, std::int32_t>& ids, const Key& key) {
    return ids.try_emplace(key, static_cast<std::int32_t>(ids.size())).first->second;
  };
  for (WorkItem& item : phase.items) {
    const WorkGroup& group = groups_[static_cast<std::size_t>(item.group)];
    const Selection& selection = plan_->classes()[static_cast<std::size_t>(group.head_class)]
                                     .selections[static_cast<std::size_t>(group.selection)];
    const int q_head = selection.members[static_cast<std::size_t>(item.member)].q_head;
    if (query_rows) {
      item.query_turns = id(query_ids, {q_head, group.branch, selection.offset, group.segment,
                                        item.batch, item.query_begin});
    }
    item.key_turns = id(key_ids, {q_head / ratio, group.branch, selection.offset, group.segment,
                                  item.batch, coarse ? -1 : item.key_begin});
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

const Selection::Member& Work::member(const WorkItem& item) const {
  const WorkGroup& group = groups_[static_cast<std::size_t>(item.group)];
  return plan_->classes()[static_cast<std::size_t>(group.head_class)]
      .selections[static_cast<std::size_t>(group.selection)]
      .members[static_cast<std::size_t>(item.member)];
}

std::int64_t Work::bytes() const {
  std::size_t bytes = turn_count_ * sizeof(std::int32_t);
  for (const WorkGroup& group : groups_) {
    bytes += sizeof(WorkGroup) +
             (group.queries.capacity() + group.keys.capacity()) * sizeof(RunTemplate);
  }
  for (const Phase& phase : phases_) bytes += phase.items.capacity() * sizeof(WorkItem);
  return static_cast<std::int64_t>(bytes);
}

void Work::expand(const WorkItem& item, bool queries, std::span<const ChannelSource> channels,
                  int local_head, std::vector<cpu::RowRun>& runs) const {
  const WorkGroup& group = groups_[static_cast<std::size_t>(item.group)];
  const int unit_slot = member(item).unit_slot;
  const std::vector<RunTemplate>& from = queries ? group.queries : group.keys;
  runs.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    const RunTemplate& run = from[i];
    cpu::RowRun& out = runs[i];
    out.index = run.index;
    out.index_stride = run.index_stride;
    out.count = run.count;
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
      out.base[c] = base + run.store_first * row + source.byte_offset;
      out.step[c] = run.store_stride * row;
    }
  }
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

void drop_keys_after(std::vector<cpu::RowRun>& keys, std::int32_t last_query) {
  std::size_t kept = 0;
  for (cpu::RowRun run : keys) {
    if (run.index > last_query) continue;
    run.count = std::min(run.count, (last_query - run.index) / run.index_stride + 1);
    keys[kept++] = run;
  }
  keys.resize(kept);
}

void drop_queries_before(std::vector<cpu::RowRun>& queries, std::int32_t first_key) {
  std::size_t kept = 0;
  for (cpu::RowRun run : queries) {
    if (run.index < first_key) {
      const std::int32_t skip = (first_key - run.index + run.index_stride - 1) / run.index_stride;
      if (skip >= run.count) continue;
      for (std::size_t c = 0; c < run.base.size(); ++c) run.base[c] += run.step[c] * skip;
      run.index += skip * run.index_stride;
      run.count -= skip;
    }
    queries[kept++] = run;
  }
  queries.resize(kept);
  // Cutting the front can change the order, on which canonical streams rely.
  std::sort(queries.begin(), queries.end(),
            [](const cpu::RowRun& a, const cpu::RowRun& b) { return a.index < b.index; });
}

IndexSpan index_span(const std::vector<cpu::RowRun>& runs, std::int64_t begin, std::int64_t end) {
  IndexSpan span{std::numeric_limits<std::int32_t>::max(), -1};
  std::int64_t row = 0;
  for (const cpu::RowRun& run : runs) {
    const auto first = static_cast<std::int32_t>(std::max<std::int64_t>(0, begin - row));
    const auto last = static_cast<std::int32_t>(std::min<std::int64_t>(run.count, end - row) - 1);
    if (first <= last) {
      span.first = std::min(span.first, run.index + first * run.index_stride);
      span.last = std::max(span.last, run.index + last * run.index_stride);
    }
    row += run.count;
  }
  return span;
}

std::int64_t row_count(const std::vector<cpu::RowRun>& runs) {
  std::int64_t rows = 0;
  for (const cpu::RowRun& run : runs) rows += run.count;
  return rows;
}

}  // namespace annulus::ring
