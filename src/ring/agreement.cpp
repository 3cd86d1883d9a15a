#include "ring/agreement.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "annulus/error.h"

namespace annulus::ring {
namespace {

constexpr std::size_t kMaxClaims = 16;
constexpr std::size_t kTextBytes = 480;
constexpr std::int32_t kNobody = INT32_MAX;

// What travels. The reduction keeps the complaint of the lowest rank, and per claim the lowest
// rank's value together with the lowest rank that differs from it.
struct Record {
  std::int32_t complaining_rank = kNobody;
  std::array<char, kTextBytes> complaint{};
  struct Entry {
    std::uint64_t value = 0;
    std::int32_t rank = kNobody;       // whose value it is
    std::int32_t differing = kNobody;  // a rank that has another value
  };
  std::array<Entry, kMaxClaims> claims;
};

void merge(Record& into, const Record& other) {
  if (other.complaining_rank < into.complaining_rank) {
    into.complaining_rank = other.complaining_rank;
    into.complaint = other.complaint;
  }
  for (std::size_t i = 0; i < kMaxClaims; ++i) {
    Record::Entry& a = into.claims[i];
    const Record::Entry& b = other.claims[i];
    std::int32_t differing = std::min(a.differing, b.differing);
    if (a.value != b.value) differing = std::min(differing, std::max(a.rank, b.rank));
    if (b.rank < a.rank) a = b;
    a.differing = differing;
  }
}

}  // namespace

std::int64_t agreement_bytes(int ranks) {
  std::int64_t bytes = 0;
  for (int distance = 1; distance < ranks; distance *= 2) {
    bytes += static_cast<std::int64_t>(sizeof(Record));
  }
  return bytes;
}

std::string prefix(const Transport& transport, const char* where) {
  return fmt::format("[rank {}/{}] {}: ", transport.rank(), transport.size(), where);
}

void agree(Transport& transport, const char* where, const std::string& complaint,
           std::initializer_list<Claim> claims) {
  Record mine;
  const int rank = transport.rank();
  const int size = transport.size();
  if (!complaint.empty()) {
    mine.complaining_rank = rank;
    std::memcpy(mine.complaint.data(), complaint.data(),
                std::min(complaint.size(), kTextBytes - 1));
  }
  for (std::size_t i = 0; i < claims.size(); ++i)
    mine.claims[i] = {claims.begin()[i].value, rank, kNobody};

  // Dissemination: after round i everybody knows of 2^(i+1) ranks behind it. Merging a record twice
  // changes nothing.
  try {
    for (int distance = 1; distance < size; distance *= 2) {
      Record theirs;
      const Record out = mine;
      const auto receive = transport.receive((rank + size - distance) % size, kTagAgree,
                                             std::as_writable_bytes(std::span(&theirs, 1)));
      const auto send =
          transport.send((rank + distance) % size, kTagAgree, std::as_bytes(std::span(&out, 1)));
      receive->wait();
      send->wait();
      merge(mine, theirs);
    }
  } catch (const std::exception& error) {
    transport.abort(error.what());  // the others would wait for this rank's record
    throw;
  }

  if (!complaint.empty()) throw ConfigError(prefix(transport, where) + complaint);
  if (mine.complaining_rank != kNobody) {
    throw ConfigError(prefix(transport, where) + fmt::format("rank {} refused: {}",
                                                             mine.complaining_rank,
                                                             mine.complaint.data()));
  }
  for (std::size_t i = 0; i < claims.size(); ++i) {
    const Record::Entry& entry = mine.claims[i];
    if (entry.differing == kNobody) continue;
    throw ConfigError(
        prefix(transport, where) +
        fmt::format(
            "ranks disagree about {}: rank {} differs from rank {}; every rank must pass the same",
            claims.begin()[i].name, entry.differing, entry.rank));
  }
}

}  // namespace annulus::ring
