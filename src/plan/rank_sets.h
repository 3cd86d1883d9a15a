#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace annulus {

// A list of sets of ranks as bits. The id of a set is its index.
class RankSetList {
 public:
  explicit RankSetList(int ranks)
      : ranks_(ranks), words_((static_cast<std::size_t>(ranks) + 63) / 64) {}

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] std::size_t words_per_set() const { return words_; }
  [[nodiscard]] int size() const { return static_cast<int>(bits_.size() / words_); }
  [[nodiscard]] const std::uint64_t* words(int id) const {
    return bits_.data() + static_cast<std::size_t>(id) * words_;
  }
  // Appends an empty set. The pointer is valid until the next change.
  std::uint64_t* append() {
    bits_.resize(bits_.size() + words_);
    return bits_.data() + bits_.size() - words_;
  }
  void pop() { bits_.resize(bits_.size() - words_); }

  [[nodiscard]] bool contains(int id, int rank) const {
    return (words(id)[static_cast<std::size_t>(rank) / 64] >> (rank % 64) & 1U) != 0;
  }
  // Members in [begin, end).
  [[nodiscard]] int count(int id, int begin, int end) const {
    if (begin >= end) return 0;
    const auto first = static_cast<std::size_t>(begin) / 64;
    const auto last = static_cast<std::size_t>(end - 1) / 64;
    int ones = 0;
    for (std::size_t i = first; i <= last; ++i) {
      std::uint64_t word = words(id)[i];
      if (i == first) word &= ~std::uint64_t{0} << (begin % 64);
      if (i == last) word &= ~std::uint64_t{0} >> (63 - (end - 1) % 64);
      ones += std::popcount(word);
    }
    return ones;
  }
  [[nodiscard]] int count(int id) const { return count(id, 0, ranks_); }

  // The next member after `rank` in cyclic order, `rank` itself if there is no other. The set is
  // not empty.
  [[nodiscard]] int next(int id, int rank) const {
    const std::uint64_t* set = words(id);
    auto i = static_cast<std::size_t>(rank) / 64;
    std::uint64_t word = rank % 64 == 63 ? 0 : set[i] & (~std::uint64_t{0} << (rank % 64 + 1));
    while (word == 0) {
      i = i + 1 == words_ ? 0 : i + 1;
      word = set[i];
    }
    return static_cast<int>(i) * 64 + std::countr_zero(word);
  }
  // The member before `rank` in cyclic order.
  [[nodiscard]] int previous(int id, int rank) const {
    const std::uint64_t* set = words(id);
    auto i = static_cast<std::size_t>(rank) / 64;
    std::uint64_t word = rank % 64 == 0 ? 0 : set[i] & (~std::uint64_t{0} >> (64 - rank % 64));
    while (word == 0) {
      i = i == 0 ? words_ - 1 : i - 1;
      word = set[i];
    }
    return static_cast<int>(i) * 64 + 63 - std::countl_zero(word);
  }

  [[nodiscard]] std::vector<int> members(int id) const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < words_; ++i) {
      for (std::uint64_t word = words(id)[i]; word != 0; word &= word - 1) {
        ranks.push_back(static_cast<int>(i) * 64 + std::countr_zero(word));
      }
    }
    return ranks;
  }

 private:
  int ranks_;
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

// Sets of ranks, stored once each: equal sets have equal ids, so row sets are compared and grouped
// by integer.
class RankSets {
 public:
  using Words = std::vector<std::uint64_t>;

  explicit RankSets(int ranks) : list_(ranks), ids_(64, Hash{this}, Equal{this}) {}
  RankSets(const RankSets&) = delete;  // the hash functors point to this object
  RankSets& operator=(const RankSets&) = delete;

  [[nodiscard]] const RankSetList& list() const { return list_; }
  [[nodiscard]] Words none() const { return Words(list_.words_per_set(), 0); }
  static void flip(Words& set, int rank) {
    set[static_cast<std::size_t>(rank) / 64] ^= std::uint64_t{1} << (rank % 64);
  }

  int intern(const Words& set) {
    std::copy(set.begin(), set.end(), list_.append());
    return intern_last();
  }

  int unite(int a, int b) {
    if (a == b) return a;
    const auto key = static_cast<std::uint64_t>(std::min(a, b)) << 32U |
                     static_cast<std::uint64_t>(std::max(a, b));
    const auto [found, inserted] = unions_.try_emplace(key, 0);
    if (inserted) {
      std::uint64_t* both = list_.append();
      for (std::size_t i = 0; i < list_.words_per_set(); ++i) {
        both[i] = list_.words(a)[i] | list_.words(b)[i];
      }
      found->second = intern_last();
    }
    return found->second;
  }

  // The set with `rank` added.
  int with(int id, int rank) {
    if (list_.contains(id, rank)) return id;
    std::uint64_t* more = list_.append();
    std::copy_n(list_.words(id), list_.words_per_set(), more);
    more[static_cast<std::size_t>(rank) / 64] |= std::uint64_t{1} << (rank % 64);
    return intern_last();
  }

  [[nodiscard]] bool contains(int id, int rank) const { return list_.contains(id, rank); }
  [[nodiscard]] std::vector<int> members(int id) const { return list_.members(id); }
  [[nodiscard]] bool has_one_member(int id) const { return list_.count(id) == 1; }

 private:
  struct Hash {
    const RankSets* sets;
    std::size_t operator()(int id) const {
      std::uint64_t h = 0;
      for (std::size_t i = 0; i < sets->list_.words_per_set(); ++i) {
        h = (h ^ sets->list_.words(id)[i]) * 0x9E3779B97F4A7C15U;
        h ^= h >> 32U;
      }
      return h;
    }
  };
  struct Equal {
    const RankSets* sets;
    bool operator()(int a, int b) const {
      const RankSetList& list = sets->list_;
      return std::equal(list.words(a), list.words(a) + list.words_per_set(), list.words(b));
    }
  };

  // Returns the id of the set that was just appended, and removes it again if an equal one exists.
  int intern_last() {
    const auto [found, inserted] = ids_.insert(list_.size() - 1);
    if (!inserted) list_.pop();
    return *found;
  }

  RankSetList list_;
  std::unordered_set<int, Hash, Equal> ids_;
  std::unordered_map<std::uint64_t, int> unions_;
};

}  // namespace annulus
