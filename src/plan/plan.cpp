#include "annulus/plan.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "annulus/error.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"
#include "plan/build_parcels.h"
#include "plan/pair_counts.h"
#include "plan/rank_sets.h"
#include "plan/traffic.h"

namespace annulus {
namespace {

// Units that select the same rows travel together. Classes are in the order of their first unit.
std::vector<HeadClass> classes_of_units(const PlanOptions& options) {
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

// The classes of each group of batch entries, one group after the other.
std::vector<HeadClass> head_classes(const PlanOptions& options) {
  const std::vector<HeadClass> of_units = classes_of_units(options);
  std::vector<HeadClass> classes;
  for (const EntryGroup& group : entry_groups(options.pattern)) {
    for (const HeadClass& head_class : of_units) {
      classes.push_back(head_class);
      classes.back().entries = group.entries;
    }
  }
  return classes;
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

bool PlanOptions::self_attention() const {
  return queries.same_as(keys) &&
         std::ranges::all_of(pattern.documents,
                             [](const Document& document) { return document.same_sides(); });
}

bool PlanOptions::same_positions() const {
  return queries.same_as(keys) &&
         std::ranges::all_of(pattern.documents,
                             [](const Document& document) { return document.same_positions(); });
}

void Plan::check(const PlanOptions& options, int rank) {
  options.pattern.validate();
  check_documents(options.pattern, options.queries.tokens(), options.keys.tokens());
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
  if (rank < 0 || rank >= options.queries.ranks()) {
    throw ConfigError("Plan: rank is " + std::to_string(rank) + ", expected 0.." +
                      std::to_string(options.queries.ranks() - 1));
  }
}

Plan::Plan(PlanOptions options, int rank)
    : options_(std::move(options)), self_attention_(options_.self_attention()), rank_(rank) {
  check(options_, rank);
  auto parts = std::make_shared<Parts>();
  parts->classes = head_classes(options_);
  BuiltParcels built = build_parcels(options_, parts->classes, rank);
  parts->parcels = std::move(built.parcels);
  parts->traffic = std::make_shared<const Traffic>(std::move(built.sets), std::move(built.flows),
                                                   built.parcel_count);
  parts_ = std::move(parts);
  make_hops();
}

Plan::Plan(PlanOptions options, int rank, std::shared_ptr<const Parts> parts)
    : options_(std::move(options)),
      self_attention_(options_.self_attention()),
      rank_(rank),
      parts_(std::move(parts)) {
  make_hops();
}

void Plan::for_each_rank(const PlanOptions& options,
                         const std::function<void(const Plan&)>& visit) {
  check(options, 0);
  const std::vector<HeadClass> classes = head_classes(options);
  BuiltParcels built = build_parcels(options, classes, kEveryRank);
  const auto traffic = std::make_shared<const Traffic>(std::move(built.sets),
                                                       std::move(built.flows), built.parcel_count);
  for (int rank = 0; rank < options.queries.ranks(); ++rank) {
    auto parts = std::make_shared<Parts>();
    parts->classes = classes;
    parts->traffic = traffic;
    std::copy_if(
        built.parcels.begin(), built.parcels.end(), std::back_inserter(parts->parcels),
        [&](const Parcel& parcel) { return traffic->rank_sets().contains(parcel.rank_set, rank); });
    visit(Plan(options, rank, std::move(parts)));
  }
}

std::vector<Plan> Plan::of_all_ranks(const PlanOptions& options) {
  std::vector<Plan> views;
  for_each_rank(options, [&](const Plan& view) { views.push_back(view); });
  return views;
}

Plan Plan::with_schedule(Schedule schedule) const {
  PlanOptions options = options_;
  options.schedule = schedule;
  check(options, rank_);
  return Plan(std::move(options), rank_, parts_);
}

struct Plan::StepHop {
  int step = 0;
  Hop hop;
};

Plan::HopTable Plan::make_table(std::vector<StepHop> hops, int steps) {
  std::sort(hops.begin(), hops.end(), [](const StepHop& a, const StepHop& b) {
    return std::tie(a.step, a.hop.peer, a.hop.parcel) < std::tie(b.step, b.hop.peer, b.hop.parcel);
  });
  HopTable table;
  table.hops.reserve(hops.size());
  table.begin.assign(static_cast<std::size_t>(steps) + 1, 0);
  for (const StepHop& h : hops) {
    table.hops.push_back(h.hop);
    ++table.begin[static_cast<std::size_t>(h.step)];
  }
  std::partial_sum(table.begin.begin(), table.begin.end(), table.begin.begin());
  return table;
}

// Rank sets include the owner, which in cyclic order precedes the first visit and follows the last.
void Plan::make_hops() {
  steps_ = traffic().steps(options_.schedule);
  const bool ring = options_.schedule == Schedule::ring;
  const RankSetList& sets = traffic().rank_sets();
  std::vector<StepHop> in;
  std::vector<StepHop> out;
  for (int p = 0; p < static_cast<int>(parcels().size()); ++p) {
    const Parcel& parcel = parcels()[static_cast<std::size_t>(p)];
    const int set = parcel.rank_set;
    if (!ring) {
      if (parcel.owner != rank_) {
        in.push_back({1, {p, parcel.owner}});
        continue;
      }
      for (const int receiver : itinerary(p)) out.push_back({1, {p, receiver}});
      continue;
    }
    const int step = arrival(p);
    const bool down = traffic().downwards();
    const int next = down ? sets.previous(set, rank_) : sets.next(set, rank_);
    const int before = down ? sets.next(set, rank_) : sets.previous(set, rank_);
    if (parcel.owner != rank_) in.push_back({step, {p, before}});
    if (next != parcel.owner) out.push_back({step + 1, {p, next}});
  }
  incoming_ = make_table(std::move(in), steps_);
  outgoing_ = make_table(std::move(out), steps_);
}

std::vector<int> Plan::itinerary(int parcel) const {
  const Parcel& p = parcels().at(static_cast<std::size_t>(parcel));
  std::vector<int> visits = traffic().rank_sets().members(p.rank_set);
  // Cyclic order after the owner, so that the parcels of different owners use different links in a
  // step.
  const auto first = visits.erase(std::lower_bound(visits.begin(), visits.end(), p.owner));
  std::rotate(visits.begin(), first, visits.end());
  if (options_.schedule == Schedule::ring && traffic().downwards()) {
    std::reverse(visits.begin(), visits.end());
  }
  return visits;
}

int Plan::arrival(int parcel) const {
  const Parcel& p = parcels().at(static_cast<std::size_t>(parcel));
  if (p.owner == rank_) return 0;
  if (options_.schedule == Schedule::gather) return 1;
  const RankSetList& sets = traffic().rank_sets();
  const int members = sets.count(p.rank_set);
  // Number of members from the owner up to this rank, this rank excluded.
  int upwards = sets.count(p.rank_set, p.owner, rank_);
  if (rank_ < p.owner) upwards = members - sets.count(p.rank_set, rank_, p.owner);
  return traffic().downwards() ? members - upwards : upwards;
}

std::span<const Hop> Plan::HopTable::of(const char* where, int step) const {
  const int steps = static_cast<int>(begin.size()) - 1;
  if (step < 1 || step > steps) {
    throw ConfigError(std::string(where) + ": found step " + std::to_string(step) +
                      ", expected a step within 1.." + std::to_string(steps));
  }
  const auto s = static_cast<std::size_t>(step);
  return std::span(hops).subspan(begin[s - 1], begin[s] - begin[s - 1]);
}

std::span<const Hop> Plan::incoming(int step) const { return incoming_.of("Plan::incoming", step); }
std::span<const Hop> Plan::outgoing(int step) const { return outgoing_.of("Plan::outgoing", step); }

std::int64_t Plan::unit_rows(std::span<const Hop> hops) const {
  std::int64_t rows = 0;
  for (const Hop& hop : hops) {
    const Parcel& parcel = parcels()[static_cast<std::size_t>(hop.parcel)];
    const HeadClass& head_class = classes()[static_cast<std::size_t>(parcel.head_class)];
    rows += parcel.row_count * head_class.unit_rows();
  }
  return rows;
}

std::int64_t Plan::received_unit_rows() const { return unit_rows(incoming_.hops); }

std::int64_t Plan::largest_step_unit_rows() const {
  std::int64_t rows = 0;
  for (int step = 1; step <= steps_; ++step) rows = std::max(rows, unit_rows(incoming(step)));
  return rows;
}

const Traffic& traffic_of(const Plan& plan) { return plan.traffic(); }

std::int64_t Plan::total_unit_rows() const { return traffic().total_unit_rows(); }

double Plan::pairs() const {
  return shard_pairs(pattern(), query_placement(), key_placement(), rank_, Travel::keys);
}

std::vector<RankTotals> Plan::rank_totals() const {
  std::vector<RankTotals> totals(static_cast<std::size_t>(ranks()));
  for (int rank = 0; rank < ranks(); ++rank) {
    const auto pairs = [&](Travel travel) {
      return shard_pairs(pattern(), query_placement(), key_placement(), rank, travel);
    };
    RankTotals& t = totals[static_cast<std::size_t>(rank)];
    t.query_pairs = pairs(Travel::keys);
    t.work = options_.travel == Travel::keys ? t.query_pairs : pairs(Travel::queries);
  }
  const std::vector<Traffic::RankSum> moved = traffic().rank_sums(options_.schedule);
  for (std::size_t i = 0; i < totals.size(); ++i) {
    totals[i].received = moved[i].received;
    totals[i].sent = moved[i].sent;
    totals[i].largest_step = moved[i].largest_step;
  }
  return totals;
}

std::uint64_t Plan::digest() const {
  Fnv1a hash;
  // The pattern's name has no effect, so it is left out. Every list is preceded by its length, so
  // that different options never give the same words.
  hash.add(pattern().heads);
  hash.add(pattern().band().least);
  hash.add(pattern().band().most);
  hash.add(pattern().output_scale);
  hash.add_size(pattern().documents.size());
  for (const Document& document : pattern().documents) {
    hash.add(document.query_begin);
    hash.add(document.query_end);
    hash.add(document.key_begin);
    hash.add(document.key_end);
    hash.add(document.query_start);
    hash.add(document.key_start);
    hash.add(document.entry);
  }
  hash.add_size(pattern().branches.size());
  for (const Branch& branch : pattern().branches) {
    hash.add(branch.segment_length);
    hash.add(branch.dilation);
    for (const std::int64_t offset : branch.offset) hash.add(offset);
  }
  // By content: one rank may pass the same object for both sides, and another rank two equal
  // objects.
  const std::uint64_t query_digest = digest_of(query_placement());
  hash.add(query_digest);
  hash.add(query_placement().same_as(key_placement()) ? query_digest : digest_of(key_placement()));
  hash.add(options_.kv_heads);
  hash.add(static_cast<int>(options_.schedule));
  hash.add(static_cast<int>(options_.travel));
  return hash.value();
}

}  // namespace annulus
