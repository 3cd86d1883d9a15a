#include "kernels/cuda/work/chains.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "annulus/error.h"
#include "kernels/cuda/work/lists.h"

namespace annulus::cuda {
namespace {

using Interval = std::pair<std::int64_t, std::int64_t>;  // first and last

// First and last position of the item's rows of dQ, in one member. The last is before the first if
// the item has no rows.
Interval positions(const Tables& tables, const Item& item) {
  const Group& group = group_of(tables, item);
  const RowList& list = group.queries;
  if (list.ascending == 0) return {0, list.rows - 1};
  const Stretch all = indices_of(tables, list);
  const Stretch seeing =
      group.band().queries_of(indices_of(tables, group.keys, item.begin, item.rows));
  return {std::max(all.first, seeing.first), std::min(all.last, seeing.last)};
}

std::vector<std::int32_t> heads_of(const Tables& tables, const Item& item) {
  std::vector<std::int32_t> heads;
  for (std::int32_t m = 0; m < item.members; ++m)
    heads.push_back(tables.members[static_cast<std::size_t>(item.member + m)].head);
  return heads;
}

// From the first to the last row of the list, by source.
std::map<std::int32_t, Interval> extents(const Tables& tables, const RowList& list) {
  std::map<std::int32_t, Interval> out;
  for (const Run& run : runs_of(tables, list)) {
    const std::int64_t last = run.first + (run.count - 1) * std::int64_t{run.stride};
    const Interval here{std::min(run.first, last), std::max(run.first, last)};
    const auto [at, fresh] = out.try_emplace(run.source, here);
    if (fresh) continue;
    at->second.first = std::min(at->second.first, here.first);
    at->second.second = std::max(at->second.second, here.second);
  }
  return out;
}

// The items of a launch, while they are put into chains.
class Wave {
 public:
  struct Chain {
    std::vector<std::int32_t> heads;
    std::int32_t first_entry;  // of the batch
    bool ascending;            // required to compare positions of several groups
    std::vector<Item> items;   // of all batches
  };

  // Returns false if the items do not fit into one chain of the wave.
  bool add(const Tables& tables, std::span<const Item> items) {
    const Group& group = group_of(tables, items.front());
    const RowList& queries = group.queries;
    const std::vector<std::int32_t> heads = heads_of(tables, items.front());
    const std::int32_t entry = items.front().batch;  // groups of other entries have other rows
    const std::map<std::int32_t, Interval> rows = extents(tables, queries);
    std::optional<std::size_t> chain;
    for (const std::int32_t head : heads) {
      for (const auto& [source, interval] : rows) {
        auto& taken = taken_[{entry, group.branch, head, source}];
        for (auto at = first_after(taken, interval.first);
             at != taken.end() && at->first <= interval.second; ++at) {
          if (chain.has_value() && *chain != at->second.second) return false;
          chain = at->second.second;
        }
      }
    }
    if (!chain.has_value()) {
      chain = chains_.size();
      chains_.push_back({heads, entry, queries.ascending != 0, {}});
    } else if (chains_[*chain].heads != heads || !chains_[*chain].ascending ||
               queries.ascending == 0) {
      return false;
    }
    for (const std::int32_t head : heads) {
      for (const auto& [source, interval] : rows) {
        auto& taken = taken_[{entry, group.branch, head, source}];
        Interval all = interval;
        for (auto at = first_after(taken, interval.first);
             at != taken.end() && at->first <= interval.second; at = taken.erase(at)) {
          all.first = std::min(all.first, at->first);
          all.second = std::max(all.second, at->second.first);
        }
        taken[all.first] = {all.second, *chain};
      }
    }
    chains_[*chain].items.insert(chains_[*chain].items.end(), items.begin(), items.end());
    return true;
  }

  [[nodiscard]] const std::vector<Chain>& chains() const { return chains_; }

 private:
  // Disjoint intervals of rows: first row to last row and chain.
  using Taken = std::map<std::int64_t, std::pair<std::int64_t, std::size_t>>;
  static Taken::iterator first_after(Taken& taken, std::int64_t first) {
    auto at = taken.upper_bound(first);
    if (at != taken.begin() && std::prev(at)->second.first >= first) --at;
    return at;
  }

