#include "kernels/cpu/work.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/cpu/row_runs.h"
#include "kernels/cpu/turns.h"

namespace annulus::cpu {
namespace {

// Rough number of allowed pairs between two stretches of a group's rows, for balancing.
double pair_estimate(const WorkItem& item, const WorkGroup& group, const WorkRows& rows) {
  const auto q_begin = static_cast<double>(item.query_begin);
  const auto q_count = static_cast<double>(item.query_end - item.query_begin);
  const auto k_begin = static_cast<double>(item.key_begin);
  const auto k_count = static_cast<double>(item.key_end - item.key_begin);
  if (group.band.full() || !group.whole) return q_count * k_count;
  // Assumes that rows are spread evenly over their index range.
  const double q_first = rows.queries.front().index;
  const double q_span = rows.queries.back().last_index() + 1 - q_first;
  const double k_first = rows.keys.front().index;
  const double k_span = rows.keys.back().last_index() + 1 - k_first;
  double visible = 0;
  constexpr int kSamples = 8;
  for (int i = 0; i < kSamples; ++i) {
    const double q = q_first + q_span * (q_begin + (i + 0.5) / kSamples * q_count) /
                                   static_cast<double>(group.query_rows);
    // The share of the keys up to an index.
    const auto share = [&](double index) {
      const double upto =
          (index - k_first) / std::max(1.0, k_span) * static_cast<double>(group.key_rows);
      return std::clamp((upto - k_begin) / k_count, 0.0, 1.0);
    };
    const double from = share(q + static_cast<double>(group.band.least) - 1);
    visible += std::max(0.0, share(q + static_cast<double>(group.band.most)) - from);
  }
  return q_count * k_count * visible / kSamples;
}

std::int64_t pieces(std::int64_t rows, std::int64_t size) {
  return std::max<std::int64_t>(1, (rows + size - 1) / size);
}

}  // namespace

Work::Work(const Stage& stage, const Computation& computation, int threads,
           const PackedBytes& packed_bytes)
    : kind_(stage.kind), groups_(stage, computation, 4 * static_cast<std::int64_t>(threads)) {
  // Add branches to the phase in order, and open a new phase if a branch has rows that are already
  // in use.
  const Pattern& pattern = *computation.pattern;
  const int ratio = pattern.heads / computation.kv_heads;
  std::vector<Phase> phases;
  std::vector<int> in_phase;
  std::vector<const Branch*> used;
  int branch = -1;
  const auto close = [&] {
    if (in_phase.empty()) return;
    Phase phase;
    const bool packs = kind_ == Stage::Kind::forward && packed_bytes;
    add_items(phase, in_phase, computation, threads, packs);
    if (kind_ == Stage::Kind::gradients || kind_ == Stage::Kind::key_gradient)
      assign_turns(phase, groups_, stage, computation.kv_heads, threads);
    if (packs) assign_packs(phase, groups_, ratio, computation.reproducible, packed_bytes);
    if (!phase.items.empty()) phases.push_back(std::move(phase));
    in_phase.clear();
    used.clear();
  };
  for (std::size_t g = 0; g < groups_.all().size(); ++g) {
    if (groups_.all()[g].branch != branch) {
      branch = groups_.all()[g].branch;
      const Branch& b = pattern.branches[static_cast<std::size_t>(branch)];
      const bool clash = std::any_of(used.begin(), used.end(),
                                     [&](const Branch* a) { return !apart(*a, b, ratio); });
      if (clash) close();
      used.push_back(&b);
    }
    in_phase.push_back(static_cast<int>(g));
  }
  close();
  phases.shrink_to_fit();
  for (Phase& phase : phases) phase.items.shrink_to_fit();
  phases_ = std::make_shared<const std::vector<Phase>>(std::move(phases));
}

void Work::add_items(Phase& phase, const std::vector<int>& groups, const Computation& computation,
                     int threads, bool packs) const {
  // Enough items to keep all threads busy to the end. Fewer and larger items reuse packed rows
  // better, unless the rows are packed once for all items.
  const std::int64_t wanted = (packs ? 8 : 4) * static_cast<std::int64_t>(threads);
  std::int64_t heads = 0;
  for (int g : groups) {
    const WorkGroup& group = groups_[g];
    heads +=
        group.entries.count_in(computation.batch) * static_cast<std::int64_t>(group.members.size());
  }
  const std::int64_t split = pieces(wanted, heads);  // pieces per head for that number of items
  std::vector<WorkItem> items;
  for (int g : groups) {
    const WorkGroup& group = groups_[g];
    std::int64_t q_size = group.query_rows;
    std::int64_t k_size = group.key_rows;
    const auto cut = [&](std::int64_t rows, std::int64_t least, std::int64_t into) {
      return std::max(least, (pieces(rows, into) + 31) / 32 * 32);
    };
    switch (kind_) {
      case Stage::Kind::forward:
        q_size = std::min<std::int64_t>(kQueryBlock, cut(q_size, 64, split));
        break;
      case Stage::Kind::gradients:
        // A grid of pieces x pieces: items with different rows can run in parallel.
        if (split > 1) {
          q_size = cut(q_size, 2 * kGradBlock, split);
          k_size = cut(k_size, 2 * kGradBlock, split);
        }
        break;
      case Stage::Kind::query_gradient:
        q_size = std::min<std::int64_t>(kQueryBlock, cut(q_size, kGradBlock, split));
        break;
      case Stage::Kind::key_gradient:
        k_size =
            std::min<std::int64_t>(max_key_chunk(computation.head_dim, computation.caps_or_drops()),
                                   cut(k_size, kGradBlock, split));
        break;
    }
    q_size = std::max<std::int64_t>(1, q_size);
    k_size = std::max<std::int64_t>(1, k_size);
    for (std::int64_t b = group.entries.begin; b < group.entries.end_in(computation.batch); ++b) {
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
            items.push_back(item);
          }
        }
      }
    }
  }
  // Few items: the longest first, so that threads end together. Many items: segment by segment, so
  // that heads, whose rows share pages, follow each other; the last item is a small part of the
  // work then.
  constexpr std::size_t kManyPerThread = 32;
  const auto add_in_order_of = [&](const auto& key_of) {
    std::vector<std::pair<decltype(key_of(items.front())), std::size_t>> order;
    order.reserve(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) order.emplace_back(key_of(items[i]), i);
    std::sort(order.begin(), order.end());  // equal keys: in the order of their numbers
    phase.items.reserve(items.size());
    for (const auto& [key, i] : order) phase.items.push_back(items[i]);
  };
  if (items.size() > kManyPerThread * static_cast<std::size_t>(threads)) {
    add_in_order_of([&](const WorkItem& item) {
      const WorkGroup& group = groups_[item.group];
      return std::tuple(item.batch, group.segment, group.branch, member(item).q_head);
    });
  } else {
    add_in_order_of([&](const WorkItem& item) {
      const WorkGroup& group = groups_[item.group];
      return -pair_estimate(item, group, groups_.rows(group));
    });
  }
}

