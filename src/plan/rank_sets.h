#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace annulus {

// Sets of ranks, stored once each: equal sets have equal ids, so row sets are compared and grouped
// by integer.
class RankSets {
 public:
  using Words = std::vector<std::uint64_t>;

  explicit RankSets(int ranks)
      : words_((static_cast<std::size_t>(ranks) + 63) / 64), ids_(64, Hash{this}, Equal{this}) {}
  RankSets(const RankSets&) = delete;  // the hash functors point here
  RankSets& operator=(const RankSets&) = delete;

  [[nodiscard]] Words none() const { return Words(words_, 0); }
  static void flip(Words& set, int rank) {
    set[static_cast<std::size_t>(rank) / 64] ^= std::uint64_t{1} << (rank % 64);
  }

  int intern(const Words& set) {
    bits_.insert(bits_.end(), set.begin(), set.end());
    return intern_back();
  }

  int unite(int a, int b) {
    if (a == b) return a;
    const auto key = static_cast<std::uint64_t>(std::min(a, b)) << 32U |
                     static_cast<std::uint64_t>(std::max(a, b));
    const auto [found, inserted] = unions_.try_emplace(key, 0);
    if (inserted) {
      bits_.resize(bits_.size() + words_);
      for (std::size_t i = 0; i < words_; ++i)
        bits_[bits_.size() - words_ + i] = words(a)[i] | words(b)[i];
      found->second = intern_back();
    }
    return found->second;
  }

  [[nodiscard]] bool contains(int id, int rank) const {
    return (words(id)[static_cast<std::size_t>(rank) / 64] >> (rank % 64) & 1U) != 0;
  }

  // The set and one more rank.
  int with(int id, int rank) {
    if (contains(id, rank)) return id;
    bits_.resize(bits_.size() + words_);
    std::uint64_t* added = bits_.data() + bits_.size() - words_;
    std::copy_n(words(id), words_, added);
    added[static_cast<std::size_t>(rank) / 64] |= std::uint64_t{1} << (rank % 64);
    return intern_back();
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

  [[nodiscard]] bool has_one_member(int id) const {
    int ones = 0;
    for (std::size_t i = 0; i < words_; ++i) ones += std::popcount(words(id)[i]);
    return ones == 1;
  }

 private:
  struct Hash {
    const RankSets* sets;
    std::size_t operator()(int id) const {
      std::uint64_t h = 0;
      for (std::size_t i = 0; i < sets->words_; ++i) {
        h = (h ^ sets->words(id)[i]) * 0x9E3779B97F4A7C15U;
        h ^= h >> 32U;
      }
      return h;
    }
  };
  struct Equal {
    const RankSets* sets;
    bool operator()(int a, int b) const {
      return std::equal(sets->words(a), sets->words(a) + sets->words_, sets->words(b));
    }
  };

  [[nodiscard]] const std::uint64_t* words(int id) const {
    return bits_.data() + static_cast<std::size_t>(id) * words_;
  }

  // The set just appended to bits_ gets the next id unless it is there already.
  int intern_back() {
    const int id = static_cast<int>(bits_.size() / words_) - 1;
    const auto [found, inserted] = ids_.insert(id);
    if (!inserted) bits_.resize(bits_.size() - words_);
    return *found;
  }

  std::size_t words_;
  std::vector<std::uint64_t> bits_;
  std::unordered_set<int, Hash, Equal> ids_;
  std::unordered_map<std::uint64_t, int> unions_;
};

}  // namespace annulus
