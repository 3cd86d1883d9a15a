#include "ring/recovery.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

namespace annulus::ring {
namespace {

// Divisors of `whole` from half of it down to 1, each at most half of the one before. Divisors,
// because pieces of equal size share one executor.
std::vector<std::int64_t> parts_of(std::int64_t whole) {
  std::vector<std::int64_t> parts;
  for (std::int64_t pieces = 2; pieces <= whole; ++pieces) {
    const std::int64_t last = parts.empty() ? whole : parts.back();
    if (whole % pieces == 0 && 2 * (whole / pieces) <= last) parts.push_back(whole / pieces);
  }
  return parts;
}

}  // namespace

RingOptions Strategy::applied_to(RingOptions options) const {
  if (by_ring) options.schedule = Schedule::ring;
  return options;
}

const char* Strategy::event() const {
  if (by_ring) return "smaller working set";
  if (kv_heads > 0) return "split heads";
  return sequences > 0 ? "split batch" : "drop caches";
}

std::vector<Strategy> strategies(const RingOptions& options) {
  std::vector<Strategy> list;
  Strategy strategy;
  const auto add = [&](std::string what) {
    strategy.what = std::move(what);
    list.push_back(strategy);
  };
  add("caches dropped");
  for (const std::int64_t part : parts_of(options.batch)) {
    strategy.sequences = part;
    add(fmt::format("{} of {} sequences at a time", part, options.batch));
  }
  if (options.mix_gradient != MixGradient::detached) {
    const std::string of_one = options.batch > 1 ? " of one sequence" : "";
    for (const std::int64_t part : parts_of(options.kv_heads)) {
      strategy.kv_heads = static_cast<int>(part);
      add(fmt::format("{} of {} K/V heads{} at a time", part, options.kv_heads, of_one));
    }
  }
  // `reproducible` adds up all keys of a row in one step.
  if (!options.reproducible && options.schedule != Schedule::ring &&
      options.placement.ranks() > 1) {
    strategy.by_ring = true;
    add((list.size() > 1 ? strategy.what + ", by" : "by") + std::string(" the ring schedule"));
  }
  return list;
}

Pattern pattern_of_heads(const Pattern& pattern, int first, int count) {
  Pattern part = pattern;
  part.heads = count;
  part.branches.clear();
  for (const Branch& branch : pattern.branches) {
    Branch mine = branch;
    mine.offset.assign(branch.offset.begin() + first, branch.offset.begin() + first + count);
    const bool used = std::any_of(mine.offset.begin(), mine.offset.end(),
                                  [](std::int64_t offset) { return offset >= 0; });
    if (used) part.branches.push_back(std::move(mine));
  }
  // Heads without a branch attend to nothing. A pattern needs a branch, so it gets one without
  // heads.
  if (part.branches.empty()) {
    part.branches.push_back(pattern.branches.front());
    part.branches.front().offset.assign(static_cast<std::size_t>(count), -1);
  }
  return part;
}

void Trials::add(const SharedShortage& shortage, const Strategy& strategy) {
  // A shortage without numbers keeps those of the attempt before it.
  if (shortage.shortage().needed >= 0 || shortage.shortage().free >= 0) last_ = shortage;
  tried_.push_back(strategy.what + (shortage.over_limit()
                                        ? ", whose messages limits.communication_bytes forbids"
                                        : ""));
}

OutOfMemory Trials::error() const {
  std::string text = first_->what();
  if (!tried_.empty()) {
    text += "; tried in vain: ";
    for (const std::string& what : tried_) text += (what == tried_.front() ? "" : "; ") + what;
  }
  const Shortage& least = last_->shortage();
  const int rank = last_->rank();
  const std::int64_t tokens = options_.placement.local_tokens(rank);
  if (least.needed > least.free && least.free > 0) {
    const double excess = static_cast<double>(least.needed) / static_cast<double>(least.free);
    text += fmt::format(
        ". At the least this takes {} bytes on rank {}, where {} are free: use at least {:.0f} "
        "ranks, or at most {:.0f} tokens on a rank instead of {}",
        least.needed, rank, least.free, std::ceil(options_.placement.ranks() * excess),
        std::floor(static_cast<double>(tokens) / excess), tokens);
  } else {
    text += least.needed > 0
                ? fmt::format(
                      ". At the least this takes {} bytes on rank {}: use more ranks or a "
                      "shorter sequence",
                      least.needed, rank)
                : ": use more ranks or a shorter sequence";
  }
  if (options_.dtype == DType::f32) text += ", or a 16-bit dtype";
  return OutOfMemory(text, Shortage{first_->shortage().asked, least.needed, least.free});
}

}  // namespace annulus::ring
