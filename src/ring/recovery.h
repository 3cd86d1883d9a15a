#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "ring/agreement.h"

// What to do when memory runs out while an executor is made. Everything here depends only on what
// is equal on all ranks, so they make the same choices without communication.
namespace annulus::ring {

// How to compute a call: as requested, or with less memory.
struct Strategy {
  std::int64_t sequences = 0;  // at a time; 0: all
  int kv_heads = 0;            // at a time, with their query heads; 0: all
  bool by_ring = false;        // ring schedule even if gather was requested or chosen
  std::string what;            // for messages

  [[nodiscard]] bool whole() const { return sequences == 0 && kv_heads == 0; }
  [[nodiscard]] RingOptions applied_to(RingOptions options) const;
  [[nodiscard]] const std::string& text() const { return what; }
  [[nodiscard]] const char* event() const;  // "split heads"
};

// In this order: as requested (after caches were dropped); fewer sequences at a time, down to one;
// fewer heads at a time, down to one K/V head; the last of these with the ring schedule. Each piece
// is at most half as large as the one before it. Detached mixing stores the rows of all heads in
// one branch state, so its heads are not split.
[[nodiscard]] std::vector<Strategy> strategies(const RingOptions& options);

// The pattern of `count` query heads from `first` on.
[[nodiscard]] Pattern pattern_of_heads(const Pattern& pattern, int first, int count);

// The failed attempts, and the error that reports them: the first shortage, what was tried, and
// what would fit.
class Trials {
 public:
  explicit Trials(const RingOptions& options) : options_(options) {}
  void add(const SharedShortage& shortage) { first_ = last_ = shortage; }
  void add(const SharedShortage& shortage, const Strategy& strategy);
  [[nodiscard]] OutOfMemory error() const;

 private:
  const RingOptions& options_;
  std::optional<SharedShortage> first_;
  std::optional<SharedShortage> last_;
  std::vector<std::string> tried_;
};

}  // namespace annulus::ring
