// Whatever one rank or all of them get wrong, every rank hears of it at once, in words, and nothing
// hangs or breaks.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "ring/agreement.h"
#include "ring/tags.h"
#include "support/ring_fixture.h"
#include "support/small_ring.h"

namespace annulus::test {
namespace {

// ---- tensors -----------------------------------------------------------------------------------

struct Views {
  TensorView q, k, v, o, lse, dout, dq, dk, dv;

  explicit Views(const Shard& s)
      : q(s.q.view()),
        k(s.k.view()),
        v(s.v.view()),
        o(s.o.view()),
        lse(s.lse.view()),
        dout(s.dout.view()),
        dq(s.dq.view()),
        dk(s.dk.view()),
        dv(s.dv.view()) {}

  TensorView& named(const std::string& name) {
    const std::pair<const char*, TensorView*> all[] = {{"q", &q},   {"k", &k},     {"v", &v},
                                                       {"o", &o},   {"lse", &lse}, {"dout", &dout},
                                                       {"dq", &dq}, {"dk", &dk},   {"dv", &dv}};
    for (const auto& [key, view] : all) {
      if (name == key) return *view;
    }
    throw std::logic_error("no tensor " + name);
  }
  void forward(RingAttention& ring, BranchState* state = nullptr) const {
    ring.forward(q, k, v, o, lse, state);
  }
  void backward(RingAttention& ring, const BranchState* state = nullptr) const {
    ring.backward(q, k, v, o, lse, dout, dq, dk, dv, state);
  }
};

struct Fault {
  const char* name;
  std::function<void(TensorView&)> spoil;
  const char* text;  // in the message, besides the tensor's name
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"too_many_tokens", [](TensorView& t) { t.shape[1] += 1; }, "expected ["},
      {"no_tokens", [](TensorView& t) { t.shape[1] = 0; }, "expected ["},
      {"another_batch", [](TensorView& t) { t.shape[0] = 1; }, "expected [2, "},
      {"another_head_count", [](TensorView& t) { t.shape[2] = 3; }, "expected ["},
      {"fewer_axes", [](TensorView& t) { t.rank -= 1; }, "expected ["},
      {"no_axes", [](TensorView& t) { t = TensorView(t.data, t.dtype, {}); }, "expected ["},
      {"many_axes", [](TensorView& t) { t.rank = 99; }, "expected ["},
      {"negative_extent", [](TensorView& t) { t.shape[0] = -2; }, "expected [2, "},
      {"another_dtype", [](TensorView& t) { t.dtype = DType::bf16; }, "expected fp32"},
      {"null_pointer", [](TensorView& t) { t.data = nullptr; }, "null"},
  };
  return all;
}

// Calls forward or backward with one bad tensor, on rank 1 only or on all ranks, then correctly.
void expect_refused(const std::string& tensor, const Fault& fault, bool backward, bool all_ranks) {
  SCOPED_TRACE(tensor + ", " + fault.name + (backward ? ", backward" : ", forward") +
               (all_ranks ? ", all ranks" : ", rank 1"));
  const Problem problem = small_problem();
  const RingOptions options = small_options();
  const Inputs inputs = random_inputs(problem, 1);
  static const Expected expected = reference_of(problem, inputs);
  Results results = empty_results(options);
  std::vector<RankOutcome> refusals(kRanks);
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    shard.forward(ring);
    Views views(shard);
    if (all_ranks || transport.rank() == 1) fault.spoil(views.named(tensor));
    RankOutcome& refusal = refusals[static_cast<std::size_t>(transport.rank())];
    try {
      backward ? views.backward(ring) : views.forward(ring);
    } catch (const ConfigError& error) {
      refusal = {"ConfigError", error.what()};
    }
    shard.load(inputs);  // a refused call has changed nothing, and the executor still works
    shard.forward(ring);
    shard.backward(ring);
    shard.collect(results);
  });
  expect_everywhere(outcomes, "", {});
  expect_everywhere(
      refusals, "ConfigError",
      {tensor + " ", fault.text, backward ? "RingAttention::backward" : "RingAttention::forward"});
  if (!all_ranks) {
    EXPECT_EQ(refusals[1].message.rfind("[rank 1/3] ", 0), 0U) << refusals[1].message;
    EXPECT_NE(refusals[0].message.find("rank 1 "), std::string::npos) << refusals[0].message;
    EXPECT_NE(refusals[2].message.find("rank 1 "), std::string::npos) << refusals[2].message;
  }
  expect_matches(problem, results, expected);
}

