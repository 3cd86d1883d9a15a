#include "kernels/cpu/key_packs.h"

#include <algorithm>
#include <map>
#include <thread>
#include <tuple>

#include "kernels/cpu/work.h"

namespace annulus::cpu {
namespace {

std::int64_t place_count(const std::vector<RunTemplate>& runs, bool canonical) {
  std::int64_t rows = 0;
  for (const RunTemplate& run : runs)
    rows = canonical ? std::max<std::int64_t>(rows, run.last_index() + 1) : rows + run.count;
  return rows;
}

std::int32_t pieces(const KeyList& list) {
  return static_cast<std::int32_t>((list.rows + kPackRows - 1) / kPackRows);
}

}  // namespace

void assign_packs(Phase& phase, const WorkGroups& groups, int head_ratio, bool canonical,
                  const PackedBytes& packed_bytes) {
  // Groups that leave out pairs have the rows of one tile group in common.
  using Key = std::tuple<int, std::int32_t, int>;
  const auto key_of = [&](const WorkItem& item) {
    const WorkGroup& group = groups[item.group];
    const int head = group.members[static_cast<std::size_t>(item.member)].q_head;
    return Key{group.rows, item.batch, head / head_ratio};
  };
  std::map<Key, int> users;
  for (const WorkItem& item : phase.items) ++users[key_of(item)];

  std::map<Key, std::int32_t> ids;
  std::vector<std::int32_t> list_of(phase.items.size(), -1);
  std::vector<std::int64_t> wave_bytes;
  for (std::size_t i = 0; i < phase.items.size(); ++i) {
    const WorkItem& item = phase.items[i];
    const Key key = key_of(item);
    if (users[key] < 2) continue;  // who is alone packs as it goes, in memory that stays in L2
    const auto [found, is_new] = ids.try_emplace(key, static_cast<std::int32_t>(ids.size()));
    list_of[i] = found->second;
    if (!is_new) continue;
    KeyList list;
    list.group = item.group;
    list.member = item.member;
    list.batch = item.batch;
    list.rows = place_count(groups.rows(groups[item.group]).keys, canonical);
    const std::int64_t bytes = packed_bytes(list.rows);
    if (wave_bytes.empty() || wave_bytes.back() + bytes > kWaveBytes) wave_bytes.push_back(0);
    list.wave = static_cast<std::int32_t>(wave_bytes.size()) - 1;
    list.offset = wave_bytes.back();
    wave_bytes.back() += bytes;
    phase.lists.push_back(list);
  }
  if (phase.lists.empty()) return;

  // Even waves lie in front, odd ones behind them.
  std::int64_t half[2] = {0, 0};
  for (std::size_t w = 0; w < wave_bytes.size(); ++w)
    half[w % 2] = std::max(half[w % 2], wave_bytes[w]);
  for (KeyList& list : phase.lists) list.offset += list.wave % 2 == 0 ? 0 : half[0];
  phase.packed_bytes = half[0] + half[1];

  // Items by waves, otherwise in their order; those without a list as they come. A list's pieces
  // are ahead of its first item.
  std::vector<std::vector<PackStep>> waves(wave_bytes.size());
  std::vector<bool> packed(phase.lists.size(), false);
  std::size_t wave = 0;
  phase.wave_items.assign(wave_bytes.size(), 0);
  for (std::size_t i = 0; i < phase.items.size(); ++i) {
    const std::int32_t id = list_of[i];
    if (id >= 0) {
      const KeyList& list = phase.lists[static_cast<std::size_t>(id)];
      wave = static_cast<std::size_t>(list.wave);
      if (!packed[static_cast<std::size_t>(id)]) {
        packed[static_cast<std::size_t>(id)] = true;
        for (std::int64_t begin = 0; begin < list.rows; begin += kPackRows)
          waves[wave].push_back({id, -1, begin});
      }
      ++phase.wave_items[wave];
    }
    waves[wave].push_back({id, static_cast<std::int32_t>(i), 0});
  }
  for (const std::vector<PackStep>& steps : waves)
    phase.steps.insert(phase.steps.end(), steps.begin(), steps.end());
}

void PackCounters::reserve(const Phase& phase) {
  if (phase.lists.size() <= size_) return;  // there are at most as many waves
  size_ = phase.lists.size();
  pieces_ = std::make_unique<std::atomic<std::int32_t>[]>(size_);
  items_ = std::make_unique<std::atomic<std::int32_t>[]>(size_);
}

void PackCounters::begin(const Phase& phase) {
  for (std::size_t i = 0; i < phase.lists.size(); ++i)
    pieces_[i].store(pieces(phase.lists[i]), std::memory_order_relaxed);
  for (std::size_t i = 0; i < phase.wave_items.size(); ++i)
    items_[i].store(phase.wave_items[i], std::memory_order_relaxed);
}

PackCounters::Step::Step(PackCounters& counters, const Phase& phase, const PackStep& step) {
  if (step.list < 0) return;
  const auto list = static_cast<std::size_t>(step.list);
  const auto wave = static_cast<std::size_t>(phase.lists[list].wave);
  const auto wait = [](const std::atomic<std::int32_t>& left) {
    for (int spins = 0; left.load(std::memory_order_acquire) != 0; ++spins)
      if (spins > 1000) std::this_thread::yield();
  };
  if (step.item < 0) {
    if (wave >= 2) wait(counters.items_[wave - 2]);
    done_ = &counters.pieces_[list];
  } else {
    wait(counters.pieces_[list]);
    done_ = &counters.items_[wave];
  }
}

PackCounters::Step::~Step() {
  if (done_ != nullptr) done_->fetch_sub(1, std::memory_order_release);
}

}  // namespace annulus::cpu
