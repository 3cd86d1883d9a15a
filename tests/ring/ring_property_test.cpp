// Random configurations of everything at once: results are right, bytes and messages are those of
// the plan, calls allocate nothing, and strides change no bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/thread_pool.h"
#include "ring/agreement.h"
#include "ring/tags.h"
#include "support/count_allocations.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

struct Configuration {
  Problem problem;
  RingOptions options;
  Layout layout;
  std::string text;
};

// `long_rows`: several tiles of every kernel, and head dims that kernels for GPUs treat
// differently.
Configuration random_configuration(std::uint64_t seed, bool long_rows = false) {
  Random random(seed);
  const std::int64_t tokens =
      long_rows ? random.between(130, random.one_of<std::int64_t>({200, 300, 450}))
                : random.between(1, random.one_of<std::int64_t>({8, 40, 40, 90}));
  const int ranks = static_cast<int>(random.between(1, long_rows ? 3 : 8));
  const int group = long_rows ? 1 : random.one_of<int>({1, 1, 2, 4, 8});
  const int kv_heads = static_cast<int>(random.between(1, group > 2 ? 1 : 3));
  const std::vector<int> dims = long_rows
                                    ? std::vector{64, 128, 128, 257, 320, 392, 512}
                                    : std::vector{8, 8, 16, 24, 40, 64, 1, 2, 3, 7, 20, 33, 65};
  Problem problem = make_problem("random", any_pattern(random, tokens, group * kv_heads), kv_heads,
                                 tokens, random.one_of<int>(dims), random.between(1, 3),
                                 random.coin() ? MixGradient::full : MixGradient::detached);
  const bool sides_differ = random.between(0, 2) == 0;
  if (sides_differ) problem.shape.key_tokens = random.between(1, 2 * tokens);
  problem.pattern.documents =
      any_documents(random, tokens, problem.shape.keys(), problem.shape.batch);
  if (random.between(0, 3) == 0)
    problem.pattern.output_scale = random.one_of<double>({0.5, 1.0 / 3, -2.0});
  if (random.between(0, 3) == 0) problem.scale = 0.3;
  problem.dtype = random.one_of<DType>({DType::f32, DType::f32, DType::bf16, DType::f16});
  // Drawn apart, so that the other choices of a seed stay what they are.
  Random modifiers(seed + 1'000'000);
  if (modifiers.between(0, 3) == 0)
    problem.softmax.softcap = modifiers.one_of<double>({0.5, 2, 30});
  if (modifiers.between(0, 3) == 0) {
    problem.softmax.dropout_p = modifiers.one_of<double>({0.1, 0.5, 0.9});
    problem.softmax.dropout_seed = seed << 32 | seed;
  }
  RingOptions options = ring_options(problem, any_placement(random, tokens, ranks));
  if (sides_differ) options.key_placement = any_placement(random, problem.shape.keys(), ranks);
  options.reproducible = random.between(0, 4) == 0;
  options.schedule =
      random.one_of<Schedule>({Schedule::ring, Schedule::gather, Schedule::automatic});
  if (options.reproducible && options.schedule == Schedule::ring)
    options.schedule = Schedule::gather;
  options.min_tokens_for_ring = random.between(0, 100);
  options.backward_travel = random.one_of<BackwardTravel>(
      {BackwardTravel::automatic, BackwardTravel::keys, BackwardTravel::queries});
  options.blocking = random.between(0, 3) == 0;
  problem.sinks = random.between(0, 2) == 0;
  Configuration out{problem, options,
                    random.one_of<Layout>({Layout::dense, Layout::padded, Layout::heads_major}),
                    ""};
  out.text = "seed " + std::to_string(seed) + ": " + problem.pattern.name +
             (problem.pattern.causal ? " causal, window (" : ", window (") +
             std::to_string(problem.pattern.window.before) + ", " +
             std::to_string(problem.pattern.window.after) + "), " + std::to_string(tokens) +
             " tokens, heads " + std::to_string(problem.shape.q_heads) + "/" +
             std::to_string(kv_heads) + ", d " + std::to_string(problem.shape.head_dim) + ", " +
             name_of(problem.dtype) + ", " + std::to_string(ranks) + " ranks, " +
             options.placement.name() + ", " + name_of(options.schedule) +
             (options.reproducible ? ", reproducible" : "") +
             (problem.mix == MixGradient::detached ? ", detached" : "") +
             describe(problem.pattern.documents) + (problem.sinks ? ", sinks" : "") + ", softcap " +
             std::to_string(problem.softmax.softcap) + ", dropout " +
             std::to_string(problem.softmax.dropout_p);
  if (sides_differ) {
    out.text +=
        ", " + std::to_string(problem.shape.keys()) + " keys, " + options.key_placement->name();
  }
  return out;
}

