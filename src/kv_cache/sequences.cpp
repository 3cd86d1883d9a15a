#include "kv_cache/sequences.h"

#include <fmt/format.h>

#include "annulus/error.h"

namespace annulus::kv_cache {
namespace {

Band band_of(const CacheOptions& options) {
  Pattern pattern;
  pattern.causal = options.causal;
  pattern.window = options.window;
  return pattern.band();
}

}  // namespace

Sequences::Sequences(const CacheOptions& options, int ranks)
    : ranks_(ranks),
      block_(options.block),
      capacity_(options.capacity),
      band_(band_of(options)),
      stripes_((capacity_ + stripe() - 1) / stripe()),
      lengths_(static_cast<std::size_t>(options.batch)),
      highest_(static_cast<std::size_t>(options.batch)) {
  // The oldest token that is needed may be the last one of its stripe.
  if (band_.least != -Band::kUnlimited) ++stripes_;
  ring_rows_ = stripes_ * block_;
}

RowPositions Sequences::positions(int rank) const { return {block_, stripe(), rank * block_}; }

std::int64_t Sequences::oldest(std::int64_t length) const {
  if (length == 0) return 0;
  const std::int64_t last_stripe = (length - 1) / stripe();
  return std::max<std::int64_t>(0, last_stripe - stripes_ + 1) * stripe();
}

std::string Sequences::append_complaint(std::span<const std::int64_t> counts) const {
  for (std::size_t entry = 0; entry < counts.size(); ++entry) {
    const std::int64_t before = lengths_[entry];
    const std::int64_t after = before + counts[entry];
    constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;
    if (after >= kMostTokens)
      return fmt::format("entry {} would have {} tokens, expected fewer than 2^31", entry, after);
    if (band_.least == -Band::kUnlimited) {
      if (after <= capacity_) continue;
      return fmt::format(
          "entry {} has {} tokens and gets {}, the cache has room for {}: make it with a larger "
          "capacity, with a window, or truncate the entry",
          entry, before, counts[entry], capacity_);
    }
    if (counts[entry] == 0 || oldest(std::max(after, highest_[entry])) <= needed(before)) continue;
    return fmt::format(
        "entry {} gets {} tokens whose window begins {} tokens before them, the cache holds {} "
        "tokens at a time: append fewer at once, or make it with a larger capacity",
        entry, counts[entry], -band_.least, capacity_);
  }
  return "";
}

std::string Sequences::attend_complaint(std::span<const std::int64_t> counts,
                                        std::span<const std::int64_t> fresh) const {
  for (std::size_t entry = 0; entry < counts.size(); ++entry) {
    const std::int64_t added = fresh.empty() ? 0 : fresh[entry];
    const std::int64_t length = lengths_[entry] + added;
    if (counts[entry] == 0) continue;
    if (counts[entry] > length) {
      return fmt::format(
          "q has {} tokens of entry {}, which has {}: queries are the last tokens of an entry, so "
          "append their keys first",
          counts[entry], entry, length);
    }
    const std::int64_t first = needed(length - counts[entry]);
    const std::int64_t left = oldest(std::max(length, highest_[entry]));
    if (left <= first) continue;
    return fmt::format(
        "the window of the first of {} queries of entry {} begins at token {}, and tokens before "
        "{} have been dropped: attend before the next append, or make the cache with a larger "
        "capacity",
        counts[entry], entry, first, left);
  }
  return "";
}

void Sequences::append(std::span<const std::int64_t> counts) {
  for (std::size_t entry = 0; entry < counts.size(); ++entry) {
    lengths_[entry] += counts[entry];
    highest_[entry] = std::max(highest_[entry], lengths_[entry]);
  }
}

void Sequences::check_entry(const char* name, std::int64_t entry) const {
  if (entry >= 0 && entry < std::ssize(lengths_)) return;
  throw ConfigError(fmt::format("{} is {}, expected 0 to {}", name, entry, lengths_.size() - 1));
}

void Sequences::truncate(std::int64_t entry, std::int64_t length) {
  check_entry("entry", entry);
  std::int64_t& now = lengths_[static_cast<std::size_t>(entry)];
  std::int64_t& highest = highest_[static_cast<std::size_t>(entry)];
  if (length < 0 || length > now) {
    throw ConfigError(
        fmt::format("length is {}, expected 0 to the {} tokens of entry {}", length, now, entry));
  }
  if (length > 0 && oldest(highest) > needed(length)) {
    throw ConfigError(fmt::format(
        "length is {}, and tokens of entry {} before {} have been dropped: expected 0, or at least "
        "{}",
        length, entry, oldest(highest), oldest(highest) - band_.least));
  }
  now = length;
  if (length == 0) highest = 0;
}

void Sequences::copy(std::int64_t from, std::int64_t to) {
  lengths_[static_cast<std::size_t>(to)] = lengths_[static_cast<std::size_t>(from)];
  highest_[static_cast<std::size_t>(to)] = highest_[static_cast<std::size_t>(from)];
}

void Sequences::for_each_place(std::int64_t entry, std::int64_t first, std::int64_t count,
                               FunctionRef<void(const Place&)> use) const {
  const std::int64_t begin = lengths_[static_cast<std::size_t>(entry)];
  for (std::int64_t token = first; token < first + count;) {
    const std::int64_t position = begin + token;
    Place place;
    place.rank = static_cast<int>(position / block_ % ranks_);
    place.token = token;
    place.row = (position / stripe() * block_ + position % block_) % ring_rows_;
    // Blocks of one rank alone are neighbours.
    const std::int64_t room = ranks_ == 1 ? ring_rows_ - place.row : block_ - position % block_;
    place.count = std::min(room, first + count - token);
    use(place);
    token += place.count;
  }
}

void Sequences::for_each_kept(std::int64_t entry, int rank,
                              FunctionRef<void(std::int64_t, std::int64_t)> use) const {
  const RowPositions rows = positions(rank);
  const std::int64_t end = rows.before(lengths_[static_cast<std::size_t>(entry)]);
  const std::int64_t begin =
      std::min(end, rows.before(oldest(highest_[static_cast<std::size_t>(entry)])));
  for (std::int64_t row = begin; row < end;) {
    const std::int64_t count = std::min(end - row, ring_rows_ - row % ring_rows_);
    use(row % ring_rows_, count);
    row += count;
  }
}

}  // namespace annulus::kv_cache
