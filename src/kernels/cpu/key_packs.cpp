#include "kernels/cpu/key_packs.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>

#include "kernels/cpu/work.h"

namespace annulus::cpu {
namespace {

std::int64_t place_count(std::span<const RunTemplate> runs, bool canonical) {
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
  // Groups that skip shared pairs have the same rows as the other groups of their tile group.
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
    if (users[key] < 2)
      continue;  // a single item packs its keys itself, in scratch that stays in L2
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

  // Even waves use the first half of the memory, odd ones the second.
  std::int64_t half[2] = {0, 0};
  for (std::size_t w = 0; w < wave_bytes.size(); ++w)
    half[w % 2] = std::max(half[w % 2], wave_bytes[w]);
  for (KeyList& list : phase.lists) list.offset += list.wave % 2 == 0 ? 0 : half[0];
  phase.packed_bytes = half[0] + half[1];

  // Items of a list move to the place of the first of them, so waves stay in order.
  std::vector<std::size_t> first_of(phase.lists.size(), phase.items.size());
  std::vector<std::size_t> place(phase.items.size());
  phase.wave_items.assign(wave_bytes.size(), 0);
  for (std::size_t i = 0; i < place.size(); ++i) {
    place[i] = i;
    if (list_of[i] < 0) continue;
    const auto id = static_cast<std::size_t>(list_of[i]);
    place[i] = first_of[id] = std::min(first_of[id], i);
    ++phase.wave_items[static_cast<std::size_t>(phase.lists[id].wave)];
  }
  std::vector<std::size_t> order(place.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return place[a] < place[b]; });
  std::vector<WorkItem> items;
  items.reserve(order.size());
  for (const std::size_t i : order) {
    const auto at = static_cast<std::int32_t>(items.size());
    if (place[i] == i) phase.shares.push_back({list_of[i], at, at});
    ++phase.shares.back().end;
    items.push_back(phase.items[i]);
  }
  phase.items = std::move(items);
  phase.shares.shrink_to_fit();
}

void ShareRunner::reserve(const Phase& phase) {
  if (phase.shares.size() <= size_) return;  // there are at most as many waves
  size_ = phase.shares.size();
  shares_ = std::make_unique<Counters[]>(size_);
  wave_items_ = std::make_unique<std::atomic<std::int32_t>[]>(size_);
}

// A thread's work on a share: it takes pieces and items until none is left. A piece or item counts
// as done even if it throws. Waiting threads take the ones that it has not taken.
class ShareRunner::Visit {
 public:
  Visit(ShareRunner& runner, const Phase& phase, std::size_t index)
      : share_(phase.shares[index]), counters_(runner.shares_[index]) {
    if (share_.list < 0) return;
    list_ = &phase.lists[static_cast<std::size_t>(share_.list)];
    wave_items_ = &runner.wave_items_[static_cast<std::size_t>(list_->wave)];
  }

  void run(const Phase& phase, int slot, Pack pack, Attend attend) {
    for (std::int64_t piece = take_piece(); piece >= 0; piece = take_piece()) {
      const Done done([this] { finish_piece(); });
      pack(*list_, piece * kPackRows, slot);
    }
    if (list_ != nullptr) wait(counters_.pieces_left);
    for (std::int32_t item = take_item(); item >= 0; item = take_item()) {
      const Done done([this] { finish_item(); });
      attend(phase.items[static_cast<std::size_t>(item)], list_, slot);
    }
  }

 private:
  template <typename Finish>
  struct Done {
    explicit Done(Finish f) : finish(f) {}
    ~Done() { finish(); }
    Done(const Done&) = delete;
    Done& operator=(const Done&) = delete;
    Finish finish;
  };

  static void wait(const std::atomic<std::int32_t>& left) {
    for (int spins = 0; left.load(std::memory_order_acquire) != 0; ++spins)
      if (spins > 1000) std::this_thread::yield();
  }
  // Takes the next piece; -1: none is left.
  std::int32_t take_piece() {
    if (list_ == nullptr) return -1;
    const std::int32_t piece = counters_.pieces_taken.fetch_add(1, std::memory_order_relaxed);
    return piece < pieces(*list_) ? piece : -1;
  }
  std::int32_t take_item() {
    const std::int32_t item =
        share_.begin + counters_.items_taken.fetch_add(1, std::memory_order_relaxed);
    return item < share_.end ? item : -1;
  }
  void finish_piece() { counters_.pieces_left.fetch_sub(1, std::memory_order_release); }
  void finish_item() {
    if (wave_items_ != nullptr) wave_items_->fetch_sub(1, std::memory_order_release);
  }