// fp32 as everywhere. In a handful of 16-bit rows the rounding of one score is no statistic: a
// looser bound, on all results. The log-sum-exp of a short row on AMX tiles is good to 3e-6, which
// is what their exponentials are.
void expect_right(const Configuration& c, const Results& results, const Expected& expected) {
  if (c.problem.dtype == DType::f32) {
    expect_matches(c.problem, results, expected);
    return;
  }
  const double unit = c.problem.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  const double gradients = std::max(
      {rms(expected.gradients.dq), rms(expected.gradients.dk), rms(expected.gradients.dv)});
  for (std::size_t m = 0; m < 5; ++m) {
    const double floor = m == 1 ? 1.0 : m == 0 ? 0.0 : gradients;
    EXPECT_LE(relative_rms(*members(results)[m], *members(expected)[m], floor),
              m == 1 ? 4e-6 : 2 * unit)
        << kResultNames[m];
  }
  EXPECT_LE(relative_rms(results.dsinks, expected.gradients.dsinks, rms(expected.scales.dsinks)),
            2 * unit)
      << "dsinks";
}

TEST(RingProperty, RandomConfigurationsMatchTheReference) {
  for (std::uint64_t seed = 0; seed < 450; ++seed) {
    const Configuration c = random_configuration(seed, seed >= 400);
    SCOPED_TRACE(c.text);
    const Inputs inputs = random_inputs(c.problem, seed);
    expect_right(c, run_ring(c.options, inputs, c.layout), reference_of(c.problem, inputs));
    if (HasFailure()) return;
  }
}

// A key with other values, however large or not finite, changes no bit of the rows that do not see
// it.
TEST(RingProperty, RowsDoNotDependOnKeysThatTheyDoNotSee) {
  for (std::uint64_t seed = 500; seed < 850; ++seed) {
    Configuration c = random_configuration(seed, seed >= 800);
    c.options.backward = false;
    Random random(seed + 1'000'000);
    const reference::Shape& shape = c.problem.shape;
    const std::int64_t key = random.between(0, shape.keys() - 1);
    const double value = random.one_of<double>({3.0, 1e4, std::numeric_limits<double>::quiet_NaN(),
                                                std::numeric_limits<double>::infinity()});
    SCOPED_TRACE(c.text + ", key " + std::to_string(key) + " becomes " + std::to_string(value));
    const test::Inputs inputs = test::random_inputs(c.problem, seed);
    test::Inputs changed = inputs;
    const std::int64_t width = std::int64_t{shape.kv_heads} * shape.head_dim;
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      const auto first = (b * shape.keys() + key) * width;
      std::fill_n(changed.k.begin() + first, width, value);
      std::fill_n(changed.v.begin() + first, width, -value);
    }
    const test::Results before = test::run_ring(c.options, inputs, c.layout);
    const test::Results after = test::run_ring(c.options, changed, c.layout);
    const Pattern& pattern = c.problem.pattern;
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < shape.batch * shape.tokens * shape.q_heads; ++row) {
      const auto head = static_cast<int>(row % shape.q_heads);
      const std::int64_t query = row / shape.q_heads % shape.tokens;
      const std::int64_t entry = row / shape.q_heads / shape.tokens;
      const bool sees = std::any_of(
          pattern.branches.begin(), pattern.branches.end(),
          [&](const Branch& branch) { return pattern.allows(branch, head, query, key, entry); });
      if (sees) continue;
      const auto same = [&](const std::vector<float>& a, const std::vector<float>& b,
                            std::int64_t elements) {
        return std::memcmp(a.data() + row * elements, b.data() + row * elements,
                           static_cast<std::size_t>(elements) * sizeof(float)) == 0;
      };
      if (!same(before.o, after.o, shape.head_dim) || !same(before.lse, after.lse, 1)) ++wrong;
    }
    EXPECT_EQ(wrong, 0) << "rows changed that do not see the key";
    if (HasFailure()) return;
  }
}

// ---- traffic -----------------------------------------------------------------------------------

