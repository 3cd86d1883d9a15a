#include "ring/agreement.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <new>

#include <fmt/format.h>

#include "annulus/error.h"
#include "annulus/events.h"
#include "ring/message_events.h"
#include "ring/tags.h"
#include "transport/rank_prefix.h"

namespace annulus::ring {
namespace {

constexpr std::int32_t kNobody = INT32_MAX;

// The record that every agreement exchanges. A merge keeps the digest and the number of the lowest
// rank, and the lowest rank with another digest.
struct Vote {
  std::uint64_t digest = 0;
  std::uint64_t number = 0;
  std::int32_t rank = kNobody;         // the rank with this digest
  std::int32_t differing = kNobody;    // the lowest rank with another digest
  std::int32_t complaining = kNobody;  // the lowest rank that has a complaint
  std::uint16_t kinds = 0;             // of the complaints
  std::uint16_t flags = 0;

  void merge(const Vote& other) {
    std::int32_t differs = std::min(differing, other.differing);
    if (digest != other.digest) differs = std::min(differs, std::max(rank, other.rank));
    if (other.rank < rank) {
      digest = other.digest;
      number = other.number;
      rank = other.rank;
    }
    differing = differs;
    complaining = std::min(complaining, other.complaining);
    kinds |= other.kinds;
    flags |= other.flags;
  }
};
constexpr std::uint16_t kOfMemory = 1;
constexpr std::uint16_t kOfSomethingElse = 2;
constexpr std::uint16_t kOfLimits = 4;

std::uint16_t kind_of(const Complaint& complaint) {
  if (!complaint.shortage) return kOfSomethingElse;
  return complaint.over_limit ? kOfLimits : kOfMemory;
}

// Of fixed size, because ranks that disagree may have texts of different lengths.
template <std::size_t kSize>
struct Text {
  std::array<char, kSize> bytes{};

  void set(const std::string& text) {
    std::memcpy(bytes.data(), text.data(), std::min(text.size(), kSize - 1));
  }
  [[nodiscard]] const char* get() const { return bytes.data(); }
  bool operator==(const Text&) const = default;
};

// The record that ranks exchange after an error: the complaint of the lowest rank that has one, and
// for each claim the value of the lowest rank and that of the lowest rank that differs from it.
struct Report {
  static constexpr std::size_t kMostClaims = 32;
  struct Entry {
    Text<48> value;
    Text<48> other;
    std::int32_t rank = kNobody;
    std::int32_t differing = kNobody;
  };
  std::int32_t complaining = kNobody;
  Text<480> complaint;
  Shortage shortage;
  std::array<Entry, kMostClaims> entries;