  const KeyShare& share_;
  Counters& counters_;
  const KeyList* list_ = nullptr;
  std::atomic<std::int32_t>* wave_items_ = nullptr;
};

// A wave reuses the memory of the wave two before it, whose items must be done.
bool ShareRunner::has_memory(const Phase& phase, std::size_t share) const {
  const std::int32_t list = phase.shares[share].list;
  if (list < 0) return true;
  const std::int32_t wave = phase.lists[static_cast<std::size_t>(list)].wave;
  return wave < 2 ||
         wave_items_[static_cast<std::size_t>(wave - 2)].load(std::memory_order_acquire) == 0;
}

// Among the shares that are wanted(), the one with most items left to take, searching from `first`
// on. Returns the number of shares if nothing is left.
template <typename Wanted>
std::size_t ShareRunner::most_to_do(const Phase& phase, std::size_t first,
                                    const Wanted& wanted) const {
  const std::size_t count = phase.shares.size();
  std::size_t best = count;
  std::int32_t most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = (first + i) % count;
    const KeyShare& share = phase.shares[at];
    const std::int32_t left =
        share.end - share.begin - shares_[at].items_taken.load(std::memory_order_relaxed);
    if (left <= most || !wanted(at)) continue;
    most = left;
    best = at;
  }
  return best;
}

// While the share has no memory, helps earlier shares that have: with threads that only waited,
// dilation 4 at D 128, where a wave has 8 lists, took 1.17 times as long as dilation 1 (16
// threads). There is no deadlock, in whatever order shares begin: the first wave with unfinished
// items has its memory, and waiting threads take its remaining pieces and items.
void ShareRunner::work_on(const Phase& phase, std::size_t share, int slot, Pack pack,
                          Attend attend) {
  for (int spins = 0; !has_memory(phase, share); ++spins) {
    const std::size_t other =
        most_to_do(phase, 0, [&](std::size_t at) { return at < share && has_memory(phase, at); });
    if (other < share) {
      Visit(*this, phase, other).run(phase, slot, pack, attend);
    } else if (spins > 1000) {
      std::this_thread::yield();
    }
  }
  Visit(*this, phase, share).run(phase, slot, pack, attend);
}

// Takes a share that no thread has begun, if possible the same as in the previous call, whose
// memory is in this thread's cache. There always is one, because run() calls this once per share.
std::size_t ShareRunner::take_share(const Phase& phase, int slot) {
  const auto take = [&](std::size_t at) {
    return !shares_[at].begun.exchange(true, std::memory_order_relaxed);
  };
  const auto own = static_cast<std::size_t>(slot);
  if (own < phase.shares.size() && take(own)) return own;
  for (;;) {
    const std::size_t next = next_share_.fetch_add(1, std::memory_order_relaxed);
    if (take(next)) return next;
  }
}

void ShareRunner::run(ThreadPool& pool, const Phase& phase, Pack pack, Attend attend) {
  for (std::size_t i = 0; i < phase.shares.size(); ++i) {
    const std::int32_t list = phase.shares[i].list;
    const std::int32_t left = list < 0 ? 0 : pieces(phase.lists[static_cast<std::size_t>(list)]);
    shares_[i].begun.store(false, std::memory_order_relaxed);
    shares_[i].pieces_taken.store(0, std::memory_order_relaxed);
    shares_[i].pieces_left.store(left, std::memory_order_relaxed);
    shares_[i].items_taken.store(0, std::memory_order_relaxed);
  }
  for (std::size_t i = 0; i < phase.wave_items.size(); ++i)
    wave_items_[i].store(phase.wave_items[i], std::memory_order_relaxed);
  next_share_.store(0, std::memory_order_relaxed);
  const std::size_t shares = phase.shares.size();
  const std::int64_t helpers =
      std::min<std::int64_t>(pool.threads(), std::ssize(phase.items) - std::ssize(phase.shares));
  const auto body = [&](std::int64_t index, int slot) {
    const auto number = static_cast<std::size_t>(index);
    if (number < shares) return work_on(phase, take_share(phase, slot), slot, pack, attend);
    for (;;) {
      const std::size_t other =
          most_to_do(phase, number % shares, [](std::size_t) { return true; });
      if (other == shares) return;
      work_on(phase, other, slot, pack, attend);
    }
  };
  pool.run_parallel(std::ssize(phase.shares) + helpers, body);
}

}  // namespace annulus::cpu