// (step, peer) pairs of a plan's outgoing hops: what may be a message.
std::map<int, std::int64_t> messages_by_peer(const Plan& plan) {
  std::map<int, std::int64_t> out;
  for (int step = 1; step <= plan.steps(); ++step) {
    std::set<int> peers;
    for (const Hop& hop : plan.outgoing(step)) peers.insert(hop.peer);
    for (const int peer : peers) ++out[peer];
  }
  return out;
}

TEST(RingProperty, BytesAndMessagesAreThosePredicted) {
  for (std::uint64_t seed = 1000; seed < 1300; ++seed) {
    const Configuration c = random_configuration(seed);
    SCOPED_TRACE(c.text);
    const Inputs inputs = random_inputs(c.problem, seed);
    // Rows of messages are multiples of 16 bytes.
    const auto row = c.options.head_dim * static_cast<std::int64_t>(size_of(c.options.dtype));
    const std::int64_t row_bytes =
        c.problem.pattern.times_in(c.options.batch) * 2 * ((row + 15) / 16 * 16);
    run_in_process(c.options.placement.ranks(), [&](Transport& inner) {
      WatchedTransport transport(inner);
      const int rank = transport.rank();
      RingAttention ring(c.options, transport);
      Shard shard(c.options, rank);
      shard.load(inputs);
      for (const bool backward : {false, true, true, false}) {
        transport.clear();
        const TransportCounters before = transport.counters();
        backward ? shard.backward(ring) : shard.forward(ring);
        const TransportCounters after = transport.counters();
        const std::int64_t predicted =
            backward ? ring.predicted_backward_bytes() : ring.predicted_forward_bytes();
        EXPECT_EQ(static_cast<std::int64_t>(after.bytes_sent - before.bytes_sent), predicted);
        const auto parcels = transport.sent(ring::kTagParcels);
        const auto returns = transport.sent(ring::kTagReturns);
        const auto agreement = transport.sent(ring::kTagAgree);
        EXPECT_EQ(predicted, parcels.bytes + returns.bytes + agreement.bytes);
        EXPECT_LE(agreement.messages, 3);  // log2(8)
        EXPECT_LE(agreement.bytes, 3 * 1024);
        if (!backward) {
          // Forward is the plan: every row of every hop once, K and V together in one message per
          // peer and step.
          std::int64_t unit_rows = 0;
          for (int step = 1; step <= ring.plan().steps(); ++step) {
            unit_rows += ring.plan().unit_rows(ring.plan().outgoing(step));
          }
          EXPECT_EQ(parcels.bytes, unit_rows * row_bytes);
          EXPECT_EQ(returns.messages, 0);
          std::map<int, std::int64_t> sent;
          for (const auto& [key, count] : transport.sent()) {
            if (key.first == ring::kTagParcels) sent[key.second] += count.messages;
          }
          EXPECT_EQ(sent, messages_by_peer(ring.plan()));
        } else if (!c.options.reproducible) {
          std::map<int, std::int64_t> sent;
          for (const auto& [key, count] : transport.sent()) {
            if (key.first == ring::kTagParcels) sent[key.second] += count.messages;
          }
          EXPECT_EQ(sent, messages_by_peer(ring.backward_plan()));
          // Gradients go straight home: at most one message per owner and step.
          for (const auto& [key, count] : transport.sent()) {
            if (key.first != ring::kTagReturns) continue;
            EXPECT_LE(count.messages, ring.backward_plan().steps());
          }
        }
      }
    });
    if (HasFailure()) return;
  }
}

// Sizes of all messages, in order, by tag and peer. A transport's own counters cannot show a
// message that nobody receives, or a receive that nobody answers: it counts both ends when it
// delivers.
class PostedTransport : public WatchedTransport {
 public:
  using WatchedTransport::WatchedTransport;
  using Posts = std::map<std::pair<std::uint32_t, int>, std::vector<std::int64_t>>;

  std::unique_ptr<Ticket> post(std::span<const Message> messages, const Event& after) override {
    for (const Message& message : messages) {
      Posts& posts = message.way == Way::send ? sends : receives;
      posts[{message.tag, message.peer}].push_back(message.bytes);
    }
    return WatchedTransport::post(messages, after);
  }

  Posts sends;
  Posts receives;
};

