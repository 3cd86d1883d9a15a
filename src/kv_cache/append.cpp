#include <algorithm>
#include <utility>

#include "kv_cache/ring_cache.h"
#include "ring/tags.h"
#include "ring/tensor_rows.h"

namespace annulus {

RingCache::Impl::Deliveries RingCache::Impl::deliveries(
    const std::vector<std::int64_t>& counts, const std::optional<Placement>& placement) const {
  Deliveries out;
  out.peers.resize(static_cast<std::size_t>(ranks));
  if (!placement) {  // every rank has all rows, and keeps its own
    for (std::int64_t entry = 0; entry < options.batch; ++entry) {
      sequences->for_each_place(entry, 0, counts[static_cast<std::size_t>(entry)],
                                [&](const kv_cache::Place& s) {
                                  if (s.rank == rank)
                                    out.kept.push_back({entry, s.token, entry, s.row, s.count});
                                });
    }
    return out;
  }
  const std::vector<kv_cache::Share> shares = kv_cache::placed_shares(counts, *placement);
  for (int from = 0; from < ranks; ++from) {
    Deliveries::Peer& sender = out.peers[static_cast<std::size_t>(from)];
    for (const kv_cache::TokenRun& run : shares[static_cast<std::size_t>(from)].runs) {
      sequences->for_each_place(run.entry, run.token, run.count, [&](const kv_cache::Place& s) {
        const std::int64_t row = run.row + s.token - run.token;
        if (from == rank && s.rank == rank) {
          out.kept.push_back({run.entry, row, run.entry, s.row, s.count});
        } else if (from == rank) {
          Deliveries::Peer& keeper = out.peers[static_cast<std::size_t>(s.rank)];
          keeper.sent.push_back({run.entry, row, 0, keeper.sent_rows, s.count});
          keeper.sent_rows += s.count;
        } else if (s.rank == rank) {
          sender.received.push_back({0, sender.received_rows, run.entry, s.row, s.count});
          sender.received_rows += s.count;
        }
      });
    }
  }
  return out;
}

std::int64_t RingCache::Impl::append_bytes(const std::vector<std::int64_t>& counts,
                                           const std::optional<Placement>& placement) const {
  std::int64_t rows = 0;
  for (const Deliveries::Peer& peer : deliveries(counts, placement).peers) rows += peer.sent_rows;
  return rows * 2 * options.kv_heads * key_bytes();
}

void RingCache::Impl::append(const Keys& tensors, const std::vector<std::int64_t>& counts,
                             const std::optional<Placement>& placement) {
  const Deliveries work = deliveries(counts, placement);
  const std::int64_t row = key_bytes();
  const std::int64_t rows_step = options.kv_heads * row;
  const TensorRows k = ring::rows_of(tensors.k);
  const TensorRows v = ring::rows_of(tensors.v);
  const CachedKeys cached = cached_keys(rank);
  // All keys of a message, then all values.
  const auto for_each_part = [&](const auto& use) {
    use(k, cached.k, 0);
    use(v, cached.v, 1);
  };
  const auto in_message = [&](const ring::Mailbox& box, std::int64_t offset, std::int64_t rows,
                              int part) {
    return TensorRows{box.data() + offset + part * rows * rows_step, 0, row, rows_step};
  };

  ring::Batch batch;
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(ranks));
  std::int64_t sent = 0;
  std::int64_t received = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    const Deliveries::Peer& rows = work.peers[static_cast<std::size_t>(peer)];
    if (rows.sent_rows > 0) {
      for_each_part([&](const TensorRows& from, const TensorRows&, int part) {
        kernels->copy(from, in_message(outgoing, sent, rows.sent_rows, part), options.kv_heads, row,
                      rows.sent, *queue);
      });
      const std::int64_t bytes = 2 * rows.sent_rows * rows_step;
      batch.add(Way::send, peer, ring::kTagCache, outgoing, sent, bytes);
      sent += aligned(bytes);
    }
    if (rows.received_rows > 0) {
      const std::int64_t bytes = 2 * rows.received_rows * rows_step;
      batch.add(Way::receive, peer, ring::kTagCache, incoming, received, bytes);
      offsets[static_cast<std::size_t>(peer)] = received;
      received += aligned(bytes);
    }
  }
  const auto keep = [&](const TensorRows& from, const TensorRows& to, int) {
    if (!work.kept.empty()) kernels->copy(from, to, options.kv_heads, row, work.kept, *queue);
  };
  for_each_part(keep);
  exchange(batch, "keys");
  for (int peer = 0; peer < ranks; ++peer) {
    const Deliveries::Peer& rows = work.peers[static_cast<std::size_t>(peer)];
    if (rows.received_rows == 0) continue;
    for_each_part([&](const TensorRows&, const TensorRows& to, int part) {
      kernels->copy(
          in_message(incoming, offsets[static_cast<std::size_t>(peer)], rows.received_rows, part),
          to, options.kv_heads, row, rows.received, *queue);
    });
  }
}

}  // namespace annulus
