#include "kernels/cuda/work/launch_traits.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "kernels/cuda/work/lists.h"

namespace annulus::cuda {
namespace {

// Counts rows of runs by (received, stride).
using RowsByPlace = std::map<std::pair<bool, std::int32_t>, std::int64_t>;

std::pair<bool, std::int32_t> usual_place(const RowsByPlace& rows_by_place) {
  std::pair<bool, std::int32_t> place{false, 1};
  std::int64_t most = 0;
  for (const auto& [candidate, rows] : rows_by_place) {
    if (rows > most) {
      place = candidate;
      most = rows;
    }
  }
  return place;
}

Limits limits_of(const Tables& tables, const Group& group) {
  const Band band = group.band();
  if (band.full() || group.queries.rows == 0 || group.keys.rows == 0) return Limits::none;
  const Stretch queries = indices_of(tables, group.queries);
  const Stretch keys = indices_of(tables, group.keys);
  if (keys.first - queries.last < band.least) return Limits::both;
  return keys.last - queries.first > band.most ? Limits::most : Limits::none;
}

// See PairWeights.
bool periodic_weights(const Tables& tables, const Group& group) {
  for (std::int32_t i = 0; i < group.repeats; ++i) {
    const Repeat& repeat = tables.repeats[static_cast<std::size_t>(group.first_repeat + i)];
    if (16 % repeat.stride != 0) return false;
  }
  return std::ranges::all_of(runs_of(tables, group.keys), [](const Run& run) {
    return (run.index_stride == 1 || run.count == 1) && (run.index - run.before) % 16 == 0;
  });
}

// The number of tiles of `tile` keys of which the item's queries see any (at least 1).
std::int64_t key_tiles(const Tables& tables, const Item& item, int tile) {
  const Group& group = group_of(tables, item);
  const Band band = group.band();
  if (band.full() || item.rows == 0)
    return std::max<std::int64_t>(1, (group.keys.rows + tile - 1) / tile);
  const Stretch queries = indices_of(tables, group.queries, item.begin, item.rows);
  return std::max<std::int64_t>(1, count_tiles(tables, group.keys, band.keys_of(queries), tile));
}

}  // namespace

LaunchTraits launch_traits(const Tables& tables, const Launch& launch) {
  LaunchTraits traits;
  RowsByPlace query_rows;
  RowsByPlace key_rows;
  std::int32_t seen = -1;
  for (const Item& item : items_of(tables, launch)) {
    if (item.rows == 0 || item.group == seen) continue;
    seen = item.group;
    const Group& group = group_of(tables, item);
    traits.limits = std::max(traits.limits, limits_of(tables, group));
    if (group.repeats > 0) {
      traits.weights =
          std::max(traits.weights,
                   periodic_weights(tables, group) ? PairWeights::periodic : PairWeights::general);
    }
    for (const Run& run : runs_of(tables, group.queries))
      query_rows[{run.source >= 0, run.stride}] += run.count;
    for (const Run& run : runs_of(tables, group.keys))
      key_rows[{run.source >= 0, run.stride}] += run.count;
  }
  std::tie(traits.queries_received, traits.query_stride) = usual_place(query_rows);
  std::tie(traits.keys_received, traits.key_stride) = usual_place(key_rows);
  return traits;
}

std::vector<std::int32_t> parcels_of(const Tables& tables, const Launch& launch, Side side) {
  std::set<std::int32_t> parcels;
  std::int32_t seen = -1;
  for (const Item& item : items_of(tables, launch)) {
    if (item.rows == 0 || item.group == seen) continue;
    seen = item.group;
    const Group& group = group_of(tables, item);
    for (const Run& run : runs_of(tables, side == Side::queries ? group.queries : group.keys)) {
      if (run.source >= 0) parcels.insert(run.source);
    }
  }
  return {parcels.begin(), parcels.end()};
}

RowGrid grid_of(const ParcelRows& parcels, std::span<const std::int32_t> used,
                std::int64_t row_bytes, std::int64_t step) {
  RowGrid grid;
  if (parcels.layout == nullptr) return grid;
  const ParcelLayout& layout = *parcels.layout;
  const std::byte* end = nullptr;
  for (const std::int32_t parcel : used) {
    std::byte* const base = parcels.at(parcel);
    if (base == nullptr) return {};
    if (grid.base == nullptr || std::less<>{}(base, grid.base)) grid.base = base;
    end = std::max<const std::byte*>(end, base + layout.bytes(parcel), std::less<>{});
  }
  if (grid.base == nullptr) return {};
  for (const std::int32_t parcel : used) {
    bool fits = (parcels.at(parcel) - grid.base) % step == 0;
    for (int section = 0; section < layout.sections(); ++section) {
      // The units of all batches are consecutive.
      for (int unit = 0; unit < 2; ++unit)
        fits = fits && layout.offset(parcel, layout.first_entry(parcel), unit, section) % step == 0;
    }
    if (!fits) return {};
  }
  grid.rows = (end - grid.base) / row_bytes;
  grid.step = step;
  return grid;
}

std::vector<Item> arrange_items(const Tables& tables, const Launch& launch, int blocks, int tile) {
  const std::span<const Item> given = items_of(tables, launch);
  std::vector<Item> items(given.begin(), given.end());
  std::erase_if(items, [](const Item& item) { return item.rows == 0; });
  const auto count = static_cast<std::int64_t>(items.size());
  if (count <= blocks) return items;

  // The fixed cost of an item is about that of 1.6 key tiles (H200, head dim 128).
  std::vector<std::pair<std::int64_t, std::size_t>> order(items.size());  // cost, item
  for (std::size_t i = 0; i < items.size(); ++i)
    order[i] = {10 * key_tiles(tables, items[i], tile) + 16, i};
  // The last few items of each block are sorted by cost, so that blocks end at about the same time.
  const std::int64_t tail = std::min<std::int64_t>(count, 4 * static_cast<std::int64_t>(blocks));
  std::stable_sort(order.end() - tail, order.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });

  // Assigns each item to the block that is free first, as if blocks took them from a queue.
  using Free = std::pair<std::int64_t, std::size_t>;  // (time, block)
  std::priority_queue<Free, std::vector<Free>, std::greater<>> free;
  std::vector<std::vector<std::size_t>> of_block(static_cast<std::size_t>(blocks));
  for (std::size_t block = 0; block < of_block.size(); ++block) free.push({0, block});
  std::size_t rounds = 0;
  for (const auto& [cost, item] : order) {
    const auto [when, block] = free.top();
    free.pop();
    of_block[block].push_back(item);
    rounds = std::max(rounds, of_block[block].size());
    free.push({when + cost, block});
  }
  std::vector<Item> arranged;
  arranged.reserve(rounds * of_block.size());
  for (std::size_t round = 0; round < rounds; ++round) {
    for (const std::vector<std::size_t>& own : of_block) {
      if (round < own.size()) {
        arranged.push_back(items[own[round]]);
      } else {
        arranged.push_back({.rows = 0});
      }
    }
  }
  while (!arranged.empty() && arranged.back().rows == 0) arranged.pop_back();
  return arranged;
}

}  // namespace annulus::cuda
