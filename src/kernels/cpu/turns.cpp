#include "kernels/cpu/turns.h"

#include <algorithm>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace annulus::cpu {

void assign_turns(Phase& phase, const WorkGroups& groups, const Stage& stage, int kv_heads,
                  int threads) {
  const bool query_rows = stage.kind == Stage::Kind::gradients;
  const int ratio = stage.plan->pattern().heads / kv_heads;
  const auto q_head = [&](const WorkItem& item) {
    return groups[item.group].members[static_cast<std::size_t>(item.member)].q_head;
  };
  // Items may add to the same key rows but split them differently. They count as touching all keys
  // of the segment. This happens if queries travel, because query heads that share a K/V head may
  // be in different groups; and in groups that skip shared pairs, which split keys at the host's
  // segment or have keys on both sides of it.
  std::set<int> with_gaps;
  for (const WorkGroup& group : groups.all())
    if (!group.whole && (query_rows || ratio > 1)) with_gaps.insert(group.branch);
  const auto coarse = [&](const WorkGroup& group) {
    return (stage.plan->options().travel == Travel::queries && ratio > 1) ||
           with_gaps.contains(group.branch);
  };
  // Items that touch the same rows get the same number. Returns how many numbers there are.
  using Rows = std::tuple<int, int, std::int64_t, std::int64_t, std::int32_t, std::int64_t>;
  const auto number = [&](std::int32_t WorkItem::*turns, const auto& rows_of) {
    std::vector<std::pair<Rows, std::size_t>> rows;
    rows.reserve(phase.items.size());
    for (std::size_t i = 0; i < phase.items.size(); ++i) {
      const WorkItem& item = phase.items[i];
      rows.emplace_back(rows_of(item, groups[item.group]), i);
    }
    std::sort(rows.begin(), rows.end());
    std::int32_t numbers = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i == 0 || rows[i].first != rows[i - 1].first) ++numbers;
      phase.items[rows[i].second].*turns = numbers - 1;
    }
    return numbers;
  };
  std::int32_t query_numbers = 0;
  if (query_rows) {
    query_numbers =
        number(&WorkItem::query_turns, [&](const WorkItem& item, const WorkGroup& group) {
          return Rows(q_head(item), group.branch, group.offset, group.segment, item.batch,
                      group.host_begin + item.query_begin);
        });
  }
  const std::int32_t key_numbers =
      number(&WorkItem::key_turns, [&](const WorkItem& item, const WorkGroup& group) {
        return Rows(q_head(item) / ratio, group.branch, group.offset, group.segment, item.batch,
                    coarse(group) ? -1 : group.host_begin + item.key_begin);
      });
  // In canonical order, a key row is summed by query head.
  if (!query_rows) {
    std::stable_sort(phase.items.begin(), phase.items.end(),
                     [&](const WorkItem& a, const WorkItem& b) {
                       return q_head(a) % ratio < q_head(b) % ratio;
                     });
  } else {
    // Greedy: the next item is the first that shares no rows with the previous threads - 1 items.
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
  std::vector<std::int32_t> query_next(static_cast<std::size_t>(query_numbers), 0);
  std::vector<std::int32_t> key_next(static_cast<std::size_t>(key_numbers), 0);
  for (WorkItem& item : phase.items) {
    if (query_rows) item.query_turn = query_next[static_cast<std::size_t>(item.query_turns)]++;
    item.key_turn = key_next[static_cast<std::size_t>(item.key_turns)]++;
    item.key_turns += query_numbers;
  }
  phase.turn_counters = query_next.size() + key_next.size();
}

// No deadlock: items start in list order, and predecessors are earlier in the list, so they are
// already running on other threads.
Turns::Turn::Turn(Turns& turns, const WorkItem& item) : turns_(turns), item_(item) {
  const auto wait = [&](std::int32_t counter, std::int32_t turn) {
    if (counter < 0) return;
    const std::atomic<std::int32_t>& next = turns_.counters_[static_cast<std::size_t>(counter)];
    for (int spins = 0; next.load(std::memory_order_acquire) != turn; ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
  };
  wait(item.query_turns, item.query_turn);
  wait(item.key_turns, item.key_turn);
}

Turns::Turn::~Turn() {
  for (const std::int32_t counter : {item_.query_turns, item_.key_turns}) {
    if (counter >= 0)
      turns_.counters_[static_cast<std::size_t>(counter)].fetch_add(1, std::memory_order_release);
  }
}

}  // namespace annulus::cpu
