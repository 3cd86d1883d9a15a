#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "support/ring_fixture.h"

// Memory that runs out when a test says so, and what the ring makes of it.
namespace annulus::test {

// Which allocations of a thread fail, counted from when it begins; plans count as one, of 0 bytes.
struct BadMemory {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();  // from this one on
  std::int64_t count = 1;                                         // so many
  std::int64_t every = 0;                                         // every k-th fails; 0: none
  std::int64_t one_in = 0;                                        // at random; 0: none
  std::uint64_t seed = 0;
  std::int64_t largest = std::numeric_limits<std::int64_t>::max();  // larger blocks fail
  std::int64_t plans = 0;  // the first so many plans fail, which is to say attempts
};

// While one exists, allocations of the thread that made it fail by the rule.
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

// One ring with failures: every rank keeps another executor in its cache, asks for the one in
// question and runs forward and backward while memory fails on it by its rule, then once more with
// good memory.
struct Injection {
  std::string name;
  RingOptions options;
  Inputs inputs;
  Results undisturbed;
};
[[nodiscard]] Injection make_injection(std::string name, RingOptions options, const Inputs& inputs);

struct Recovered {
  std::int64_t failures = 0;  // injected
  std::int64_t asked = 0;     // allocations of the rank that made most
  bool recovered = false;     // else all ranks have raised OutOfMemory
  std::string how;            // RingAttention::recovery()
};
// Reports as test failures: ranks that end differently, that wait, errors without advice, results
// that are not those of the undisturbed run, memory that is left behind.
[[nodiscard]] Recovered inject(const Injection& injection,
                               const std::function<BadMemory(int rank)>& rule);

// Over all of a list of rings: single failures at every allocation, on one rank or all; every k-th
// allocation; blocks that are too large; attempts that fail until the last strategy. Goes on until
// so many failures were injected, and prints what came of them.
void inject_many(std::int64_t failures);

}  // namespace annulus::test
