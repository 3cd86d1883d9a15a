#include "kernels/cuda/work/tables.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "kernels/cuda/work/lists.h"

namespace annulus::cuda {
namespace {

std::int32_t last_index(const Run& run) { return run.index + (run.count - 1) * run.index_stride; }

bool ascends(const std::vector<Run>& runs) {
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].index <= last_index(runs[i - 1])) return false;
  }
  return true;
}

// The same rows, sorted by index. Neighbours that are evenly spaced in one source become runs.
std::vector<Run> by_index(const std::vector<Run>& runs) {
  struct Row {
    std::int32_t index;
    std::int32_t source;
    std::int64_t at;
  };
  std::vector<Row> rows;
  for (const Run& run : runs) {
    for (std::int32_t i = 0; i < run.count; ++i)
      rows.push_back({run.index + i * run.index_stride, run.source,
                      run.first + static_cast<std::int64_t>(i) * run.stride});
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.index < b.index; });
  std::vector<Run> out;
  for (const Row& row : rows) {
    if (!out.empty() && out.back().source == row.source) {
      Run& run = out.back();
      const std::int64_t step = row.at - (run.first + (run.count - 1) * std::int64_t{run.stride});
      const std::int32_t index_step = row.index - last_index(run);
      if (run.count == 1) {
        run.stride = static_cast<std::int32_t>(step);
        run.index_stride = index_step;
      }
      if (step == run.stride && index_step == run.index_stride) {
        ++run.count;
        continue;
      }
    }
    Run run;
    run.source = row.source;
    run.count = 1;
    run.index = row.index;
    run.first = row.at;
    out.push_back(run);
  }
  return out;
}

// The groups of one launch, while it is being made.
struct Maker {
  const WorkGroups& work;
  const Computation& computation;
  Side side;
  int tile;
  bool canonical;
  Tables tables;

  RowList add_rows(std::span<const RunTemplate> templates, const IndexFilter& filter) {
    std::vector<Run> runs;
    for (const RunTemplate& from : templates) {
      filter.apply(from, [&](std::int32_t first, std::int32_t count) {
        Run run;
        run.source = from.parcel;
        run.count = count;
        run.index = from.index + first * from.index_stride;
        run.index_stride = from.index_stride;
        run.stride = static_cast<std::int32_t>(from.store_stride);
        run.first = from.store_first + first * from.store_stride;
        runs.push_back(run);
      });
    }
    std::stable_sort(runs.begin(), runs.end(),
                     [](const Run& a, const Run& b) { return a.index < b.index; });
    if (canonical && !ascends(runs)) runs = by_index(runs);
    RowList list;
    list.begin = static_cast<std::int32_t>(tables.runs.size());
    list.runs = static_cast<std::int32_t>(runs.size());
    list.ascending = ascends(runs) ? 1 : 0;
    list.by_index = canonical ? 1 : 0;
    for (Run& run : runs) {
      run.before = list.rows;
      list.rows += run.count;
      tables.runs.push_back(run);
    }
    return list;
  }

  // Returns the group's index.
  std::int32_t add_group(const WorkGroup& from) {
    Group group;
    group.queries = add_rows(work.rows(from).queries, from.queries);
    group.keys = add_rows(work.rows(from).keys, from.keys);
    group.set_band(from.band);
    group.first_repeat = static_cast<std::int32_t>(tables.repeats.size());
    group.repeats = static_cast<std::int32_t>(from.repeats.size());
    group.branch = from.branch;
    group.dilation = static_cast<std::int32_t>(
        computation.pattern->branches[static_cast<std::size_t>(from.branch)].dilation);
    group.first_query = from.tokens.first_query;
    group.first_key = from.tokens.first_key;
    tables.repeats.insert(tables.repeats.end(), from.repeats.begin(), from.repeats.end());
    tables.groups.push_back(group);
    return static_cast<std::int32_t>(tables.groups.size()) - 1;
  }
};

