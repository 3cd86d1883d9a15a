#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
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

// An OutOfMemory that every rank gets: all of them may try something else.
class SharedShortage final : public OutOfMemory {
 public:
  SharedShortage(const std::string& message, const Shortage& bytes, int rank,
                 bool over_limit = false)
      : OutOfMemory(message, bytes), rank_(rank), over_limit_(over_limit) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }  // the lowest that has run out
  [[nodiscard]] bool over_limit() const noexcept { return over_limit_; }  // see Complaint

 private:
  int rank_;
  bool over_limit_;
};

// What a rank has to say against a call; empty: nothing.
struct Complaint {
  Complaint() = default;
  Complaint(std::string about) : text(std::move(about)) {}  // NOLINT(google-explicit-constructor)

  std::string text;
  // Memory is all that it lacks. Where that goes for every rank that complains, and all claim the
  // same, the error is a SharedShortage.
  std::optional<Shortage> shortage;
  bool over_limit = false;  // it is not the memory that is too small, but what the caller allows

  [[nodiscard]] bool empty() const { return text.empty(); }
};

// Collective: returns if every rank came with an empty `complaint` and equal claims; else a
// ConfigError on every rank, which is the rank's own complaint, or names the rank that complained
// or differs and in what. `where` starts messages: "RingAttention::forward". Costs
// ceil(log2(size)) messages of a few bytes, and as many again to say what is wrong.
//
// Returns what any rank came with: the bits of all `flags`.
std::uint16_t agree(Transport& transport, const char* where, const Complaint& complaint,
                    std::span<const Claim> claims, std::uint16_t flags = 0);
// The same about claims whose digest is known.
std::uint16_t agree_on_digest(Transport& transport, const char* where, const Complaint& complaint,
                              std::span<const Claim> claims, std::uint64_t digest,
                              std::uint16_t flags = 0);
[[nodiscard]] std::uint64_t digest_of(std::span<const Claim> claims);

// Bytes that a rank sends in one agreement that ends well.
[[nodiscard]] std::int64_t agreement_bytes(int ranks);

// "[rank 3/8] RingAttention::forward: "
[[nodiscard]] std::string prefix(const Transport& transport, const char* where);

}  // namespace annulus::ring
