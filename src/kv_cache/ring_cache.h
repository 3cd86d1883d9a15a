#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/ring_cache.h"
#include "core/function_ref.h"
#include "kernels/cached_rows.h"
#include "kv_cache/sequences.h"
#include "kv_cache/shares.h"
#include "ring/agreement.h"
#include "ring/link.h"

namespace annulus {

struct RingCache::Impl {
  Impl(CacheOptions options_in, Transport& transport_in);
  ~Impl();

  // One call. Absent tensors: it does not append, or does not attend.
  struct Keys {
    ConstTensorView k, v;
  };
  struct Queries {
    ConstTensorView q;
    TensorView o, lse;
    std::optional<ConstTensorView> sinks;
  };
  void call(const char* where, const std::optional<Keys>& keys,
            const std::optional<Queries>& queries, const NewTokens& tokens);
  void run(const char* where, const std::optional<Keys>& keys,
           const std::optional<Queries>& queries, const NewTokens& tokens);
  void copy_entry(std::int64_t from, std::int64_t to);
  void synchronize();

  [[nodiscard]] std::int64_t append_bytes(const std::vector<std::int64_t>& counts,
                                          const std::optional<Placement>& placement) const;
  [[nodiscard]] std::int64_t attend_bytes(const std::vector<std::int64_t>& counts,
                                          const std::optional<Placement>& placement) const;
  // ConfigError if `tokens` make no sense for so many rows.
  [[nodiscard]] std::vector<std::int64_t> counts_of(std::int64_t rows,
                                                    const NewTokens& tokens) const;

  // ---- attend.cpp and append.cpp
  // Who has which queries, and what goes where.
  struct Attendance {
    std::vector<kv_cache::Share> shares;  // by rank
    std::vector<QueryRun> runs;           // that this rank attends to its keys
    std::vector<char> holds;              // by rank: whether it has keys that any query sees
    bool placed = false;   // ranks have queries of their own; else all ranks have all of them
    bool divided = false;  // ranks merge shares and then pass them on; else each merges everything
    [[nodiscard]] std::int64_t tokens() const {
      return shares.empty() ? 0 : shares.back().first + shares.back().count;
    }
  };
  [[nodiscard]] Attendance attendance(const std::vector<std::int64_t>& counts,
                                      const std::optional<Placement>& placement,
                                      std::span<const std::int64_t> lengths) const;
  // Of an attendance for which mailboxes have room. `lengths`: of all entries, with new tokens.
  [[nodiscard]] std::vector<QueryRun> runs_of(const Attendance& work,
                                              const std::vector<std::int64_t>& counts,
                                              std::span<const std::int64_t> lengths) const;
  // Messages of a call's rounds, in order: queries, partial results, results.
  struct Rounds {
    ring::Batch queries, partials, results;
  };
  [[nodiscard]] Rounds rounds_of(const Attendance& work) const;
  void append(const Keys& keys, const std::vector<std::int64_t>& counts,
              const std::optional<Placement>& placement);
  void attend(const Queries& queries, const Attendance& work);
  // Rows that are on their way from where they are passed to where they are kept: those that this
  // rank keeps where they are (copies from the tensor), those that it sends, and those that it
  // receives (copies from the message).
  struct Deliveries {
    std::vector<RowCopy> kept;
    struct Peer {
      std::vector<RowCopy> sent;      // to rows of the message
      std::vector<RowCopy> received;  // from rows of the message
      std::int64_t sent_rows = 0;
      std::int64_t received_rows = 0;
    };
    std::vector<Peer> peers;
  };
  [[nodiscard]] Deliveries deliveries(const std::vector<std::int64_t>& counts,
                                      const std::optional<Placement>& placement) const;

  [[nodiscard]] std::string tensor_complaint(const std::optional<Keys>& keys,
                                             const std::optional<Queries>& queries,
                                             const NewTokens& tokens) const;
  [[nodiscard]] std::vector<ring::Claim> claims(const char* where,
                                                const std::vector<std::int64_t>& counts,
                                                const NewTokens& tokens, bool sinks) const;
  // Makes room in mailboxes. The same on all ranks.
  struct Room {
    std::int64_t out = 0;
    std::int64_t in = 0;
    std::int64_t queries = 0;
    std::int64_t results = 0;
  };
  void reserve(const Room& room);
  // Runs a call's work; on an error tells the other ranks.
  void guard(FunctionRef<void()> work);
  void finish() noexcept;
  void exchange(ring::Batch& batch, const char* what);

  // What begins in a message buffer begins at multiples of 16 bytes.
  [[nodiscard]] static std::int64_t aligned(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }
  [[nodiscard]] std::int64_t key_bytes() const {  // of a row of k or v in messages
    return options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
  }
  [[nodiscard]] std::int64_t partial_bytes() const {  // of a token's partial results
    return aligned(std::int64_t{options.heads} * (options.head_dim + 1) * 4);
  }
  [[nodiscard]] std::int64_t result_bytes() const {  // of a token's results
    return aligned(options.heads * (key_bytes() + 4));
  }
  [[nodiscard]] std::int64_t query_bytes() const { return options.heads * key_bytes(); }
  // Where log-sum-exps begin in the partial results of a share, in floats.
  [[nodiscard]] std::int64_t lse_offset(const kv_cache::Share& share) const {
    return share.count * options.heads * options.head_dim;
  }
  [[nodiscard]] CachedKeys cached_keys(int of_rank) const;

  const CacheOptions options;
  Transport* const transport;
  const int rank;
  const int ranks;
  std::vector<ring::Claim> option_claims;
  std::string identity;  // of the options
  std::optional<kv_cache::Sequences> sequences;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Queue> queue;
  std::unique_ptr<ring::Link> link;
  std::unique_ptr<CacheKernels> kernels;
  Memory keys, values;
  ring::Mailbox outgoing;  // partial results, or keys that other ranks keep
  ring::Mailbox incoming;
  ring::Mailbox queries;  // of all ranks
  ring::Mailbox results;
};

}  // namespace annulus
