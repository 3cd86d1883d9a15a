#include <algorithm>
#include <utility>

#include "kv_cache/ring_cache.h"
#include "ring/tags.h"
#include "ring/tensor_rows.h"

namespace annulus {
namespace {

using kv_cache::Share;
using kv_cache::TokenRun;

// Above so many bytes of partial results a rank merges a share of the tokens and passes the results
// on: 2 (P - 1) / P of these bytes instead of P - 1 times as many, for a second round of messages.
constexpr std::int64_t kDividedBytes = 256 << 10;

// Rows [token][head] in a buffer.
TensorRows packed_rows(std::byte* base, std::int64_t row_bytes, int heads) {
  return {base, 0, row_bytes, heads * row_bytes};
}

// Copies between the tensors and the packed tokens of a share, which begin at token `first`.
std::vector<RowCopy> unpacking(const Share& share, std::int64_t first) {
  std::vector<RowCopy> copies;
  for (const TokenRun& run : share.runs) {
    copies.push_back({0, first, run.entry, run.row, run.count});
    first += run.count;
  }
  return copies;
}

std::vector<RowCopy> packing(const Share& share, std::int64_t first) {
  std::vector<RowCopy> copies = unpacking(share, first);
  for (RowCopy& copy : copies) {
    std::swap(copy.from_batch, copy.to_batch);
    std::swap(copy.from_row, copy.to_row);
  }
  return copies;
}

// Rows of a [batch, rows] tensor that no run of the share has.
std::vector<RowCopy> rows_without_tokens(const Share& share, std::int64_t batch,
                                         std::int64_t rows) {
  std::vector<char> found(static_cast<std::size_t>(batch * rows));
  for (const TokenRun& run : share.runs)
    std::fill_n(found.begin() + run.entry * rows + run.row, run.count, char{1});
  std::vector<RowCopy> out;
  for (std::int64_t i = 0; i < batch * rows; ++i) {
    if (found[static_cast<std::size_t>(i)] != 0) continue;
    const bool joins = !out.empty() && out.back().to_batch == i / rows &&
                       out.back().to_row + out.back().count == i % rows;
    if (joins) {
      ++out.back().count;
    } else {
      out.push_back({0, 0, i / rows, i % rows, 1});
    }
  }
  return out;
}

}  // namespace

CachedKeys RingCache::Impl::cached_keys(int of_rank) const {
  CachedKeys out;
  const std::int64_t row =
      padded_head_dim(options.head_dim) * static_cast<std::int64_t>(size_of(options.dtype));
  const std::int64_t head = sequences->ring_rows() * row;
  out.k = {keys.data(), options.kv_heads * head, head, row};
  out.v = {values.data(), options.kv_heads * head, head, row};
  out.ring_rows = sequences->ring_rows();
  out.positions = sequences->positions(of_rank);
  out.band = sequences->band();
  return out;
}

RingCache::Impl::Attendance RingCache::Impl::attendance(
    const std::vector<std::int64_t>& counts, const std::optional<Placement>& placement,
    std::span<const std::int64_t> lengths) const {
  Attendance work;
  work.placed = placement.has_value();
  std::int64_t tokens = 0;
  for (const std::int64_t count : counts) tokens += count;
  work.divided = !work.placed && ranks > 2 && tokens * partial_bytes() >= kDividedBytes;
  if (work.placed) {
    work.shares = kv_cache::placed_shares(counts, *placement);
  } else if (work.divided) {
    work.shares = kv_cache::equal_shares(counts, ranks);
  } else {
    work.shares.assign(static_cast<std::size_t>(ranks), kv_cache::equal_shares(counts, 1).front());
  }
  for (int of_rank = 0; of_rank < ranks; ++of_rank) {
    const CachedKeys cached = cached_keys(of_rank);
    bool holds = false;
    for (std::size_t entry = 0; entry < counts.size() && !holds; ++entry) {
      if (counts[entry] == 0) continue;
      const std::int64_t length = lengths[entry];
      holds = cached.seen_from(length - counts[entry], length).begin <
              cached.seen_from(length - 1, length).end;
    }
    work.holds.push_back(holds ? 1 : 0);
  }
  return work;
}

RingCache::Impl::Rounds RingCache::Impl::rounds_of(const Attendance& work) const {
  Rounds out;
  const auto holds = [&](int of_rank) {
    return work.holds[static_cast<std::size_t>(of_rank)] != 0;
  };
  const auto share = [&](int of_rank) -> const Share& {
    return work.shares[static_cast<std::size_t>(of_rank)];
  };
  const Share& mine = share(rank);
  const auto add = [](ring::Batch& batch, Way way, int peer, const ring::Mailbox& box,
                      std::int64_t first, std::int64_t count, std::int64_t bytes) {
    if (count > 0) batch.add(way, peer, ring::kTagCache, box, first * bytes, count * bytes);
  };
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    const Share& theirs = share(peer);
    if (work.placed && holds(peer))
      add(out.queries, Way::send, peer, queries, mine.first, mine.count, query_bytes());
    if (work.placed && holds(rank))
      add(out.queries, Way::receive, peer, queries, theirs.first, theirs.count, query_bytes());
    if (holds(rank))
      add(out.partials, Way::send, peer, outgoing, theirs.first, theirs.count, partial_bytes());
    if (holds(peer)) {
      add(out.partials, Way::receive, peer, incoming, peer * mine.count, mine.count,
          partial_bytes());
    }
    if (!work.divided) continue;
    add(out.results, Way::send, peer, results, mine.first, mine.count, result_bytes());
    add(out.results, Way::receive, peer, results, theirs.first, theirs.count, result_bytes());
  }
  return out;
}