TEST(RingErrors, WrongForwardTensorIsAConfigErrorOnEveryRank) {
  bool all_ranks = false;
  for (const char* tensor : {"q", "k", "v", "o", "lse"}) {
    for (const Fault& fault : faults()) {
      expect_refused(tensor, fault, false, all_ranks);
      all_ranks = !all_ranks;
    }
  }
}

TEST(RingErrors, WrongBackwardTensorIsAConfigErrorOnEveryRank) {
  bool all_ranks = false;
  for (const char* tensor : {"q", "k", "v", "o", "lse", "dout", "dq", "dk", "dv"}) {
    for (const Fault& fault : faults()) {
      expect_refused(tensor, fault, true, all_ranks);
      all_ranks = !all_ranks;
    }
  }
}

TEST(RingErrors, LastAxisMustBeContiguous) {
  const Fault fault{"stride", [](TensorView& t) { t.stride[3] = 2; }, "stride 2"};
  for (const char* tensor : {"q", "k", "v", "o"}) expect_refused(tensor, fault, false, false);
  for (const char* tensor : {"dout", "dq", "dk", "dv"}) expect_refused(tensor, fault, true, true);
}

// What an expanded view has: elements that are one element. An input may.
TEST(RingErrors, ResultsMustNotShareElements) {
  const Fault fault{"expanded", [](TensorView& t) { t.stride[1] = 0; }, "stride 0 on axis 1"};
  for (const char* tensor : {"o", "lse"}) expect_refused(tensor, fault, false, false);
  for (const char* tensor : {"dq", "dk", "dv"}) expect_refused(tensor, fault, true, true);
}

TEST(RingErrors, ResultsMustNotBeTensorsThatAreRead) {
  const RingOptions options = small_options();
  const auto refusal = [&](auto&& wrong, bool backward) {
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      Views views(shard);
      if (transport.rank() == 1) wrong(views);
      backward ? views.backward(ring) : views.forward(ring);
    });
    for (const auto& outcome : outcomes)
      EXPECT_NE(outcome.message.find("expected memory of its own"), std::string::npos)
          << outcome.message;
    return outcomes[1].message;
  };
  EXPECT_NE(refusal([](Views& v) { v.o = v.q; }, false).find("o shares memory with q"),
            std::string::npos);
  EXPECT_NE(refusal([](Views& v) { v.dq = v.dout; }, true).find("dq shares memory with dout"),
            std::string::npos);
  EXPECT_NE(refusal([](Views& v) { v.dv = v.dk; }, true).find("dk shares memory with dv"),
            std::string::npos);
}

TEST(RingErrors, MessageSaysWhatWasFoundAndWhatWasExpected) {
  const RingOptions options = small_options();
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    Views views(shard);
    views.k.shape[1] = 5;
    views.forward(ring);
  });
  EXPECT_EQ(outcomes[0].message,
            "[rank 0/3] RingAttention::forward: k is [2, 5, 2, 16], expected [2, 8, 2, 16]: "
            "placement 'contiguous' gives "
            "this rank 8 tokens");
}

// ---- calls -------------------------------------------------------------------------------------

TEST(RingErrors, ForwardHereAndBackwardThereIsAConfigErrorEverywhere) {
  const RingOptions options = small_options();
  const Inputs inputs = random_inputs(small_problem(), 1);
  std::atomic<int> fine{0};
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    shard.forward(ring);
    try {
      transport.rank() == 1 ? shard.backward(ring) : shard.forward(ring);
    } catch (const ConfigError&) {
      shard.forward(ring);
      shard.backward(ring);
      ++fine;
      throw;
    }
  });
  EXPECT_EQ(fine, kRanks) << "the executors should work afterwards";
  expect_everywhere(outcomes, "ConfigError", {"rank 1 has backward, rank 0 has forward", "rank 1"});
}

