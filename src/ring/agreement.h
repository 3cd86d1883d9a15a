#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/transport.h"
#include "core/function_ref.h"

namespace annulus::ring {

// One property that must be equal on all ranks: its name and its value as text. Values are equal if
// their texts are.
struct Claim {
  std::string name;
  std::string value;
};

// Name of the first claim of every agreement: the operation. Ranks that are in different operations
// have different claims and cannot compare the others.
inline constexpr const char* kTheCall = "the call";

// An OutOfMemory that is thrown on every rank, so all of them can try something else.
class SharedShortage final : public OutOfMemory {
 public:
  SharedShortage(const std::string& message, const Shortage& bytes, int rank,
                 bool over_limit = false)
      : OutOfMemory(message, bytes), rank_(rank), over_limit_(over_limit) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }  // the lowest rank that ran out
  [[nodiscard]] bool over_limit() const noexcept { return over_limit_; }  // see Complaint

 private:
  int rank_;
  bool over_limit_;
};

// Why a rank rejects a call. Empty: it accepts.
struct Complaint {
  Complaint() = default;
  Complaint(std::string about) : text(std::move(about)) {}  // NOLINT(google-explicit-constructor)

  std::string text;
  // Set if the reason is lack of memory. If that is the reason of every rank that complains, and
  // all claims are equal, the error is a SharedShortage.
  std::optional<Shortage> shortage;
  bool over_limit = false;  // the caller's limit is too small, not the memory
  std::exception_ptr own;   // what this rank throws instead of a ConfigError

  [[nodiscard]] bool empty() const { return text.empty(); }
};

// What is wrong with a part of construction or of a call: what it throws. An error that is neither
// a ConfigError nor a lack of memory keeps its kind on this rank.
[[nodiscard]] Complaint complaint_of(FunctionRef<void()> part);

// Collective. Returns if every rank has an empty `complaint` and all claims are equal. Otherwise
// throws a ConfigError on every rank: the rank's own complaint, or a message that names the rank
// that complained, or the rank and the claim that differ. Messages start with `where`:
// "RingAttention::forward". Costs ceil(log2(size)) messages of a few bytes, and as many again to
// collect the reason of an error.
//
// Returns the bitwise or of the `flags` of all ranks.
std::uint16_t agree(Transport& transport, const char* where, const Complaint& complaint,
                    std::span<const Claim> claims, std::uint16_t flags = 0);

// What an agreement tells the ranks of each other besides their claims.
struct Told {
  std::uint16_t flags = 0;   // the bitwise or of all ranks'
  std::uint64_t number = 0;  // rank 0's
};
// The same for claims whose digest is known. Takes what this rank tells; returns what all are told.
Told agree_on_digest(Transport& transport, const char* where, const Complaint& complaint,
                     std::span<const Claim> claims, std::uint64_t digest, const Told& mine);
[[nodiscard]] std::uint64_t digest_of(std::span<const Claim> claims);
// The digest of claims that have one more claim, with this value.
[[nodiscard]] std::uint64_t extended_digest(std::uint64_t digest, std::string_view value);

// Bytes that a rank sends in one successful agreement.
[[nodiscard]] std::int64_t agreement_bytes(int ranks);

// "[rank 3/8] RingAttention::forward: "
[[nodiscard]] std::string prefix(const Transport& transport, const char* where);

}  // namespace annulus::ring