std::int64_t RingCache::Impl::attend_bytes(const std::vector<std::int64_t>& counts,
                                           const std::optional<Placement>& placement) const {
  const Rounds rounds = rounds_of(attendance(counts, placement, sequences->lengths()));
  std::int64_t bytes = 0;
  for (const ring::Batch* batch : {&rounds.queries, &rounds.partials, &rounds.results}) {
    for (const Message& message : batch->messages)
      if (message.way == Way::send) bytes += message.bytes;
  }
  return bytes;
}

// A share's partial results: O of its tokens, then their log-sum-exps.
std::vector<QueryRun> RingCache::Impl::runs_of(const Attendance& work,
                                               const std::vector<std::int64_t>& counts,
                                               std::span<const std::int64_t> lengths) const {
  std::vector<QueryRun> runs;
  if (work.holds[static_cast<std::size_t>(rank)] == 0) return runs;
  const std::size_t distinct = work.placed || work.divided ? work.shares.size() : 1;
  for (const Share& share : std::span(work.shares).first(distinct)) {
    auto* const o = reinterpret_cast<float*>(outgoing.data() + share.first * partial_bytes());
    std::int64_t done = 0;
    for (const TokenRun& token : share.runs) {
      QueryRun run;
      run.entry = token.entry;
      run.batch = work.placed ? 0 : token.entry;
      run.row = work.placed ? share.first + done : token.token;
      run.tokens = token.count;
      run.length = lengths[static_cast<std::size_t>(token.entry)];
      run.position = run.length - counts[static_cast<std::size_t>(token.entry)] + token.token;
      run.o = o + done * options.heads * options.head_dim;
      run.lse = o + lse_offset(share) + done * options.heads;
      runs.push_back(run);
      done += token.count;
    }
  }
  return runs;
}

void RingCache::Impl::attend(const Queries& tensors, const Attendance& work) {
  Rounds rounds = rounds_of(work);
  const Share& mine = work.shares[static_cast<std::size_t>(rank)];
  TensorRows q = ring::rows_of(tensors.q);
  if (work.placed) {
    const TensorRows packed = packed_rows(queries.data(), key_bytes(), options.heads);
    if (mine.count > 0) {
      kernels->copy(q, packed, options.heads, key_bytes(), packing(mine, mine.first), *queue);
    }
    exchange(rounds.queries, "queries");
    q = packed;
  }

  if (!work.runs.empty()) kernels->attend(q, cached_keys(rank), work.runs, *queue);
  exchange(rounds.partials, "partial results");

  std::vector<PartialRows> parts;  // in the order of the ranks, whichever this one is
  for (int peer = 0; peer < ranks; ++peer) {
    if (work.holds[static_cast<std::size_t>(peer)] == 0) continue;
    const std::byte* base = peer == rank ? outgoing.data() + mine.first * partial_bytes()
                                         : incoming.data() + peer * mine.count * partial_bytes();
    const auto* o = reinterpret_cast<const float*>(base);
    parts.push_back({o, o + lse_offset(mine)});
  }
  const TensorRows o = ring::rows_of(tensors.o);
  const TensorRows lse = ring::rows_of(tensors.lse);
  const HeadNumbers sinks = ring::numbers_of(tensors.sinks);
  if (!work.divided) {
    kernels->merge(parts, sinks, unpacking(mine, 0), o, lse, *queue);
  } else {
    // A share's results: log-sum-exps of its tokens, then O.
    const auto result_lse = [&](const Share& share) {
      return packed_rows(results.data() + share.first * result_bytes(), 4, options.heads);
    };
    const auto result_o = [&](const Share& share) {
      return packed_rows(result_lse(share).base + share.count * options.heads * 4, key_bytes(),
                         options.heads);
    };
    const RowCopy all{0, 0, 0, 0, mine.count};
    if (mine.count > 0) {
      kernels->merge(parts, sinks, std::span(&all, 1), result_o(mine), result_lse(mine), *queue);
    }
    exchange(rounds.results, "results");
    for (const Share& share : work.shares) {
      if (share.count == 0) continue;
      const std::vector<RowCopy> copies = unpacking(share, 0);
      kernels->copy(result_o(share), o, options.heads, key_bytes(), copies, *queue);
      kernels->copy(result_lse(share), lse, options.heads, 4, copies, *queue);
    }
  }

  Share all;  // of this tensor's rows
  const std::size_t shown = work.divided ? work.shares.size() : 1;
  for (std::size_t i = 0; i < shown; ++i) {
    const Share& share = work.divided ? work.shares[i] : mine;
    for (const TokenRun& run : share.runs) all.add(run);
  }
  const std::int64_t rows = tensors.q.shape[1];
  if (all.count == options.batch * rows) return;
  kernels->merge({}, {}, rows_without_tokens(all, options.batch, rows), o, lse, *queue);
}

}  // namespace annulus