TEST(RingErrors, RefusalOfOneRankIsAConfigErrorEverywhere) {
  const RingOptions options = small_options();
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    const bool refuses = transport.rank() == 1;
    if (refuses) {
      EXPECT_THROW(RingAttention::refuse(transport, "not today"), ConfigError);
    } else {
      EXPECT_THROW(RingAttention(options, transport), ConfigError);
    }
    // Nothing is broken: the next construction works, and its call can be refused, too.
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(random_inputs(small_problem(), 1));
    shard.forward(ring);
    if (refuses) RingAttention::refuse(transport, "still not");
    shard.forward(ring);
  });
  expect_everywhere(outcomes, "ConfigError", {"still not"});
}

// Two executors on one transport whose messages have the same sizes: called at the same time they
// would take each other's rows for their own, and nobody would notice.
TEST(RingErrors, ExecutorsThatAreMixedUpAreAConfigErrorEverywhere) {
  const RingOptions options = small_options();
  const auto scale = [](RingOptions& o) { o.scale = 0.7; };
  const auto causal = [](RingOptions& o) { o.pattern.causal = false; };
  const auto schedule = [](RingOptions& o) { o.schedule = Schedule::ring; };
  const auto dtype = [](RingOptions& o) { o.dtype = DType::bf16; };
  for (const std::function<void(RingOptions&)>& change :
       std::vector<std::function<void(RingOptions&)>>{scale, causal, schedule, dtype}) {
    RingOptions other = options;
    change(other);
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention one(options, transport);
      RingAttention two(other, transport);
      const bool odd = transport.rank() == 1;
      Shard shard(odd ? other : options, transport.rank());
      shard.load(random_inputs(small_problem(), 1));
      shard.forward(odd ? two : one);
    });
    expect_everywhere(outcomes, "ConfigError", {"disagree", "rank 1"});
  }
}

TEST(RingErrors, BackwardNeedsAnExecutorBuiltForIt) {
  RingOptions options = small_options();
  options.backward = false;
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    EXPECT_EQ(ring.predicted_backward_bytes(), 0);
    EXPECT_THROW((void)ring.backward_plan(), ConfigError);
    Shard shard(options, transport.rank());
    shard.load(random_inputs(small_problem(), 1));
    shard.forward(ring);
    shard.backward(ring);
  });
  expect_everywhere(outcomes, "ConfigError", {"backward = false"});
}

TEST(RingErrors, DetachedNeedsTheStateOfForward) {
  const RingOptions options = small_options(MixGradient::detached);
  for (const bool everywhere : {true, false}) {
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(random_inputs(small_problem(), 1));
      shard.forward(ring);
      const Views views(shard);
      const bool without = everywhere || transport.rank() == 2;
      views.backward(ring, without ? nullptr : &shard.state);
    });
    expect_everywhere(outcomes, "ConfigError", {"detached", "state", "make_branch_state"});
    const auto empty = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      const Views views(shard);
      const BranchState nothing;
      views.backward(ring, &nothing);
    });
    expect_everywhere(empty, "ConfigError", {"detached", "state"});
  }
}

// The last texts differ only behind what an error shows.
TEST(RingErrors, CallersClaimsThatDifferAreAConfigErrorEverywhere) {
  const RingOptions options = small_options();
  const std::string same(200, 's');
  const std::string other = same + "o";
  struct Case {
    const char* of_rank_1;
    const char* of_others;
    const char* text;
  };
  for (const Case& texts :
       {Case{"yes", "no",
             "ranks disagree about the caller's claims: rank 1 has yes, rank 0 has no"},
        Case{"yes", "", "ranks disagree about the caller's claims: rank 1 has yes, rank 0 has ;"},
        Case{same.c_str(), other.c_str(), "something that is too long to be told"}}) {
    for (const bool is_forward : {true, false}) {
      const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
        RingAttention ring(options, transport);
        Shard shard(options, transport.rank());
        shard.load(random_inputs(small_problem(), 1));
        OptionalInputs more;
        const auto forward = [&] {
          ring.forward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                       shard.lse.view(), nullptr, more);
        };
        more.claims = texts.of_others;
        forward();
        if (transport.rank() == 1) more.claims = texts.of_rank_1;
        if (is_forward) return forward();
        ring.backward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                      shard.lse.view(), shard.dout.view(), shard.dq.view(), shard.dk.view(),
                      shard.dv.view(), nullptr, more);
      });
      expect_everywhere(outcomes, "ConfigError", {texts.text});
    }
  }
}

