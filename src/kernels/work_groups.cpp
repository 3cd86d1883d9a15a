#include "kernels/work_groups.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace annulus {
namespace {

// The number of selected rows of `runs`, and of runs that have any.
struct Extent {
  std::int64_t rows = 0;
  std::size_t runs = 0;
};
Extent extent(std::span<const RunTemplate> runs, const IndexFilter& filter) {
  Extent out;
  for (const RunTemplate& run : runs) {
    filter.apply(run, [&](std::int32_t, std::int32_t count) {
      out.rows += count;
      ++out.runs;
    });
  }
  return out;
}

}  // namespace

// Which branch computes which pairs of a document: the same for documents of the same length.
class WorkGroups::Sharing {
 public:
  // With detached mixing, every branch computes all its pairs.
  Sharing(const Plan& plan, MixGradient mix, Sharings& by_length, Shares& shares)
      : plan_(plan),
        share_(mix == MixGradient::full && plan.options().same_positions()),
        by_length_(by_length),
        shares_(shares) {}

  void share_nothing() {
    share_ = false;
    last_ = nullptr;
    shares_.clear();
    by_length_.clear();
  }
  // All members of the tiles' selection.
  [[nodiscard]] const std::vector<Share>& of(const TileGroup& tiles, const Selection& selection) {
    const std::vector<Document>& documents = plan_.pattern().documents;
    const std::int64_t tokens = documents.empty()
                                    ? plan_.query_placement().tokens()
                                    : documents[static_cast<std::size_t>(tiles.document)].length();
    const std::tuple key(tiles.head_class, tiles.selection, tokens);
    if (last_ != nullptr && last_->first == key) return last_->second;
    const auto [found, is_new] = shares_.try_emplace(key);
    last_ = &*found;
    std::vector<Share>& shares = found->second;
    if (!is_new) return shares;
    for (const Selection::Member& member : selection.members) {
      const PairSharing& sharing = of(tokens, selection.branch, member.q_head);
      const auto like = std::find_if(shares.begin(), shares.end(),
                                     [&](const Share& share) { return *share.sharing == sharing; });
      if (like == shares.end()) {
        shares.push_back({&sharing, {member}});
      } else {
        like->members.push_back(member);
      }
    }
    return shares;
  }

 private:
  [[nodiscard]] const PairSharing& of(std::int64_t tokens, int branch, int head) {
    std::vector<std::vector<PairSharing>>& heads = by_length_[tokens];
    if (heads.empty()) heads.resize(static_cast<std::size_t>(plan_.pattern().heads));
    std::vector<PairSharing>& branches = heads[static_cast<std::size_t>(head)];
    if (branches.empty()) branches = share_pairs(plan_.pattern(), {tokens, share_}, head);
    return branches[static_cast<std::size_t>(branch)];
  }

  const Plan& plan_;
  bool share_;
  Sharings& by_length_;
  Shares& shares_;
  const Shares::value_type* last_ = nullptr;  // asked for
};

bool apart(const Branch& a, const Branch& b, int ratio) {
  const bool same = a.segment_length == b.segment_length && a.dilation == b.dilation;
  const std::size_t heads = a.offset.size();
  const auto group = static_cast<std::size_t>(ratio);
  for (std::size_t h = 0; h < heads; ++h) {
    if (a.offset[h] < 0) continue;
    for (std::size_t other = h / group * group; other < (h / group + 1) * group; ++other) {
      if (b.offset[other] >= 0 && (!same || a.offset[h] == b.offset[other])) return false;
    }
  }
  return true;
}

std::span<RunTemplate> WorkGroups::add_runs(const std::vector<PlacedRows>& rows, std::int64_t zero,
                                            std::int64_t dilation) {
  const std::size_t first = runs_.size();
  for (const PlacedRows& placed : rows) {
    RunTemplate run;
    run.parcel = placed.parcel;
    run.store_first = placed.store_first;
    run.store_stride = placed.store_stride;
    run.index = static_cast<std::int32_t>((placed.rows.first - zero) / dilation);
    run.index_stride =
        static_cast<std::int32_t>(std::max<std::int64_t>(1, placed.rows.stride / dilation));
    run.count = static_cast<std::int32_t>(placed.rows.count);
    runs_.push_back(run);
  }
  return std::span(runs_).subspan(first);
}

