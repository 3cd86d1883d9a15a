#include "support/injected_failures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "core/memory.h"
#include "ring/recovery.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

thread_local FailingMemory* of_this_thread = nullptr;

// Whether all bits should be those of the undisturbed run. They may differ if rows were added in
// the order of another schedule.
bool same_order(const std::string& how) { return how.find("ring schedule") == std::string::npos; }

void expect_advice(const std::string& message) {
  EXPECT_NE(message.find("out of memory"), std::string::npos) << message;
  EXPECT_NE(message.find("ranks"), std::string::npos) << message;
  EXPECT_NE(message.find("tried in vain"), std::string::npos) << message;
}

std::vector<Injection> rings() {
  struct Shape {
    const char* name;
    Pattern pattern;
    int kv_heads;
    std::int64_t tokens;
    std::int64_t batch;
    DType dtype;
    int ranks;
    const char* placement;
    Schedule schedule;
    MixGradient mix = MixGradient::full;
    bool reproducible = false;
  };
  const Pattern blocked = longnet(4, List{16, 64}, List{1, 4}, true);
  const std::vector<Shape> shapes = {
      {"dense_alone_bf16", dense(4), 2, 33, 4, DType::bf16, 1, "contiguous", Schedule::automatic},
      {"dense_ring_fp32", dense(4, true), 4, 40, 2, DType::f32, 3, "zigzag", Schedule::ring},
      {"dense_gather_bf16", dense(6), 3, 37, 6, DType::bf16, 2, "striped", Schedule::gather},
      {"longnet_gather_fp32", blocked, 4, 130, 1, DType::f32, 3, "contiguous", Schedule::gather},
      {"longnet_ring_bf16", blocked, 2, 130, 2, DType::bf16, 4, "striped", Schedule::ring},
      {"groups_fp16", head_groups(6, List{16, 64}, List{1, 2}), 3, 96, 1, DType::f16, 2, "zigzag",
       Schedule::automatic},
      {"detached_bf16", blocked, 4, 66, 4, DType::bf16, 2, "contiguous", Schedule::gather,
       MixGradient::detached},
      {"reproducible_fp32", blocked, 4, 66, 3, DType::f32, 3, "zigzag", Schedule::gather,
       MixGradient::full, true},
  };
  std::vector<Injection> list;
  for (const Shape& s : shapes) {
    Problem problem = make_problem(s.name, s.pattern, s.kv_heads, s.tokens, 16, s.batch, s.mix);
    problem.dtype = s.dtype;
    RingOptions options = ring_options(problem, placement_of(s.placement, s.tokens, s.ranks));
    options.schedule = s.schedule;
    options.reproducible = s.reproducible;
    options.threads = 1 + static_cast<int>(list.size() % 3);
    list.push_back(make_injection(s.name, options, random_inputs(problem, 11)));
  }
  return list;
}

}  // namespace

FailingMemory::FailingMemory(const BadMemory& rule) : rule_(rule), before_(of_this_thread) {
  set_allocation_hook(&ask);  // ... and left there: threads without a rule are not affected
  of_this_thread = this;
}

FailingMemory::~FailingMemory() { of_this_thread = before_; }

bool FailingMemory::ask(std::int64_t bytes, const char* what) {
  FailingMemory* const me = of_this_thread;
  if (me == nullptr) return true;
  const BadMemory& rule = me->rule_;
  const std::int64_t number = me->asked_++;
  bool fails = number >= rule.first && number - rule.first < rule.count;
  fails = fails || (rule.every > 0 && (number + 1) % rule.every == 0) || bytes > rule.largest;
  if (rule.one_in > 0) {
    Random random(rule.seed * 1000 + static_cast<std::uint64_t>(number));
    fails = fails || random.between(1, rule.one_in) == 1;
  }
  if (std::string_view(what) == "plans") fails = fails || me->planned_++ < rule.plans;
  if (fails) ++me->failed_;
  return !fails;
}

Injection make_injection(std::string name, RingOptions options, const Inputs& inputs) {
  Results undisturbed = run_ring(options, inputs);
  return {std::move(name), std::move(options), inputs, std::move(undisturbed)};
}

