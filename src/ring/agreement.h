#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/transport.h"

namespace annulus::ring {

// One property that all ranks must share: its name, and its value as people read it. Equal texts
// are equal values.
struct Claim {
  std::string name;
  std::string value;
};

// What a rank says it is doing: the first claim of every agreement, since ranks in different places
// would compare unlike things.
inline constexpr const char* kTheCall = "the call";

// Collective: returns if every rank came with an empty `complaint` and equal claims; else a
// ConfigError on every rank, which is the rank's own complaint, or names the rank that complained
// or differs and in what. `where` starts messages: "RingAttention::forward". Costs
// ceil(log2(size)) messages of a few bytes, and as many again to say what is wrong.
void agree(Transport& transport, const char* where, const std::string& complaint,
           std::span<const Claim> claims);
// The same about claims whose digest is known.
void agree(Transport& transport, const char* where, const std::string& complaint,
           std::span<const Claim> claims, std::uint64_t digest);
[[nodiscard]] std::uint64_t digest_of(std::span<const Claim> claims);

// Bytes that a rank sends in one agreement that ends well.
[[nodiscard]] std::int64_t agreement_bytes(int ranks);

// "[rank 3/8] RingAttention::forward: "
[[nodiscard]] std::string prefix(const Transport& transport, const char* where);

}  // namespace annulus::ring