TEST(RingErrors, StateOnSomeRanksOnlyIsAConfigError) {
  const RingOptions options = small_options(MixGradient::detached);
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    BranchState state = ring.make_branch_state();
    Views(shard).forward(ring, transport.rank() == 0 ? nullptr : &state);
  });
  expect_everywhere(outcomes, "ConfigError", {"state"});
}

// A state has the size of the executor that made it. Another one's would be read and written out of
// bounds.
TEST(RingErrors, StateOfAnotherShapeIsAConfigError) {
  const RingOptions options = small_options(MixGradient::detached);
  RingOptions larger = options;
  larger.batch = 4;
  RingOptions other_branches = options;
  other_branches.pattern.branches.push_back(other_branches.pattern.branches[0]);
  for (const RingOptions& other : {larger, other_branches}) {
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      RingAttention stranger(other, transport);
      Shard shard(options, transport.rank());
      shard.load(random_inputs(small_problem(), 1));
      BranchState state = stranger.make_branch_state();
      Views(shard).forward(ring, &state);
    });
    expect_everywhere(outcomes, "ConfigError", {"state"});
    const auto in_backward = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      RingAttention stranger(other, transport);
      Shard shard(options, transport.rank());
      shard.load(random_inputs(small_problem(), 1));
      shard.forward(ring);
      const BranchState state = stranger.make_branch_state();
      Views(shard).backward(ring, &state);
    });
    expect_everywhere(in_backward, "ConfigError", {"state"});
  }
}