std::size_t Work::turn_counters() const {
  std::size_t most = 0;
  for (const Phase& phase : *phases_) most = std::max(most, phase.turn_counters);
  return most;
}

bool Work::share_phases(const Work& other) {
  if (*phases_ != *other.phases_) return false;
  phases_ = other.phases_;
  return true;
}

std::int64_t Work::bytes(bool with_phases) const {
  std::size_t bytes = sizeof(Work);
  for (const Phase& phase : *phases_) {
    if (!with_phases) continue;
    bytes += sizeof(Phase) + phase.items.capacity() * sizeof(WorkItem) +
             phase.lists.capacity() * sizeof(KeyList) + phase.shares.capacity() * sizeof(KeyShare) +
             phase.wave_items.capacity() * sizeof(std::int32_t);
  }
  return static_cast<std::int64_t>(bytes) + groups_.bytes();
}

void Work::expand(const WorkItem& item, bool queries, std::span<const ChannelSource> channels,
                  int local_head, std::vector<RowRun>& runs) const {
  const WorkGroup& group = groups_[item.group];
  const WorkRows& rows = groups_.rows(group);
  expand(queries ? rows.queries : rows.keys, queries ? group.queries : group.keys, item.batch,
         member(item).unit_index, channels, local_head, runs);
}

void Work::expand(const KeyList& list, std::span<const ChannelSource> channels, int local_head,
                  std::vector<RowRun>& runs) const {
  const WorkGroup& group = groups_[list.group];
  expand(groups_.rows(group).keys, IndexFilter{}, list.batch,
         group.members[static_cast<std::size_t>(list.member)].unit_index, channels, local_head,
         runs);
}

void Work::expand(std::span<const RunTemplate> from, const IndexFilter& filter, std::int32_t batch,
                  int unit, std::span<const ChannelSource> channels, int local_head,
                  std::vector<RowRun>& runs) const {
  runs.clear();
  for (const RunTemplate& run : from) {
    filter.apply(run, [&](std::int32_t first, std::int32_t count) {
      RowRun& out = runs.emplace_back();
      out.index = run.index + first * run.index_stride;
      out.index_stride = run.index_stride;
      out.count = count;
      for (const ChannelSource& source : channels) {
        const auto c = static_cast<std::size_t>(source.channel);
        std::byte* base = nullptr;
        std::int64_t row = 0;
        const std::int64_t stride = source.kept ? 1 : run.store_stride;
        if (run.parcel < 0) {
          base = source.local.at(batch, local_head);
          row = source.local.row_step;
        } else {
          const ParcelLayout& layout = *source.received->layout;
          base = source.received->at(run.parcel) +
                 layout.offset(run.parcel, batch, unit, source.section);
          row = layout.section_bytes(source.section);
        }
        out.base[c] = base + ((source.kept ? run.kept : run.store_first) + first * stride) * row +
                      source.byte_offset;
        out.step[c] = stride * row;
      }
    });
  }
  if (!filter.keeps_all()) sort_by_index(runs);
}

}  // namespace annulus::cpu