// The branches of each launch, the coarsest first.
std::vector<std::vector<int>> branches_of_launches(const Computation& computation) {
  const std::vector<Branch>& branches = computation.pattern->branches;
  const int ratio = computation.heads() / computation.kv_heads;
  const auto branch = [&](int b) -> const Branch& { return branches[static_cast<std::size_t>(b)]; };
  std::vector<int> order(branches.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return branch(a).dilation > branch(b).dilation; });
  std::vector<std::vector<int>> out;
  for (const int b : order) {
    const auto joins = [&](int other) {
      return branch(other).dilation == branch(b).dilation && apart(branch(other), branch(b), ratio);
    };
    // A launch has one address of deltas.
    if (out.empty() || computation.deltas() > 1 || !std::ranges::all_of(out.back(), joins))
      out.emplace_back();
    out.back().push_back(b);
  }
  return out;
}

// The number of rows of the other side of an item.
std::int64_t cost_of(const Tables& tables, const Item& item, Side side) {
  const Group& group = group_of(tables, item);
  const Band band = group.band();
  const bool of_queries = side == Side::queries;
  const RowList& other = of_queries ? group.keys : group.queries;
  if (band.full() || item.rows == 0) return std::int64_t{item.members} * other.rows;
  const Stretch own =
      indices_of(tables, of_queries ? group.queries : group.keys, item.begin, item.rows);
  return item.members *
         count_rows(tables, other, of_queries ? band.keys_of(own) : band.queries_of(own));
}

}  // namespace

void Group::set_band(const Band& band) {
  const auto clamped = [](std::int64_t limit) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(limit, kNoLeast, kNoMost));
  };
  least = clamped(band.least);
  most = clamped(band.most);
}

Tables make_tables(const Stage& stage, const Computation& computation, Side side, int tile,
                   bool canonical) {
  Stage by_side = stage;
  if (stage.kind != Stage::Kind::forward) {
    by_side.kind = side == Side::queries ? Stage::Kind::query_gradient : Stage::Kind::key_gradient;
  }
  const WorkGroups work(by_side, computation, 0);
  Maker maker{work, computation, side, tile, canonical, {}};
  const int ratio = computation.heads() / computation.kv_heads;

  const std::vector<std::vector<int>> branches = branches_of_launches(computation);
  std::vector<std::size_t> launch_of(computation.pattern->branches.size());
  for (std::size_t launch = 0; launch < branches.size(); ++launch) {
    for (const int branch : branches[launch]) launch_of[static_cast<std::size_t>(branch)] = launch;
  }
  // Items by (launch, wave). If the query heads of a K/V head share pairs in different ways, its
  // key rows are in several groups of a branch. These groups are in separate waves, because they
  // write the same rows.
  std::vector<std::vector<std::vector<Item>>> items(branches.size());
  // First batch entry, segment, offset, K/V head.
  using Rows = std::tuple<std::int64_t, std::int64_t, std::int64_t, int>;
  std::map<std::pair<int, Rows>, std::vector<std::pair<int, int>>> users;
  std::vector<std::int64_t> segments;  // per group
  for (const WorkGroup& from : work.all()) {
    if (from.band.empty()) continue;
    const std::int32_t g = maker.add_group(from);
    segments.push_back(from.segment);
    const Group& group = maker.tables.groups.back();
    std::vector<Selection::Member> members(from.members.begin(), from.members.end());
    std::stable_sort(members.begin(), members.end(),
                     [](const auto& a, const auto& b) { return a.q_head < b.q_head; });
    const auto first_member = static_cast<std::int32_t>(maker.tables.members.size());
    for (const Selection::Member& member : members)
      maker.tables.members.push_back({member.q_head, member.q_head / ratio, member.unit_index});
    auto& waves = items[launch_of[static_cast<std::size_t>(from.branch)]];
    const std::int32_t rows = side == Side::queries ? group.queries.rows : group.keys.rows;
    const auto count = static_cast<std::int32_t>(members.size());
    for (std::int32_t m = 0; m < count;) {
      std::int32_t together = 1;
      std::size_t wave = 0;
      if (side == Side::keys) {
        const int kv_head = members[static_cast<std::size_t>(m)].q_head / ratio;
        while (m + together < count &&
               members[static_cast<std::size_t>(m + together)].q_head / ratio == kv_head)
          ++together;
        auto& who = users[{from.branch, {from.entries.begin, from.segment, from.offset, kv_head}}];
        const std::pair user{from.rows, members[static_cast<std::size_t>(m)].q_head};
        wave = static_cast<std::size_t>(std::find(who.begin(), who.end(), user) - who.begin());
        if (wave == who.size()) who.push_back(user);
      }
      if (waves.size() <= wave) waves.resize(wave + 1);
      for (std::int64_t b = from.entries.begin; b < from.entries.end_in(computation.batch); ++b) {
        for (std::int32_t begin = 0; begin < rows; begin += tile) {
          waves[wave].push_back({g, first_member + m, together, static_cast<std::int32_t>(b), begin,
                                 std::min<std::int32_t>(tile, rows - begin)});
        }
      }
      m += together;
    }
  }

  // Groups are ordered by head, then segment. The rows of all heads of a token are adjacent in
  // memory, so forward orders items by segment first: blocks that run at the same time then read
  // nearby memory (gpu_bench.py, 1M tokens, LongNet, causal: 0.81 of cuDNN's time, head by head
  // 0.84). It makes no difference in backward.
  const auto place = [&](const Item& item) {
    return std::pair(item.batch, segments[static_cast<std::size_t>(item.group)]);
  };
  Tables& tables = maker.tables;
  for (std::size_t launch = 0; launch < items.size(); ++launch) {
    for (std::vector<Item>& wave : items[launch]) {
      if (wave.empty()) continue;
      if (stage.kind == Stage::Kind::forward) {
        std::stable_sort(wave.begin(), wave.end(),
                         [&](const Item& a, const Item& b) { return place(a) < place(b); });
      }
      tables.launches.push_back({branches[launch].front(),
                                 static_cast<std::int32_t>(tables.items.size()),
                                 static_cast<std::int32_t>(wave.size())});
      tables.items.insert(tables.items.end(), wave.begin(), wave.end());
    }
  }
  return std::move(maker.tables);
}