// Rank 0's executor is busy for as long as rank 1 has not called: whichever of two callers comes
// second is told so at once. Rank 1 may be in the call that was refused, so that no rows may pass
// between the two.
TEST(RingErrors, SecondCallerOfABusyExecutorGetsAConfigErrorAndEndsTheRing) {
  const Problem problem = make_problem("busy", dense(2), 2, 16, 8);
  const RingOptions options = ring_options(problem, Placement::contiguous(16, 2));
  const Inputs inputs = random_inputs(problem, 1);
  std::atomic<bool> refused{false};
  std::vector<RankOutcome> callers(2);
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    RingAttention ring(options, transport);
    if (transport.rank() == 1) {
      Shard shard(options, 1);
      shard.load(inputs);
      while (!refused) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      shard.forward(ring);
      return;
    }
    std::vector<std::thread> threads;
    for (RankOutcome& caller : callers) {
      threads.emplace_back([&] {
        Shard shard(options, 0);
        shard.load(inputs);
        try {
          shard.forward(ring);
        } catch (const ConfigError& error) {
          caller = {"ConfigError", error.what()};
          refused = true;
        } catch (const TransportError& error) {
          caller = {"TransportError", error.what()};
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  for (const RankOutcome& caller : callers) {
    EXPECT_NE(caller.message.find("another thread"), std::string::npos) << caller.message;
  }
  if (callers[0].kind != "ConfigError") std::swap(callers[0], callers[1]);
  EXPECT_EQ(callers[0].kind, "ConfigError");
  EXPECT_EQ(callers[1].kind, "TransportError");
  EXPECT_NE(callers[1].message.find("one call at a time"), std::string::npos);
  EXPECT_EQ(outcomes[0].kind, "") << outcomes[0].message;
  EXPECT_EQ(outcomes[1].kind, "TransportError");
  EXPECT_NE(outcomes[1].message.find("one call at a time"), std::string::npos)
      << outcomes[1].message;
}

// ---- ranks that fail ---------------------------------------------------------------------------

TEST(RingFailures, RankThatDiesDuringAPassIsATransportErrorOnTheOthers) {
  const Problem problem = make_problem("dies", dense(2, true), 1, 40, 16);
  const Inputs inputs = random_inputs(problem, 1);
  struct Death {
    const char* name;
    std::uint32_t tag;
    int after;
  };
  for (const Death& death :
       {Death{"first rows", ring::kTagParcels, 0}, Death{"later rows", ring::kTagParcels, 2},
        Death{"agreement", ring::kTagAgree, 1}, Death{"gradients", ring::kTagReturns, 1}}) {
    SCOPED_TRACE(death.name);
    RingOptions options = ring_options(problem, Placement::zigzag(40, 4));
    options.schedule = Schedule::ring;
    const auto outcomes = run_ranks(4, [&](Transport& inner) {
      WatchedTransport transport(inner);
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(inputs);
      if (transport.rank() == 2) transport.fail_after(death.tag, death.after);
      shard.forward(ring);
      shard.backward(ring);
    });
    for (std::size_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(outcomes[rank].kind, rank == 2 ? "other" : "TransportError")
          << rank << ": " << outcomes[rank].message;
      EXPECT_NE(outcomes[rank].message.find("rank failure for the test"), std::string::npos)
          << outcomes[rank].message;
      if (rank != 2) {
        EXPECT_NE(outcomes[rank].message.find("rank 2"), std::string::npos)
            << outcomes[rank].message;
      }
    }
  }
}

TEST(RingFailures, RankThatNeverComesIsATransportErrorOnTheOthers) {
  const RingOptions options = small_options();
  std::atomic<int> transport_errors{0};
  const auto body = [&](Transport& transport) {
    try {
      RingAttention ring(options, transport);  // the others may still be at it when rank 1 leaves
      Shard shard(options, transport.rank());
      shard.load(random_inputs(small_problem(), 1));
      if (transport.rank() == 1) throw std::runtime_error("out of coffee");
      shard.forward(ring);
    } catch (const TransportError& error) {
      EXPECT_EQ(error.rank(), 1);
      EXPECT_NE(std::string(error.what()).find("out of coffee"), std::string::npos) << error.what();
      ++transport_errors;
      throw;
    }
  };
  EXPECT_THROW(run_in_process(kRanks, body), std::runtime_error);
  EXPECT_EQ(transport_errors, kRanks - 1);
}

// Does something when the first rows are posted: in the middle of a pass.
class OnFirstRows final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  std::function<void()> action;

  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    if (action && !messages.empty() && messages.front().tag == ring::kTagParcels)
      std::exchange(action, nullptr)();
    return inner().post(messages, after);
  }
};

// The interrupted rank ends before its next step, the other one when it next waits for rows.
TEST(RingFailures, InterruptEndsAPassOnEveryRank) {
  const Problem problem = make_problem("interrupted", dense(4), 4, 64, 16);
  RingOptions options = ring_options(problem, Placement::contiguous(64, 4));
  options.schedule = Schedule::ring;
  for (const bool backward : {false, true}) {
    std::atomic<bool> caught{false};
    const auto outcomes = run_ranks(4, [&](Transport& inner) {
      OnFirstRows transport(inner);
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());  // zeros
      if (transport.rank() == 1) transport.action = [&ring] { ring.interrupt(); };
      try {
        backward ? shard.backward(ring) : shard.forward(ring);
        ADD_FAILURE() << "rank " << transport.rank() << " has finished its pass";
      } catch (const Interrupted&) {
        EXPECT_EQ(transport.rank(), 1);
        caught = true;
      } catch (const TransportError& error) {
        EXPECT_NE(transport.rank(), 1);
        EXPECT_EQ(error.rank(), 1);
        EXPECT_NE(std::string(error.what()).find("interrupted"), std::string::npos) << error.what();
      }
      EXPECT_THROW(shard.forward(ring), TransportError);
    });
    EXPECT_TRUE(caught);
    for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.kind, "") << outcome.message;
  }
}

// Once broken, always broken: later calls fail at once instead of waiting for anybody.
TEST(RingFailures, CallsAfterAFailureFailAtOnce) {
  const RingOptions options = small_options();
  const auto outcomes = run_ranks(kRanks, [&](Transport& inner) {
    WatchedTransport transport(inner);
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(random_inputs(small_problem(), 1));
    if (transport.rank() == 0) transport.fail_after(ring::kTagParcels, 0);
    EXPECT_ANY_THROW(shard.forward(ring));
    for (int again = 0; again < 3; ++again) EXPECT_THROW(shard.forward(ring), TransportError);
    EXPECT_THROW(shard.backward(ring), TransportError);
  });
  expect_everywhere(outcomes, "", {});
}

}  // namespace
}  // namespace annulus::test
