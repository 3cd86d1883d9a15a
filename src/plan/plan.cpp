#include "annulus/plan.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "annulus/error.h"
#include "plan/demand.h"
#include "plan/pair_counts.h"

namespace annulus {
namespace {

void check_options(const PlanOptions& options) {
  options.pattern.validate();
  const int heads = options.pattern.heads;
  if (options.kv_heads < 1 || heads % options.kv_heads != 0) {
    throw ConfigError("Plan: kv_heads is " + std::to_string(options.kv_heads) +
                      ", expected a divisor of the pattern's " + std::to_string(heads) +
                      " query heads");
  }
  if (options.queries.ranks() != options.keys.ranks()) {
    throw ConfigError(
        "Plan: queries are placed on " + std::to_string(options.queries.ranks()) +
        " ranks, keys on " + std::to_string(options.keys.ranks()) +
        ", expected the same number: a rank without rows of one side has empty ranges");
  }
  if (options.schedule != Schedule::ring && options.schedule != Schedule::gather) {
    throw ConfigError(
        "Plan: schedule is 'auto', expected 'ring' or 'gather': choose_schedule resolves 'auto'");
  }
}

// Units that select the same rows travel together. Classes are in the order of their first unit.
std::vector<HeadClass> head_classes(const PlanOptions& options) {
  using Key = std::set<std::pair<int, std::int64_t>>;  // (branch, offset)
  const Pattern& pattern = options.pattern;
  const int units = options.travel == Travel::keys ? options.kv_heads : pattern.heads;
  const int group = pattern.heads / units;  // query heads per unit

  std::vector<HeadClass> classes;
  std::map<Key, std::size_t> class_of;
  for (int unit = 0; unit < units; ++unit) {
    Key key;
    for (int head = unit * group; head < (unit + 1) * group; ++head) {
      for (int b = 0; b < static_cast<int>(pattern.branches.size()); ++b) {
        const Branch& branch = pattern.branches[static_cast<std::size_t>(b)];
        const std::int64_t offset = branch.offset[static_cast<std::size_t>(head)];
        if (offset >= 0) key.emplace(b, offset);
      }
    }
    const auto [found, inserted] = class_of.try_emplace(key, classes.size());
    if (inserted) {
      HeadClass& created = classes.emplace_back();
      for (const auto& [branch, offset] : key) created.selections.push_back({branch, offset, {}});
    }
    HeadClass& head_class = classes[found->second];
    const int slot = static_cast<int>(head_class.units.size());
    head_class.units.push_back(unit);
    for (Selection& selection : head_class.selections) {
      const Branch& branch = pattern.branches[static_cast<std::size_t>(selection.branch)];
      for (int head = unit * group; head < (unit + 1) * group; ++head) {
        if (branch.offset[static_cast<std::size_t>(head)] == selection.offset) {
          selection.members.push_back({slot, head});
        }
      }
    }
  }
  return classes;
}

// Rows x units that arrive in each step at the rank that gets most, summed over the steps of a ring
// that visits itineraries as they are or backwards: what a ring in lockstep waits for.
std::int64_t lockstep_rows(const std::vector<HeadClass>& classes,
                           const std::vector<Parcel>& parcels, int ranks, bool backwards) {
  std::vector<std::vector<std::int64_t>> arrived;  // [step][rank]
  for (const Parcel& parcel : parcels) {
    const std::size_t visits = parcel.itinerary.size();
    if (arrived.size() < visits) {
      arrived.resize(visits, std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 0));
    }
    const std::size_t units = classes[static_cast<std::size_t>(parcel.head_class)].units.size();
    for (std::size_t i = 0; i < visits; ++i) {
      const int rank = parcel.itinerary[backwards ? visits - 1 - i : i];
      arrived[i][static_cast<std::size_t>(rank)] +=
          parcel.row_count * static_cast<std::int64_t>(units);
    }
  }
  std::int64_t sum = 0;
  for (const auto& step : arrived) sum += *std::max_element(step.begin(), step.end());
  return sum;
}

using HopTable = std::vector<std::vector<std::vector<Hop>>>;  // [rank][step - 1]

void sort_hops(HopTable& table) {
  for (auto& steps : table) {
    for (auto& hops : steps) {
      std::sort(hops.begin(), hops.end(), [](const Hop& a, const Hop& b) {
        return std::tie(a.peer, a.parcel) < std::tie(b.peer, b.parcel);
      });
    }
  }
}

const std::vector<Hop>& hops_of(const char* where, const HopTable& table, int rank, int step) {
  const int ranks = static_cast<int>(table.size());
  const int steps = static_cast<int>(table.front().size());
  if (rank < 0 || rank >= ranks || step < 1 || step > steps) {
    throw ConfigError(std::string(where) + ": found rank " + std::to_string(rank) + ", step " +
                      std::to_string(step) + ", expected a rank below " + std::to_string(ranks) +
                      " and a step within 1.." + std::to_string(steps));
  }
  return table[static_cast<std::size_t>(rank)][static_cast<std::size_t>(step) - 1];
}

// FNV-1a over 64-bit words, lowest byte first: the same on every machine.
class Fnv1a {
 public:
  void add(std::uint64_t word) {
    for (int i = 0; i < 8; ++i, word >>= 8U) hash_ = (hash_ ^ (word & 0xFFU)) * 0x100000001B3U;
  }
  void add(std::int64_t word) { add(static_cast<std::uint64_t>(word)); }
  void add(int word) { add(static_cast<std::int64_t>(word)); }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value)); }
  void add_size(std::size_t size) { add(static_cast<std::uint64_t>(size)); }
  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325U;
};