Recovered inject(const Injection& injection, const std::function<BadMemory(int rank)>& rule) {
  const RingOptions& options = injection.options;
  RingOptions other = options;
  other.head_dim = 8;
  const std::int64_t before = memory_in_use();
  Results results = empty_results(options);
  Results again = empty_results(options);
  Recovered outcome;
  std::mutex mutex;
  std::vector<std::string> errors(static_cast<std::size_t>(options.placement.ranks()));
  const auto outcomes = run_ranks(options.placement.ranks(), [&](Transport& transport) {
    RingAttentionCache cache(transport);
    (void)cache.get(other);
    Shard shard(options, transport.rank());
    shard.load(injection.inputs);
    const auto run = [&](Results& into) {
      const std::shared_ptr<RingAttention> ring = cache.get(options);
      if (&into == &results) {
        const std::lock_guard lock(mutex);
        outcome.how = ring->recovery();
      }
      // The memory of a branch state is allocated by the caller and separately on each rank.
      std::optional<FailingMemory> good;
      if (shard.detached) good.emplace(BadMemory{});
      shard.forward(*ring);
      shard.backward(*ring);
      shard.collect(into);
    };
    {
      const FailingMemory failing(rule(transport.rank()));
      try {
        run(results);
      } catch (const OutOfMemory& error) {
        errors[static_cast<std::size_t>(transport.rank())] = error.what();
      }
      const std::lock_guard lock(mutex);
      outcome.failures += failing.failed();
      outcome.asked = std::max(outcome.asked, failing.asked());
    }
    cache.clear_cache();
    run(again);  // the ring works as before
  });
  for (const RankOutcome& rank : outcomes) EXPECT_EQ(rank.message, "") << injection.name;
  EXPECT_EQ(memory_in_use(), before) << injection.name;
  EXPECT_EQ(first_difference(again, injection.undisturbed), "") << injection.name;

  const auto raised = std::count_if(errors.begin(), errors.end(),
                                    [](const std::string& text) { return !text.empty(); });
  outcome.recovered = raised == 0;
  if (raised > 0) {
    EXPECT_EQ(raised, options.placement.ranks()) << injection.name << ": not on all ranks";
    for (const std::string& message : errors) expect_advice(message);
    outcome.how = "error";
  } else if (same_order(outcome.how)) {
    EXPECT_EQ(first_difference(results, injection.undisturbed), "")
        << injection.name << ", " << outcome.how;
  } else {
    const std::vector<const std::vector<float>*> mine = members(results);
    const std::vector<const std::vector<float>*> theirs = members(injection.undisturbed);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const std::vector<double> expected(theirs[i]->begin(), theirs[i]->end());
      // Sums were made in another order, and 16-bit results rounded to a neighbour.
      EXPECT_LT(relative_rms(*mine[i], expected), options.dtype == DType::f32 ? 1e-6 : 4e-3)
          << injection.name << ", " << outcome.how << ", " << kResultNames[i];
    }
  }
  return outcome;
}

void inject_many(std::int64_t failures) {
  const std::vector<Injection> list = rings();
  struct Count {
    std::int64_t failures = 0;
    std::int64_t runs = 0;
    std::int64_t recovered = 0;
  };
  Count all;
  std::map<std::string, Count> kinds;
  std::map<std::string, std::int64_t> ways;
  const auto one = [&](const char* kind, const Injection& injection,
                       const std::function<BadMemory(int rank)>& rule) {
    Recovered outcome = inject(injection, rule);
    if (outcome.failures == 0) return outcome;
    for (Count* count : {&all, &kinds[kind]}) {
      count->failures += outcome.failures;
      ++count->runs;
      count->recovered += outcome.recovered ? 1 : 0;
    }
    ++ways[outcome.how];
    return outcome;
  };
  for (std::int64_t round = 0; all.failures < failures; ++round) {
    for (const Injection& injection : list) {
      const int ranks = injection.options.placement.ranks();
      const int unlucky = static_cast<int>(round) % ranks;
      const bool everywhere = round % 2 == 1;
      const auto on = [&](bool all_ranks, BadMemory rule) {
        return [=](int rank) { return all_ranks || rank == unlucky ? rule : BadMemory{}; };
      };
      // Another allocation fails in every round.
      const std::int64_t sites = inject(injection, [](int) { return BadMemory{}; }).asked;
      const BadMemory single{.first = round % sites};
      EXPECT_TRUE(one("one allocation", injection, on(everywhere, single)).recovered)
          << injection.name << " " << single.first;
      const BadMemory row{.first = round * 7 % sites, .count = 2 + round % 9};
      (void)one("2 to 10 in a row", injection, on(everywhere, row));
      (void)one("every 2nd to 40th", injection, on(!everywhere, {.every = 2 + round * 3 % 39}));
      const BadMemory random{.one_in = 8 + round % 33, .seed = static_cast<std::uint64_t>(round)};
      (void)one("one in 8 to 40 at random", injection, on(!everywhere, random));
      const BadMemory large{.largest = std::int64_t{16384} >> (round % 9)};
      (void)one("blocks above a size", injection, on(everywhere, large));
      const auto strategies = ring::strategies(injection.options);
      // Until all attempts have been tried.
      const std::int64_t rung = round % (std::ssize(strategies) + 1);
      const Recovered outcome =
          one("attempts, one after the other", injection, on(everywhere, {.plans = rung + 1}));
      const bool left = rung < std::ssize(strategies);
      EXPECT_EQ(outcome.recovered, left) << injection.name << " " << rung;
      if (left) {
        EXPECT_EQ(outcome.how, strategies[static_cast<std::size_t>(rung)].what) << injection.name;
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
  const auto print = [](const char* kind, const Count& count) {
    std::printf("%-30s %6lld failures in %5lld calls, %5lld recovered (%.1f %%)\n", kind,
                static_cast<long long>(count.failures), static_cast<long long>(count.runs),
                static_cast<long long>(count.recovered),
                100.0 * static_cast<double>(count.recovered) / static_cast<double>(count.runs));
  };
  for (const auto& [kind, count] : kinds) print(kind.c_str(), count);
  print("all", all);
  for (const auto& [how, count] : ways)
    std::printf("  %5lld  %s\n", static_cast<long long>(count), how.c_str());
}

}  // namespace annulus::test