TEST(RingProperty, EverythingSentIsReceived) {
  std::size_t messages = 0;
  for (std::uint64_t seed = 2000; seed < 2040; ++seed) {
    const Configuration c = random_configuration(seed);
    SCOPED_TRACE(c.text);
    const Inputs inputs = random_inputs(c.problem, seed);
    const auto ranks = static_cast<std::size_t>(c.options.placement.ranks());
    std::vector<PostedTransport::Posts> sends(ranks);
    std::vector<PostedTransport::Posts> receives(ranks);
    run_in_process(c.options.placement.ranks(), [&](Transport& inner) {
      PostedTransport transport(inner);
      const auto rank = static_cast<std::size_t>(transport.rank());
      RingAttention ring(c.options, transport);
      Shard shard(c.options, transport.rank());
      shard.load(inputs);
      shard.forward(ring);
      shard.backward(ring);
      sends[rank] = transport.sends;
      receives[rank] = transport.receives;
    });
    std::vector<PostedTransport::Posts> expected(ranks);  // receives, from what was sent
    for (std::size_t sender = 0; sender < ranks; ++sender) {
      for (const auto& [to, sizes] : sends[sender]) {
        expected[static_cast<std::size_t>(to.second)][{to.first, static_cast<int>(sender)}] = sizes;
        messages += sizes.size();
      }
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(receives[rank], expected[rank]) << "rank " << rank;
    }
  }
  EXPECT_GT(messages, 1000U);
}

// Fewer bytes is what decides which side travels.
TEST(RingProperty, AutomaticTravelNeverSendsMoreThanTheForcedOnes) {
  for (std::uint64_t seed = 3000; seed < 3060; ++seed) {
    Configuration c = random_configuration(seed);
    c.options.reproducible = false;
    SCOPED_TRACE(c.text);
    std::map<BackwardTravel, std::int64_t> bytes;
    for (const auto travel :
         {BackwardTravel::automatic, BackwardTravel::keys, BackwardTravel::queries}) {
      c.options.backward_travel = travel;
      std::atomic<std::int64_t> sum{0};
      run_in_process(c.options.placement.ranks(), [&](Transport& transport) {
        sum += RingAttention(c.options, transport).predicted_backward_bytes();
      });
      bytes[travel] = sum;
    }
    EXPECT_EQ(bytes[BackwardTravel::automatic],
              std::min(bytes[BackwardTravel::keys], bytes[BackwardTravel::queries]));
  }
}

// ---- memory ------------------------------------------------------------------------------------

// What `body` and everything that runs beside it allocate.
template <typename Body>
std::int64_t allocations_of(const Body& body) {
  allocations_seen = 0;
  allocations_watched = true;
  body();
  allocations_watched = false;
  return allocations_seen;
}

TEST(RingProperty, AllocationsAreCountedOfEveryKindAndThread) {
  void* volatile kept = nullptr;  // an allocation that nobody looks at may be left out
  EXPECT_EQ(allocations_of([&] {
              kept = ::operator new(1);
              ::operator delete(kept);
            }),
            1);
  EXPECT_EQ(allocations_of([&] {
              kept = ::operator new (256, std::align_val_t{128});
              ::operator delete (kept, std::align_val_t{128});
            }),
            1);
#if !defined(__SANITIZE_THREAD__)  // GCC 12: its allocator runs no hook for this one
  EXPECT_EQ(allocations_of([&] {
              kept = std::aligned_alloc(64, 64);
              std::free(kept);
            }),
            1);
#endif
  EXPECT_EQ(allocations_of([&] {
              kept = std::malloc(1);
              std::free(kept);
            }),
            1);
  EXPECT_EQ(allocations_of([] {}), 0);

  ThreadPool pool(3);
  std::atomic<int> awake{0};  // a thread that starts may allocate
  pool.run_parallel(3, [&](std::int64_t, int) {
    ++awake;
    while (awake < 3) std::this_thread::yield();
  });
  std::atomic<int> on_workers{0};
  const std::int64_t seen = allocations_of([&] {
    pool.run_parallel(300, [&](std::int64_t, int slot) {
      if (slot == 0) {
        while (on_workers == 0) std::this_thread::yield();
        return;
      }
      const std::unique_ptr<std::byte[]> memory(new std::byte[100]);
      *static_cast<volatile std::byte*>(memory.get()) = std::byte{1};
      ++on_workers;
    });
  });
  EXPECT_EQ(seen, on_workers.load());
}