  void merge(const Report& other_report) {
    if (other_report.complaining < complaining) {
      complaining = other_report.complaining;
      complaint = other_report.complaint;
      shortage = other_report.shortage;
    }
    for (std::size_t i = 0; i < kMostClaims; ++i) {
      const Entry mine = entries[i];
      const Entry& theirs = other_report.entries[i];
      const bool keep = mine.rank <= theirs.rank;
      Entry out = keep ? mine : theirs;
      const Entry& rest = keep ? theirs : mine;
      // A rank that differs from the lowest value so far may be equal to the new lowest value.
      const auto consider = [&](std::int32_t rank, const Text<48>& value) {
        if (rank >= out.differing || value == out.value) return;
        out.differing = rank;
        out.other = value;
      };
      consider(rest.rank, rest.value);
      if (rest.differing != kNobody) consider(rest.differing, rest.other);
      entries[i] = out;
    }
  }
};

// Dissemination: after round i every rank has the records of the 2^(i+1) - 1 ranks before it.
// Merging a record twice has no effect.
template <typename Record>
void exchange(Transport& transport, Record& mine) {
  const int rank = transport.rank();
  const int size = transport.size();
  for (int distance = 1; distance < size; distance *= 2) {
    Record theirs;
    Record out = mine;
    const Region in_region(std::as_writable_bytes(std::span(&theirs, 1)));
    const Region out_region(std::as_writable_bytes(std::span(&out, 1)));
    const Message messages[] = {
        {Way::receive, (rank + size - distance) % size, kTagAgree, &in_region, 0, in_region.bytes},
        {Way::send, (rank + distance) % size, kTagAgree, &out_region, 0, out_region.bytes}};
    const std::int64_t begin = event_stream().on() ? EventStream::now_ns() : 0;
    transport.post(messages, Event())->wait();
    if (begin != 0) record_messages(transport, messages, "agreement", -1, begin);
    mine.merge(theirs);
  }
}

// Collective: exchanges the reasons of an error that all ranks know of, and throws.
[[noreturn]] void explain(Transport& transport, const char* where, const Complaint& complaint,
                          std::span<const Claim> claims, std::uint16_t kinds) {
  const bool only_memory = kinds != 0 && (kinds & kOfSomethingElse) == 0;
  Report report;
  const int rank = transport.rank();
  if (!complaint.empty()) {
    report.complaining = rank;
    report.complaint.set(complaint.text);
    if (complaint.shortage) report.shortage = *complaint.shortage;
  }
  if (claims.size() > Report::kMostClaims)
    throw ConfigError(prefix(transport, where) + "too many claims to compare");
  for (std::size_t i = 0; i < claims.size(); ++i) {
    report.entries[i].rank = rank;
    report.entries[i].value.set(claims[i].value);
  }
  exchange(transport, report);

  // Ranks choose the next attempt from their options, so they must have equal options to stay
  // together.
  const bool differ = std::any_of(report.entries.begin(), report.entries.end(),
                                  [](const auto& entry) { return entry.differing != kNobody; });
  if (report.complaining != kNobody && !(only_memory && differ)) {
    const std::string text =
        prefix(transport, where) +
        (complaint.empty()
             ? fmt::format("rank {} refused: {}", report.complaining, report.complaint.get())
             : complaint.text);
    if (only_memory)
      throw SharedShortage(text, report.shortage, report.complaining, kinds == kOfLimits);
    throw ConfigError(text);
  }
  for (std::size_t i = 0; i < claims.size(); ++i) {
    const Report::Entry& entry = report.entries[i];
    if (entry.differing == kNobody) continue;
    throw ConfigError(
        prefix(transport, where) +
        fmt::format("ranks disagree about {}: rank {} has {}, rank {} has {}; every rank must pass "
                    "the same",
                    claims[i].name, entry.differing, entry.other.get(), entry.rank,
                    entry.value.get()));
  }
  throw ConfigError(prefix(transport, where) +
                    "ranks disagree in something that is too long to be told");
}

}  // namespace

Complaint complaint_of(FunctionRef<void()> part) {
  Complaint complaint;
  try {
    part();
  } catch (const std::bad_alloc&) {
    complaint.text = "out of memory while planning";
    complaint.shortage.emplace();
  } catch (const OutOfMemory& error) {
    complaint.text = error.what();
    complaint.shortage = error.shortage();
  } catch (const ConfigError& error) {
    complaint.text = error.what();
  } catch (const std::exception& error) {
    complaint.text = error.what();
    complaint.own = std::current_exception();
  }
  return complaint;
}

std::uint64_t digest_of(std::span<const Claim> claims) {
  std::uint64_t digest = 0xcbf29ce484222325U;
  for (const Claim& claim : claims) digest = extended_digest(digest, claim.value);
  return digest;
}

std::uint64_t extended_digest(std::uint64_t digest, std::string_view value) {
  for (const char c : value) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return (digest ^ 0xffU) * 0x100000001b3U;  // a separator: this byte is not in any text
}

std::int64_t agreement_bytes(int ranks) {
  std::int64_t bytes = 0;
  for (int distance = 1; distance < ranks; distance *= 2) {
    bytes += static_cast<std::int64_t>(sizeof(Vote));
  }
  return bytes;
}

std::string prefix(const Transport& transport, const char* where) {
  return rank_prefix(transport.rank(), transport.size()) + where + ": ";
}

std::uint16_t agree(Transport& transport, const char* where, const Complaint& complaint,
                    std::span<const Claim> claims, std::uint16_t flags) {
  return agree_on_digest(transport, where, complaint, claims, digest_of(claims), {flags}).flags;
}

Told agree_on_digest(Transport& transport, const char* where, const Complaint& complaint,
                     std::span<const Claim> claims, std::uint64_t digest, const Told& mine) {
  if (transport.size() == 1) {
    if (complaint.empty()) return mine;
    const std::string text = prefix(transport, where) + complaint.text;
    if (complaint.shortage)
      throw SharedShortage(text, *complaint.shortage, transport.rank(), complaint.over_limit);
    if (complaint.own != nullptr) std::rethrow_exception(complaint.own);
    throw ConfigError(text);
  }
  // Functions of a pass have "::" in their names; constructors have not.
  const bool in_pass = std::strchr(where, ':') != nullptr;
  const EventScope waiting(EventKind::wait, in_pass ? "agreement" : "construction",
                           transport.rank());
  Vote vote;
  vote.digest = digest;
  vote.number = mine.number;
  vote.rank = transport.rank();
  vote.flags = mine.flags;
  if (!complaint.empty()) {
    vote.complaining = transport.rank();
    vote.kinds = kind_of(complaint);
  }
  try {
    exchange(transport, vote);
    if (vote.complaining == kNobody && vote.differing == kNobody) return {vote.flags, vote.number};
    explain(transport, where, complaint, claims, vote.kinds);
  } catch (const ConfigError&) {
    if (complaint.own != nullptr) std::rethrow_exception(complaint.own);
    throw;
  } catch (const SharedShortage&) {
    throw;
  } catch (const std::exception& error) {
    transport.abort(error.what());  // the other ranks would wait for this rank's record
    throw;
  }
}

}  // namespace annulus::ring