std::uint64_t digest_of(const Placement& placement) {
  Fnv1a hash;
  hash.add(placement.tokens());
  hash.add(placement.ranks());
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    hash.add_size(placement.ranges(rank).size());
    for (const RowSet& range : placement.ranges(rank)) {
      hash.add(range.first);
      hash.add(range.count);
      hash.add(range.stride);
    }
  }
  return hash.value();
}

}  // namespace

const char* name_of(Schedule schedule) noexcept {
  switch (schedule) {
    case Schedule::ring:
      return "ring";
    case Schedule::gather:
      return "gather";
    case Schedule::automatic:
      return "auto";
  }
  return "unknown";
}

const char* name_of(Travel travel) noexcept { return travel == Travel::keys ? "keys" : "queries"; }

Plan::Plan(PlanOptions options) : options_(std::move(options)) {
  check_options(options_);
  classes_ = head_classes(options_);
  parcels_ = build_parcels(options_, classes_);

  const bool ring = options_.schedule == Schedule::ring;
  // A ring runs upwards unless downwards is better. Causal rows that the ranks below their owner
  // need (late keys of zigzag shards, all queries) would otherwise all go to rank 0 first: 8 shards
  // in one step of a zigzag ring of 16, instead of one.
  if (ring && lockstep_rows(classes_, parcels_, ranks(), true) <
                  lockstep_rows(classes_, parcels_, ranks(), false)) {
    for (Parcel& parcel : parcels_) {
      std::reverse(parcel.itinerary.begin(), parcel.itinerary.end());
    }
  }
  for (const Parcel& parcel : parcels_) {
    steps_ = std::max(steps_, ring ? static_cast<int>(parcel.itinerary.size()) : 1);
  }
  incoming_.assign(static_cast<std::size_t>(ranks()),
                   std::vector<std::vector<Hop>>(static_cast<std::size_t>(steps_)));
  outgoing_ = incoming_;
  for (int p = 0; p < static_cast<int>(parcels_.size()); ++p) {
    const Parcel& parcel = parcels_[static_cast<std::size_t>(p)];
    int sender = parcel.owner;
    std::size_t step = 0;
    for (const int receiver : parcel.itinerary) {
      incoming_[static_cast<std::size_t>(receiver)][step].push_back({p, sender});
      outgoing_[static_cast<std::size_t>(sender)][step].push_back({p, receiver});
      if (ring) {
        sender = receiver;
        ++step;
      }
    }
  }
  sort_hops(incoming_);
  sort_hops(outgoing_);
}

std::vector<Hop> Plan::incoming(int rank, int step) const {
  return hops_of("Plan::incoming", incoming_, rank, step);
}

std::vector<Hop> Plan::outgoing(int rank, int step) const {
  return hops_of("Plan::outgoing", outgoing_, rank, step);
}

std::int64_t Plan::unit_rows(const std::vector<Hop>& hops) const {
  std::int64_t rows = 0;
  for (const Hop& hop : hops) {
    const Parcel& parcel = parcels_[static_cast<std::size_t>(hop.parcel)];
    const HeadClass& head_class = classes_[static_cast<std::size_t>(parcel.head_class)];
    rows += parcel.row_count * static_cast<std::int64_t>(head_class.units.size());
  }
  return rows;
}

std::int64_t Plan::received_unit_rows(int rank) const {
  std::int64_t rows = 0;
  for (const auto& hops : incoming_.at(static_cast<std::size_t>(rank))) rows += unit_rows(hops);
  return rows;
}

std::int64_t Plan::largest_step_unit_rows(int rank) const {
  std::int64_t rows = 0;
  for (const auto& hops : incoming_.at(static_cast<std::size_t>(rank))) {
    rows = std::max(rows, unit_rows(hops));
  }
  return rows;
}

std::int64_t Plan::total_unit_rows() const {
  std::int64_t rows = 0;
  for (int rank = 0; rank < ranks(); ++rank) rows += received_unit_rows(rank);
  return rows;
}

double Plan::pairs(int rank) const {
  return shard_pairs(pattern(), query_placement(), key_placement(), rank, Travel::keys);
}

std::uint64_t Plan::digest() const {
  Fnv1a hash;
  // The pattern's name is left out: it is for people, the branches say it all. Every list is
  // preceded by its length, so that no two different options give the same words.
  hash.add(pattern().heads);
  hash.add(static_cast<int>(pattern().causal));
  hash.add(pattern().output_scale);
  hash.add_size(pattern().branches.size());
  for (const Branch& branch : pattern().branches) {
    hash.add(branch.segment_length);
    hash.add(branch.dilation);
    for (const std::int64_t offset : branch.offset) hash.add(offset);
  }
  // By content: one rank may pass the same object twice, another two that are alike.
  const std::uint64_t query_digest = digest_of(query_placement());
  hash.add(query_digest);
  hash.add(self_attention() ? query_digest : digest_of(key_placement()));
  hash.add(options_.kv_heads);
  hash.add(static_cast<int>(options_.schedule));
  hash.add(static_cast<int>(options_.travel));
  return hash.value();
}

}  // namespace annulus