TEST(RingProperty, ForwardAndBackwardAllocateNothing) {
  for (std::uint64_t seed = 4000; seed < 4120; ++seed) {
    const Configuration c = random_configuration(seed);
    SCOPED_TRACE(c.text);
    const Inputs inputs = random_inputs(c.problem, seed);
    const int ranks = c.options.placement.ranks();
    // All ranks are watched together, and so are the pool's threads, which work for any of them:
    // none may still prepare, or already clean up.
    std::barrier together(ranks);
    std::int64_t in_forward = -1;
    std::int64_t in_both = -1;
    run_in_process(ranks, [&](Transport& transport) {
      // A rank that fails does not keep the others waiting.
      const auto leave = [](std::barrier<>* barrier) { barrier->arrive_and_drop(); };
      const std::unique_ptr<std::barrier<>, decltype(leave)> member(&together, leave);
      RingAttention ring(c.options, transport);
      Shard shard(c.options, transport.rank(), c.layout);
      shard.load(inputs);
      shard.state = ring.make_branch_state();
      BranchState* const state = shard.detached ? &shard.state : nullptr;
      const auto forward = [&] {
        ring.forward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                     shard.lse.view(), state, shard.more());
      };
      const auto in_turn = [&](const auto& body) {
        together.arrive_and_wait();
        if (transport.rank() == 0) body();
        together.arrive_and_wait();
      };
      forward();
      shard.backward(ring);
      in_turn([] {
        allocations_seen = 0;
        allocations_watched = true;
      });
      forward();
      in_turn([&] { in_forward = allocations_seen; });
      shard.backward(ring);
      in_turn([&] {
        allocations_watched = false;
        in_both = allocations_seen;
      });
    });
    allocations_watched = false;
    EXPECT_EQ(in_forward, 0) << "forward";
    EXPECT_EQ(in_both - in_forward, 0) << "backward";
    if (HasFailure()) return;
  }
}

// Counts the memory that messages are sent from and received into.
class ExposedTransport final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  Region expose(std::span<std::byte> memory, const Device& device,
                std::shared_ptr<Queue> copies) override {
    exposed += std::ssize(memory);
    return ForwardingTransport::expose(memory, device, std::move(copies));
  }

  std::int64_t exposed = 0;
};

// A limit of exactly the needed bytes is enough; with one byte less, all ranks reject the options.
TEST(RingProperty, CommunicationBytesAreThoseThatTheLimitIsHeldAgainst) {
  int refused = 0;
  for (std::uint64_t seed = 5000; seed < 5040; ++seed) {
    Configuration c = random_configuration(seed);
    SCOPED_TRACE(c.text);
    const int ranks = c.options.placement.ranks();
    std::vector<std::int64_t> bytes(static_cast<std::size_t>(ranks));
    std::atomic<Schedule> schedule{Schedule::ring};
    run_in_process(ranks, [&](Transport& inner) {
      ExposedTransport transport(inner);
      const RingAttention ring(c.options, transport);
      const MemoryInfo info = ring.memory_info();
      bytes[static_cast<std::size_t>(transport.rank())] = info.communication_bytes;
      if (ring.transfers() != "shared device memory") {  // which another transport exposes
        EXPECT_EQ(info.communication_bytes, transport.exposed);
      }
      schedule = ring.schedule();
      EXPECT_GE(info.workspace_bytes, info.communication_bytes + info.state_bytes);
      EXPECT_GT(info.scratch_bytes, 0);
      EXPECT_FALSE(info.complexity.empty());
    });
    // `automatic` would go round the limit where it can.
    if (!c.options.reproducible) c.options.schedule = schedule;
    const std::int64_t most = *std::max_element(bytes.begin(), bytes.end());
    c.options.limits.communication_bytes = most;
    run_in_process(
        ranks, [&](Transport& transport) { EXPECT_NO_THROW(RingAttention(c.options, transport)); });
    if (most == 0) continue;
    c.options.limits.communication_bytes = most - 1;
    run_in_process(ranks, [&](Transport& transport) {
      EXPECT_THROW(RingAttention(c.options, transport), ConfigError);
    });
    ++refused;
  }
  EXPECT_GT(refused, 15);
}

// ---- zero copy ---------------------------------------------------------------------------------

// run_ring itself throws when an input or a byte between rows has changed.
TEST(RingProperty, StridesChangeNoBit) {
  for (std::uint64_t seed = 6000; seed < 6120; ++seed) {
    const Configuration c = random_configuration(seed);
    SCOPED_TRACE(c.text);
    const Inputs inputs = random_inputs(c.problem, seed);
    const Results dense = run_ring(c.options, inputs, Layout::dense);
    EXPECT_EQ(first_difference(run_ring(c.options, inputs, Layout::heads_major), dense), "");
    EXPECT_EQ(first_difference(run_ring(c.options, inputs, Layout::padded), dense), "");
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace annulus::test
