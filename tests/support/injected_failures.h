#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "support/ring_fixture.h"

// Makes allocations fail on demand, and checks what the ring does about it.
namespace annulus::test {

// Which allocations of a thread fail, counted from the start of the rule. A plan counts as an
// allocation of 0 bytes.
struct BadMemory {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();  // the first that fails
  std::int64_t count = 1;                                         // how many fail
  std::int64_t every = 0;                                         // every k-th fails; 0: none
  std::int64_t one_in = 0;                                        // at random; 0: none
  std::uint64_t seed = 0;
  std::int64_t largest = std::numeric_limits<std::int64_t>::max();  // larger blocks fail
  std::int64_t plans = 0;  // the first plans fail: one for each attempt
};

// While one exists, allocations of the thread that made it fail according to the rule.
class FailingMemory {
 public:
  explicit FailingMemory(const BadMemory& rule);
  ~FailingMemory();
  FailingMemory(const FailingMemory&) = delete;
  FailingMemory& operator=(const FailingMemory&) = delete;

  [[nodiscard]] std::int64_t asked() const { return asked_; }
  [[nodiscard]] std::int64_t failed() const { return failed_; }

 private:
  static bool ask(std::int64_t bytes, const char* what);

  const BadMemory rule_;
  std::int64_t asked_ = 0;
  std::int64_t planned_ = 0;
  std::int64_t failed_ = 0;
  FailingMemory* const before_;
};

// One ring with failures. Every rank keeps another executor in its cache, gets the one under test
// and runs forward and backward while its allocations fail according to the rule; then once more
// without failures.
struct Injection {
  std::string name;
  RingOptions options;
  Inputs inputs;
  Results undisturbed;
};
[[nodiscard]] Injection make_injection(std::string name, RingOptions options, const Inputs& inputs);

struct Recovered {
  std::int64_t failures = 0;  // number of injected failures
  std::int64_t asked = 0;     // allocations of the rank with the most
  bool recovered = false;     // otherwise all ranks have raised OutOfMemory
  std::string how;            // RingAttention::recovery()
};
// Reports as test failures: ranks that end differently or hang, errors without advice, results that
// differ from those of the undisturbed run, and leaked memory.
[[nodiscard]] Recovered inject(const Injection& injection,
                               const std::function<BadMemory(int rank)>& rule);

// Runs a list of rings with: single failures at every allocation, on one rank or all; a failure at
// every k-th allocation; failures of large blocks; attempts that fail until the last strategy.
// Continues until this many failures were injected, and prints a summary.
void inject_many(std::int64_t failures);

}  // namespace annulus::test
