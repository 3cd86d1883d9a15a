#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/band.h"
#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/row_set.h"

namespace annulus {

enum class Schedule : std::uint8_t { ring, gather, automatic };

// Which rows leave their owner. keys: K/V rows visit the ranks whose queries need them (forward;
// backward with returning gradients). queries: Q/dO rows visit the ranks whose keys they attend
// (backward).
enum class Travel : std::uint8_t { keys, queries };

[[nodiscard]] const char* name_of(Schedule schedule) noexcept;  // "ring", "gather", "auto"
[[nodiscard]] const char* name_of(Travel travel) noexcept;      // "keys", "queries"

// One (branch, offset) of a head class, with its heads. A unit is what travels: a K/V head (keys)
// or a query head (queries).
struct Selection {
  struct Member {
    int unit_index = 0;  // into HeadClass::units
    int q_head = 0;
  };
  int branch = 0;
  std::int64_t offset = 0;
  std::vector<Member> members;
};

// Units whose rows are needed by exactly the same ranks at every position, in batch entries with
// the same documents: they share every row set of the plan.
struct HeadClass {
  std::vector<int> units;
  std::vector<Selection> selections;
  EntryRange entries;

  // How often a row of the class counts: units x batch entries (Pattern::times_in).
  [[nodiscard]] std::int64_t unit_rows() const {
    return static_cast<std::int64_t>(units.size()) * entries.times();
  }
};

// Rows of one owner and one head class that share one itinerary. They are stored, sent and dropped
// together.
struct Parcel {
  int owner = 0;
  int head_class = 0;
  std::vector<RowSet> rows;    // disjoint global positions; storage order is row set by row set
  std::int64_t row_count = 0;  // sum of the counts, per unit
  int rank_set = 0;            // the ranks that need the rows; see Plan::itinerary
};

// A parcel on its way in one step.
struct Hop {
  int parcel = 0;
  int peer = 0;  // the other side: sender for an incoming hop, receiver for an outgoing one
};

// Rows of a tile and where they are stored on this rank: row i is element store_first + i *
// store_stride of the local shard of their side (parcel < 0) or of the parcel's rows.
struct PlacedRows {
  RowSet rows;
  int parcel = -1;
  std::int64_t store_first = 0;
  std::int64_t store_stride = 1;
};

// All tiles of one segment: every query row against every key row that the band allows, for every
// member of one selection. Row sets ascend by first token. A tile is one pair of a query row set
// and a key row set. `band` is in tokens, and full if it hides none of these pairs, even if the
// pattern's band is not.
struct TileGroup {
  int head_class = 0;
  int selection = 0;         // index into HeadClass::selections
  int document = 0;          // index into Pattern::documents
  std::int64_t segment = 0;  // of this branch, counted through all documents of the batch entry
  // Tokens at position 0 of the segment; before token 0 where a side has no rows there.
  std::int64_t query_origin = 0;
  std::int64_t key_origin = 0;
  Band band;
  std::vector<PlacedRows> queries;
  std::vector<PlacedRows> keys;
};

struct PlanOptions {
  Pattern pattern;
  Placement queries;  // which rank holds which query rows
  Placement keys;  // the same for K/V rows; the same object in self-attention. Lengths may differ
  int kv_heads = 1;
  Schedule schedule = Schedule::ring;  // ring or gather: `automatic` is resolved by choose_schedule
  Travel travel = Travel::keys;

  // Queries and keys are the same tokens on the same ranks.
  [[nodiscard]] bool self_attention() const;
  // The same, but documents may have tokens on one side only: with key padding, for example.
  [[nodiscard]] bool same_positions() const;
};

// What one rank computes and moves.
struct RankTotals {
  double query_pairs = 0.0;   // allowed pairs (branch, head, query, key) whose query it owns
  double work = 0.0;          // pairs that it computes: the same when keys travel
  std::int64_t received = 0;  // rows x units over all steps, sent
  std::int64_t sent = 0;
  std::int64_t largest_step = 0;  // received in one step, at most
};

class Traffic;

// Which rows move in which step, in the view of one rank. Step 0 is local. In step s >= 1, a rank
// receives the parcels whose itinerary has it at index s-1 (ring) or all of them (gather, one
// step), and computes on them. All ranks derive the same plan from the same options: what one rank
// sends in a step is what the others expect, in the same order. A view stores the parcels that its
// rank owns or needs, and counts for all ranks. Its size grows with these and with shards, branches
// and head classes, never with tokens x heads or ranks x ranks.
class Plan {
 public:
  Plan(PlanOptions options, int rank);
  // Visits every rank's view, one after the other; parcels are built once. A view lives until its
  // visit returns.
  static void for_each_rank(const PlanOptions& options,
                            const std::function<void(const Plan&)>& visit);
  // The views of all ranks at once. For pictures and tests: together they are large.
  [[nodiscard]] static std::vector<Plan> of_all_ranks(const PlanOptions& options);
  // The same parcels under another schedule; shares them.
  [[nodiscard]] Plan with_schedule(Schedule schedule) const;