  std::vector<Chain> chains_;
  // Per first batch entry, branch (those of a launch have no row in common), head and source.
  std::map<std::array<std::int32_t, 4>, Taken> taken_;
};

// The items of a chain in one batch, those with the latest keys first. Under a causal mask or a
// window, no earlier item of the chain has the queries at which an item begins, so items follow
// each other at a distance.
std::vector<Item> in_turn(const Tables& tables, const Wave::Chain& chain, std::int32_t batch) {
  std::vector<std::pair<std::int64_t, Item>> order;
  for (const Item& item : chain.items) {
    if (item.batch == batch)
      order.emplace_back(
          indices_of(tables, group_of(tables, item).keys, item.begin, item.rows).first, item);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Item> out;
  out.reserve(order.size());
  for (const auto& [index, item] : order) out.push_back(item);
  return out;
}

// Average number of steps of an item.
double mean_steps(const Tables& tables, const std::vector<std::vector<Item>>& chains, int step) {
  double steps = 0;
  std::size_t items = 0;
  for (const std::vector<Item>& chain : chains) {
    items += chain.size();
    for (const Item& item : chain) {
      const auto [first, last] = positions(tables, item);
      const double rows = group_of(tables, item).queries.rows;
      const double of_list = group_of(tables, item).band().full()
                                 ? rows
                                 : std::min<double>(rows, static_cast<double>(last - first + 1));
      steps += item.members * std::max(1.0, of_list / step);
    }
  }
  return steps / static_cast<double>(std::max<std::size_t>(1, items));
}

// The turns of the items of a chain; `numbers` are their indices in the tables.
void add_turns(const Tables& tables, std::span<const std::int32_t> numbers,
               std::vector<ItemTurn>& turns) {
  std::int64_t span = 0;
  std::vector<Interval> of_items;
  for (const std::int32_t number : numbers) {
    of_items.push_back(positions(tables, tables.items[static_cast<std::size_t>(number)]));
    span = std::max(span, of_items.back().second + 1);
  }
  std::vector<std::int64_t> behind(numbers.size() + 1,
                                   -1);  // last position of this item and all after it
  for (std::size_t i = numbers.size(); i > 0; --i)
    behind[i - 1] = std::max(behind[i], of_items[i - 1].second);
  std::int64_t least = std::numeric_limits<std::int32_t>::max();  // of the items before
  std::int64_t most = -1;
  std::int32_t before = -1;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::int32_t number = numbers[i];
    const Item& item = tables.items[static_cast<std::size_t>(number)];
    const bool ascending = group_of(tables, item).queries.ascending != 0;
    const auto [first, last] = of_items[i];
    if (first > last) continue;  // it adds nothing, and no item waits for it
    if (span * item.members > std::numeric_limits<std::int32_t>::max() - 1)
      throw ConfigError(
          "deterministic: the queries of one K/V head in one segment are too many to be counted");
    ItemTurn& turn = turns[static_cast<std::size_t>(number)];
    turn.after = before;
    turn.alone = static_cast<std::int32_t>(std::max<std::int64_t>(0, least));
    // An item with rows after this one's last rows learns only from this one what earlier items
    // have done.
    turn.finish = before >= 0 && (!ascending || last < std::min(most, behind[i + 1])) ? 1 : 0;
    turn.span = static_cast<std::int32_t>(span);
    least = std::min(least, first);
    most = std::max(most, last);
    before = number;
  }
}

}  // namespace

std::vector<ItemTurn> put_in_chains(Tables& tables, const ChainOptions& options) {
  const std::vector<Item> given = std::move(tables.items);
  const std::vector<Launch> launches = std::move(tables.launches);
  tables.items.clear();
  tables.launches.clear();
  std::vector<ItemTurn> turns(given.size());
  for (const Launch& launch : launches) {
    std::vector<Wave> waves;
    const std::span<const Item> items{given.data() + launch.first_item,
                                      static_cast<std::size_t>(launch.items)};
    for (std::size_t begin = 0; begin < items.size();) {
      std::size_t end = begin;
      while (end < items.size() && items[end].group == items[begin].group &&
             items[end].member == items[begin].member)
        ++end;
      const std::span<const Item> together = items.subspan(begin, end - begin);
      if (std::none_of(waves.begin(), waves.end(),
                       [&](Wave& wave) { return wave.add(tables, together); })) {
        waves.emplace_back();
        static_cast<void>(waves.back().add(tables, together));
      }
      begin = end;
    }
    for (const Wave& wave : waves) {
      std::vector<std::vector<Item>> chains;
      for (const Wave::Chain& chain : wave.chains()) {
        const std::int32_t last_entry = std::ranges::max(chain.items, {}, &Item::batch).batch;
        for (std::int32_t b = chain.first_entry; b <= last_entry; ++b) {
          std::vector<Item> in_batch = in_turn(tables, chain, b);
          if (!in_batch.empty()) chains.push_back(std::move(in_batch));
        }
      }
      const auto count = static_cast<std::int64_t>(chains.size());
      // If the queries of a key begin at the key (causal), an item begins where earlier items were
      // already.
      const bool staggered = group_of(tables, chains.front().front()).most != kNoMost;
      const auto width = static_cast<std::int64_t>(
          staggered ? 1.0
                    : std::clamp(options.distance * options.blocks /
                                     mean_steps(tables, chains, options.step),
                                 1.0, static_cast<double>(count)));
      const std::int64_t bundles = (count + width - 1) / width;
      const auto first_item = static_cast<std::int32_t>(tables.items.size());
      std::vector<std::vector<std::int32_t>> numbers(chains.size());
      for (std::int64_t bundle = 0; bundle < bundles; ++bundle) {
        const auto begin = static_cast<std::size_t>(count * bundle / bundles);
        const auto end = static_cast<std::size_t>(count * (bundle + 1) / bundles);
        bool more = true;
        for (std::size_t i = 0; more; ++i) {
          more = false;
          for (std::size_t c = begin; c < end; ++c) {
            if (i >= chains[c].size()) continue;
            more = true;
            numbers[c].push_back(static_cast<std::int32_t>(tables.items.size()));
            tables.items.push_back(chains[c][i]);
          }
        }
      }
      for (const std::vector<std::int32_t>& chain : numbers) add_turns(tables, chain, turns);
      tables.launches.push_back(
          {launch.branch, first_item, static_cast<std::int32_t>(tables.items.size()) - first_item});
    }
  }
  return turns;
}

}  // namespace annulus::cuda