WorkGroups::WorkGroups(const Stage& stage, const Computation& computation,
                       std::int64_t least_chains) {
  const Plan& plan = *stage.plan;
  const Pattern& pattern = *computation.pattern;
  const std::vector<TileGroup> tile_groups = plan.tile_groups(stage.first_step, stage.last_step);
  const auto selection_of = [&](const TileGroup& tiles) -> const Selection& {
    return plan.classes()[static_cast<std::size_t>(tiles.head_class)]
        .selections[static_cast<std::size_t>(tiles.selection)];
  };

  const auto entries_of = [&](const TileGroup& tiles) {
    return plan.classes()[static_cast<std::size_t>(tiles.head_class)].entries;
  };

  Sharing sharing(plan, computation.mix_gradient, sharings_, shares_);
  if (stage.kind == Stage::Kind::gradients) {
    // Groups that skip shared pairs have to add to the keys of a segment one after the other. If
    // that would leave threads idle, every branch computes all its pairs.
    std::vector<std::int64_t> chains(pattern.branches.size(), 0);
    std::vector<bool> guest(pattern.branches.size(), false);
    for (const TileGroup& tiles : tile_groups) {
      const Selection& selection = selection_of(tiles);
      const auto branch = static_cast<std::size_t>(selection.branch);
      chains[branch] += entries_of(tiles).count_in(computation.batch) *
                        static_cast<std::int64_t>(selection.members.size());
      for (const Share& share : sharing.of(tiles, selection)) {
        if (share.sharing->host >= 0) guest[branch] = true;
      }
    }
    for (std::size_t branch = 0; branch < chains.size(); ++branch) {
      if (guest[branch] && chains[branch] < least_chains) sharing.share_nothing();
    }
  }

  std::size_t runs = 0;
  for (const TileGroup& tiles : tile_groups) runs += tiles.queries.size() + tiles.keys.size();
  runs_.reserve(runs);  // rows point into it
  rows_.reserve(tile_groups.size());
  groups_.reserve(tile_groups.size());
  for (const TileGroup& tiles : tile_groups) {
    const Selection& selection = selection_of(tiles);
    const Branch& branch = pattern.branches[static_cast<std::size_t>(selection.branch)];
    const std::span<RunTemplate> queries =
        add_runs(tiles.queries, tiles.query_origin + selection.offset, branch.dilation);
    rows_.push_back(
        {queries, add_runs(tiles.keys, tiles.key_origin + selection.offset, branch.dilation)});
    if (computation.kept != nullptr && stage.kind == Stage::Kind::forward) {
      const int head = selection.members.front().q_head;  // all have the same offset
      for (RunTemplate& run : queries) {
        run.kept = static_cast<std::int32_t>(computation.kept->rank(
            selection.branch, entries_of(tiles).begin, head, run.store_first));
      }
    }
    // Both rows of a pair belong to one selection, so their positions differ by a multiple of the
    // dilation.
    const Band band =
        tiles.band.shifted_by(tiles.query_origin - tiles.key_origin).divided_by(branch.dilation);
    // One group for all members that share alike.
    for (const Share& share : sharing.of(tiles, selection)) {
      WorkGroup group;
      group.branch = selection.branch;
      group.offset = selection.offset;
      group.segment = tiles.segment;
      group.entries = entries_of(tiles);
      group.rows = static_cast<int>(rows_.size()) - 1;
      group.band = band;
      group.tokens = {tiles.query_origin + selection.offset, tiles.key_origin + selection.offset,
                      branch.dilation};
      group.repeats = share.sharing->repeats;
      group.members = share.members;
      if (share.sharing->host < 0) {
        add(group);
      } else {
        add_shared(group, *share.sharing, stage.kind);
      }
    }
  }
}

void WorkGroups::add(WorkGroup group) {
  const WorkRows& rows = rows_[static_cast<std::size_t>(group.rows)];
  const Extent queries = extent(rows.queries, group.queries);
  const Extent keys = extent(rows.keys, group.keys);
  if (queries.rows == 0 || keys.rows == 0) return;
  group.query_rows = queries.rows;
  group.key_rows = keys.rows;
  // All keys of the tile group, because packing ignores filters.
  longest_run_list_ = std::max({longest_run_list_, queries.runs, keys.runs, rows.keys.size()});
  groups_.push_back(std::move(group));
}

// A group per segment of the host. If items own key rows, the keys are within that segment and the
// queries outside it, otherwise the other way round.
void WorkGroups::add_shared(const WorkGroup& like, const PairSharing& sharing, Stage::Kind kind) {
  const bool keys_within = kind == Stage::Kind::key_gradient;
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
    group.host_begin = static_cast<std::int32_t>(begin);
    const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(
        begin + sharing.host_rows, std::numeric_limits<std::int32_t>::max()));
    IndexFilter within;
    within.begin = group.host_begin;
    within.end = end;
    IndexFilter outside;
    if (like.band.most > 0) {
      outside.gap = {group.host_begin, end};
    } else if (keys_within) {
      outside.begin = end;
    } else {
      outside.end = group.host_begin;
    }
    group.queries = keys_within ? outside : within;
    group.keys = keys_within ? within : outside;
    add(std::move(group));
  }
}

std::int64_t WorkGroups::bytes() const {
  std::size_t bytes = rows_.size() * sizeof(WorkRows) + runs_.size() * sizeof(RunTemplate);
  for (const auto& [length, heads] : sharings_) {
    for (const std::vector<PairSharing>& branches : heads) {
      for (const PairSharing& sharing : branches)
        bytes += sizeof(PairSharing) + sharing.repeats.capacity() * sizeof(Repeat);
    }
  }
  for (const auto& [key, shares] : shares_) {
    for (const Share& share : shares)
      bytes += sizeof(Share) + share.members.capacity() * sizeof(Selection::Member);
  }
  bytes += groups_.size() * sizeof(WorkGroup);
  return static_cast<std::int64_t>(bytes);
}

}  // namespace annulus