  [[nodiscard]] const PlanOptions& options() const { return options_; }
  [[nodiscard]] const Pattern& pattern() const { return options_.pattern; }
  [[nodiscard]] const Placement& query_placement() const { return options_.queries; }
  [[nodiscard]] const Placement& key_placement() const { return options_.keys; }
  // Placements of the rows that leave their owner, and of those that stay.
  [[nodiscard]] const Placement& travelling_placement() const {
    return options_.travel == Travel::keys ? options_.keys : options_.queries;
  }
  [[nodiscard]] const Placement& staying_placement() const {
    return options_.travel == Travel::keys ? options_.queries : options_.keys;
  }
  [[nodiscard]] bool self_attention() const { return self_attention_; }
  [[nodiscard]] int ranks() const { return options_.queries.ranks(); }
  [[nodiscard]] int rank() const { return rank_; }
  // Communication steps of the longest itinerary of all ranks; there are steps() + 1 compute steps.
  [[nodiscard]] int steps() const { return steps_; }
  [[nodiscard]] const std::vector<HeadClass>& classes() const { return parts_->classes; }
  // The parcels that this rank owns or needs, in the same order on every rank.
  [[nodiscard]] const std::vector<Parcel>& parcels() const { return parts_->parcels; }
  // The ranks that need a parcel, in the order in which they receive it, without the owner.
  [[nodiscard]] std::vector<int> itinerary(int parcel) const;
  // The step in which this rank receives a parcel; 0: it owns the parcel.
  [[nodiscard]] int arrival(int parcel) const;

  // Hops of `step` (1..steps()), ordered by (peer, parcel): the order of the rows inside a message.
  [[nodiscard]] std::span<const Hop> incoming(int step) const;
  [[nodiscard]] std::span<const Hop> outgoing(int step) const;

  // The tiles of steps first_step..last_step together, ordered by (branch, class, segment). Rows of
  // the travelling side are local in step 0 and received in step s; those of the other side are
  // always local. Groups without an allowed pair are left out.
  [[nodiscard]] std::vector<TileGroup> tile_groups(int first_step, int last_step) const;

  // Rows x units over all parcels of a hop list.
  [[nodiscard]] std::int64_t unit_rows(std::span<const Hop> hops) const;
  // Rows x units that this rank receives over all steps, and in the largest step.
  [[nodiscard]] std::int64_t received_unit_rows() const;
  [[nodiscard]] std::int64_t largest_step_unit_rows() const;
  // Allowed pairs (branch, head, query, key) whose query this rank owns.
  [[nodiscard]] double pairs() const;

  // Of all ranks, equal on all of them. The first is the sum over parcels of rows x units x visits.
  [[nodiscard]] std::int64_t total_unit_rows() const;
  [[nodiscard]] std::vector<RankTotals> rank_totals() const;

  // A stable 64-bit digest of all options, which must be equal on all ranks.
  [[nodiscard]] std::uint64_t digest() const;

 private:
  struct Parts {  // independent of the schedule
    std::vector<HeadClass> classes;
    std::vector<Parcel> parcels;
    std::shared_ptr<const Traffic> traffic;
  };
  struct HopTable {
    std::vector<Hop> hops;           // step by step
    std::vector<std::size_t> begin;  // steps + 1
    [[nodiscard]] std::span<const Hop> of(const char* where, int step) const;
  };
  struct StepHop;

  // For the library: counts for all ranks.
  friend const Traffic& traffic_of(const Plan& plan);
  [[nodiscard]] const Traffic& traffic() const { return *parts_->traffic; }

  Plan(PlanOptions options, int rank, std::shared_ptr<const Parts> parts);
  static void check(const PlanOptions& options, int rank);
  static HopTable make_table(std::vector<StepHop> hops, int steps);
  void make_hops();

  PlanOptions options_;
  bool self_attention_ = true;
  int rank_ = 0;
  int steps_ = 0;
  std::shared_ptr<const Parts> parts_;
  HopTable incoming_;
  HopTable outgoing_;
};

// A table of all ranks, and a picture of what each rank computes and sends in each step. Any rank's
// view gives the same.
[[nodiscard]] std::string plan_table(const Plan& plan);
[[nodiscard]] std::string plan_svg(const Plan& plan);

}  // namespace annulus
