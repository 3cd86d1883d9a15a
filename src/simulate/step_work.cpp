#include "simulate/step_work.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "pattern/shared_pairs.h"
#include "plan/pair_counts.h"
#include "plan/traffic.h"

namespace annulus::simulation {
namespace {

// By branch and head: the segment length inside which another branch computes the pairs, or 0.
using HostSegments = std::vector<std::vector<std::int64_t>>;

// For documents of a length: what is shared depends on it.
class SharedSegments {
 public:
  SharedSegments(const Plan& plan, bool share) : pattern_(plan.pattern()) {
    const PlanOptions& options = plan.options();
    if (!share || !options.same_positions()) return;
    const std::vector<Document>& documents = pattern_.documents;
    if (documents.empty()) by_length_[options.queries.tokens()] = {};
    for (const Document& document : documents) by_length_[document.length()] = {};
    for (auto& [length, segments] : by_length_) segments = segments_of(length);
    whole_ = options.queries.tokens();
  }

  // None: all pairs are computed where they are.
  [[nodiscard]] const HostSegments* of(const TileGroup& group) const {
    const std::vector<Document>& documents = pattern_.documents;
    const auto found = by_length_.find(
        documents.empty() ? whole_ : documents[static_cast<std::size_t>(group.document)].length());
    return found == by_length_.end() ? nullptr : &found->second;
  }
  // Calls use(segments, pattern) with the documents of each length.
  template <typename Use>
  void for_each(const Use& use) const {
    for (const auto& [length, segments] : by_length_) {
      Pattern part = pattern_;
      std::erase_if(part.documents,
                    [of = length](const Document& document) { return document.length() != of; });
      use(segments, part);
    }
  }

 private:
  [[nodiscard]] HostSegments segments_of(std::int64_t tokens) const {
    HostSegments segments(pattern_.branches.size(),
                          std::vector<std::int64_t>(static_cast<std::size_t>(pattern_.heads), 0));
    for (int head = 0; head < pattern_.heads; ++head) {
      const std::vector<PairSharing> sharing = share_pairs(pattern_, {tokens, true}, head);
      for (std::size_t b = 0; b < sharing.size(); ++b) {
        if (sharing[b].host < 0) continue;
        const Branch& host = pattern_.branches[static_cast<std::size_t>(sharing[b].host)];
        segments[b][static_cast<std::size_t>(head)] = std::min(host.segment_length, tokens);
      }
    }
    return segments;
  }

  const Pattern& pattern_;
  std::int64_t whole_ = 0;
  std::map<std::int64_t, HostSegments> by_length_;
};

// The pairs that branches leave to others, as a pattern: the rows of a coarser branch inside the
// segments of the finer branch that computes them. These begin at multiples of the coarser branch's
// dilation, so offsets stay the same.
Pattern left_out(const Pattern& pattern, const HostSegments& segments) {
  Pattern out = pattern;
  out.branches.clear();
  for (std::size_t b = 0; b < segments.size(); ++b) {
    std::map<std::int64_t, Branch> by_segment;
    for (std::size_t head = 0; head < segments[b].size(); ++head) {
      if (segments[b][head] == 0) continue;
      Branch& branch = by_segment[segments[b][head]];
      branch.segment_length = segments[b][head];
      branch.dilation = pattern.branches[b].dilation;
      branch.offset.resize(static_cast<std::size_t>(pattern.heads), -1);
      branch.offset[head] = pattern.branches[b].offset[head];
    }
    for (auto& [segment, branch] : by_segment) out.branches.push_back(std::move(branch));
  }
  return out;
}

// The token at position 0 of the document of a tile; the same on both sides where pairs are shared.
std::int64_t origin_of(const Pattern& pattern, const TileGroup& group) {
  if (pattern.documents.empty()) return 0;
  const Document& document = pattern.documents[static_cast<std::size_t>(group.document)];
  return document.query_begin - document.query_start;
}

// A row set in positions of a document that begins at token `origin`.
RowSet in_document(RowSet rows, std::int64_t origin) {
  rows.first -= origin;
  return rows;
}

// The pairs of a tile whose two rows lie in the same segment of that length.
double pairs_within(const Band& band, const RowSet& queries, const RowSet& keys,
                    std::int64_t segment) {
  const std::int64_t first = std::max(queries.first, keys.first) / segment;
  const std::int64_t last = std::min(queries.last(), keys.last()) / segment;
  double pairs = 0.0;
  for (std::int64_t s = first; s <= last; ++s) {
    const std::int64_t begin = s * segment;
    const RowSet q = clip(queries, begin, begin + segment);
    const RowSet k = clip(keys, begin, begin + segment);
    if (q.count > 0 && k.count > 0) pairs += allowed_pairs(band, q, k);
  }
  return pairs;
}

// How many heads of a selection leave pairs to a finer branch, by that branch's segment length.
std::vector<std::pair<std::int64_t, double>> guests_of(const Selection& selection,
                                                       const HostSegments& segments) {
  std::map<std::int64_t, double> heads;
  for (const Selection::Member& member : selection.members) {
    const std::int64_t segment = segments[static_cast<std::size_t>(selection.branch)]
                                         [static_cast<std::size_t>(member.q_head)];
    if (segment > 0) heads[segment] += 1.0;
  }
  return {heads.begin(), heads.end()};
}

}  // namespace

StepWork::StepWork(const Plan& plan, bool share, double most_row_sets) : steps_(plan.steps()) {
  const auto ranks = static_cast<std::size_t>(plan.ranks());
  pairs_.assign(ranks * (static_cast<std::size_t>(steps_) + 1), 0.0);
  const SharedSegments shared(plan, share);
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const auto pairs = [&](const Pattern& pattern) {
      return shard_pairs(pattern, plan.query_placement(), plan.key_placement(), rank,
                         plan.options().travel);
    };
    double& of_rank = pairs_[index(rank, 0)];
    of_rank = pairs(plan.pattern());
    shared.for_each([&](const HostSegments& segments, const Pattern& part) {
      of_rank -= pairs(left_out(part, segments));
    });
  }
  if (steps_ == 0) return;
  const double row_sets = std::accumulate(
      plan.parcels().begin(), plan.parcels().end(), 0.0,
      [](double sum, const Parcel& p) { return sum + static_cast<double>(p.rows.size()); });
  counted_ = row_sets * static_cast<double>(ranks) <= most_row_sets;
  if (counted_) {
    count(plan, share);
  } else {
    estimate(plan);
  }
}

