#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "annulus/transport.h"

namespace annulus::ring {

// Tags of the executor's messages. One executor call at a time uses a transport, so that tags only
// tell kinds apart.
inline constexpr std::uint32_t kTagAgree = 1;
inline constexpr std::uint32_t kTagParcels = 2;
inline constexpr std::uint32_t kTagReturns = 3;
inline constexpr std::uint32_t kTagRecords = 4;

// One property that all ranks must share, with its name for the message.
struct Claim {
  const char* name;
  std::uint64_t value;
};

// First claim of every agreement: ranks in different places would compare unlike things.
inline constexpr const char* kTheCall =
    "the call (some construct an executor, or run forward or backward, while others do not: their "
    "options or shapes differ)";

// Collective: returns if every rank came with an empty `complaint` and equal claims; else a
// ConfigError on every rank, which is the rank's own complaint, or names the rank that complained
// or differs and in what. `where` starts messages: "RingAttention::forward". Costs ceil(log2(size))
// small messages.
void agree(Transport& transport, const char* where, const std::string& complaint,
           std::initializer_list<Claim> claims);

// Bytes that a rank sends in one agreement.
[[nodiscard]] std::int64_t agreement_bytes(int ranks);

// "[rank 3/8] RingAttention::forward: "
[[nodiscard]] std::string prefix(const Transport& transport, const char* where);

}  // namespace annulus::ring