void put_by_position(Tables& tables, int tile) {
  for (const Launch& launch : tables.launches) {
    std::int64_t seen = 0;  // from one position of a batch entry on
    bool narrow = true;
    for (const Item& item : items_of(tables, launch)) {
      const Group& group = group_of(tables, item);
      narrow = narrow && group.least != kNoLeast && group.most != kNoMost;
      if (!narrow) break;
      if (item.batch == 0 && item.begin == 0) seen += tile + std::int64_t{group.most} - group.least;
    }
    if (!narrow || seen > 2 * kCachedRows) continue;
    const auto first = tables.items.begin() + launch.first_item;
    std::stable_sort(first, first + launch.items, [](const Item& a, const Item& b) {
      return std::pair(a.batch, a.begin) < std::pair(b.batch, b.begin);
    });
  }
}

void put_longest_first(Tables& tables, Side side) {
  using Items = std::vector<Item>::iterator;
  const auto walked_rows = [&](const Item& item) {
    const Group& group = group_of(tables, item);
    return std::int64_t{item.members} *
           (side == Side::queries ? group.keys.rows : group.queries.rows);
  };
  std::vector<std::pair<std::int64_t, Item>> order;  // cost
  for (const Launch& launch : tables.launches) {
    const Items end = tables.items.begin() + launch.first_item + launch.items;
    for (Items begin = end - launch.items; begin != end;) {
      Items next = begin;
      for (std::int64_t rows = 0; next != end;) {
        rows += walked_rows(*next);
        if (next != begin && rows > kCachedRows) break;
        next = std::find_if(next, end, [of = *next](const Item& item) {
          return item.group != of.group || item.member != of.member || item.batch != of.batch;
        });
      }
      order.clear();
      for (auto item = begin; item != next; ++item)
        order.emplace_back(cost_of(tables, *item, side), *item);
      std::stable_sort(order.begin(), order.end(),
                       [](const auto& a, const auto& b) { return a.first > b.first; });
      for (const auto& [cost, item] : order) *begin++ = item;
    }
  }
}

}  // namespace annulus::cuda