// Counts pairs of received and local rows. All other pairs of a rank have two local rows.
void StepWork::count(const Plan& plan, bool share) {
  const SharedSegments shared(plan, share);
  const bool keys_travel = plan.options().travel == Travel::keys;
  Plan::for_each_rank(plan.options(), [&](const Plan& view) {
    const int rank = view.rank();
    for (const TileGroup& group : view.tile_groups(1, steps_)) {
      const auto c = static_cast<std::size_t>(group.head_class);
      const auto s = static_cast<std::size_t>(group.selection);
      const Selection& selection = view.classes()[c].selections[s];
      const auto entries = static_cast<double>(view.classes()[c].entries.times());
      const double members = entries * static_cast<double>(selection.members.size());
      const HostSegments* const segments = shared.of(group);
      std::vector<std::pair<std::int64_t, double>> guests;
      if (segments != nullptr) guests = guests_of(selection, *segments);
      const std::int64_t origin = origin_of(view.pattern(), group);
      for (const PlacedRows& guest : keys_travel ? group.keys : group.queries) {
        double pairs = 0.0;
        for (const PlacedRows& host : keys_travel ? group.queries : group.keys) {
          const RowSet& queries = keys_travel ? host.rows : guest.rows;
          const RowSet& keys = keys_travel ? guest.rows : host.rows;
          pairs += members * allowed_pairs(group.band, queries, keys);
          for (const auto& [segment, heads] : guests) {
            pairs -= entries * heads *
                     pairs_within(group.band, in_document(queries, origin),
                                  in_document(keys, origin), segment);
          }
        }
        pairs_[index(rank, view.arrival(guest.parcel))] += pairs;
        pairs_[index(rank, 0)] -= pairs;
      }
    }
    // The sums are made in different orders, so rounding may leave a small negative number.
    pairs_[index(rank, 0)] = std::max(0.0, pairs_[index(rank, 0)]);
  });
}

void StepWork::estimate(const Plan& plan) {
  const bool keys_travel = plan.options().travel == Travel::keys;
  const int units = keys_travel ? plan.options().kv_heads : plan.pattern().heads;
  // Holds row counts first, pairs later.
  std::vector<double> work;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const std::int64_t own =
        plan.travelling_placement().local_tokens(rank) * units * plan.pattern().counted_entries();
    work.push_back(std::exchange(pairs_[index(rank, 0)], static_cast<double>(own)));
  }
  int step = 0;
  const auto add_step = [&](std::span<const std::int64_t> received, auto) {
    ++step;
    for (std::size_t rank = 0; rank < received.size(); ++rank)
      pairs_[index(static_cast<int>(rank), step)] = static_cast<double>(received[rank]);
  };
  traffic_of(plan).for_each_step(plan.options().schedule, add_step);
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const double rows = pairs(rank);
    const double per_row = rows > 0 ? work[static_cast<std::size_t>(rank)] / rows : 0.0;
    for (int s = 0; s <= steps_; ++s) pairs_[index(rank, s)] *= per_row;
  }
}

double StepWork::pairs(int rank) const {
  const auto first = pairs_.begin() + static_cast<std::ptrdiff_t>(index(rank, 0));
  return std::accumulate(first, first + steps_ + 1, 0.0);
}

double StepWork::total() const { return std::accumulate(pairs_.begin(), pairs_.end(), 0.0); }

}  // namespace annulus::simulation
