#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "ring/agreement.h"

// What to do when memory runs out while an executor is made. Everything here is a function of what
// all ranks have in common, so that they go the same way without talking.
namespace annulus::ring {

// How to compute a call: as asked, or with less memory.
struct Strategy {
  std::int64_t sequences = 0;  // at a time; 0: all
  int kv_heads = 0;            // at a time, with their query heads; 0: all
  bool by_ring = false;        // rows hop around even if they were to be gathered
  std::string what;            // for people

  [[nodiscard]] bool whole() const { return sequences == 0 && kv_heads == 0; }
  [[nodiscard]] RingOptions applied_to(RingOptions options) const;
  [[nodiscard]] const std::string& text() const { return what; }
  [[nodiscard]] const char* event() const;  // "split heads"
};

// In this order: as asked (caches have been dropped); fewer sequences at a time, down to one; fewer
// heads at a time, down to one K/V head; and the last of these by the ring schedule. Each takes at
// most half of what the one before it took. Detached mixing keeps rows of all heads side by side
// between forward and backward: its heads stay together.
[[nodiscard]] std::vector<Strategy> strategies(const RingOptions& options);

// The pattern of some neighbouring query heads.
[[nodiscard]] Pattern pattern_of_heads(const Pattern& pattern, int first, int count);

// What has been tried in vain, and the error that says so: the first one, what was tried, and what
// would fit.
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
