// Rings of processes: under mpirun, every process runs these tests.

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/mpi.h"
#include "annulus/ring_attention.h"
#include "annulus/ring_check.h"
#include "support/asleep.h"
#include "support/bad_luck.h"
#include "support/mpi_world.h"
#include "support/ring_fixture.h"
#include "support/transport_contract_messages.h"

namespace annulus::test {
namespace {

// ---- the contract's messages, between processes

void run_on_processes(int ranks, const std::function<void(Transport&)>& body) {
  if (ranks > World::size()) {
    GTEST_SKIP() << "a ring of " << ranks << " is left out: there are " << World::size()
                 << " processes";
  }
  const auto transport = World::ring(ranks, milliseconds(60'000));
  if (transport != nullptr) body(*transport);
}

INSTANTIATE_TEST_SUITE_P(, TransportContract,
                         testing::Values(TransportMaker{"processes", {}, false, run_on_processes}),
                         name_of_maker);

// ---- faults

// The environment is read for the first executor of a process: no test before this one makes any.
TEST(MpiEnvironment, BadOnOneRankIsAnErrorOfAll) {
  if (World::size() < 2) GTEST_SKIP() << "one process has no other to tell";
  const auto transport = World::ring();
  RingOptions options{dense(2), Placement::contiguous(64, World::size())};
  options.kv_heads = 2;
  options.head_dim = 16;
  // The instruction set first: once one has been chosen, it stays that of the process.
  for (const auto& [name, value] :
       {std::pair{"ANNULUS_ISA", "abacus"}, std::pair{"ANNULUS_THREADS", "0"}}) {
    const char* const before = std::getenv(name);
    const std::string kept = before == nullptr ? "" : before;
    if (transport->rank() == 1) setenv(name, value, 1);
    World::meet();
    expect_refusal<ConfigError>(options, *transport, name);
    if (before == nullptr) {
      unsetenv(name);
    } else {
      setenv(name, kept.c_str(), 1);
    }
  }
  EXPECT_NO_THROW(RingAttention(options, *transport)) << "everything still works";
}

class MpiFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (World::size() < 2) GTEST_SKIP() << "one process has no other to lose";
  }
};

TEST_F(MpiFaults, SizeMismatchIsAnErrorOnBothSides) {
  const auto transport = World::ring(2, milliseconds(20'000));
  if (transport == nullptr) return;
  Bytes in(700'000);
  const Bytes out(600'000);
  const int other = 1 - transport->rank();
  const TransportError error = transport_error([&] {
    if (transport->rank() == 0) transport->receive(other, 7, in)->wait();
    if (transport->rank() == 1) transport->send(other, 7, out)->wait();
  });
  EXPECT_EQ(error.rank(), other);
  expect_mentions(error.what(), {"600000 bytes", "700000 bytes", "rank " + std::to_string(other)});
  EXPECT_FALSE(transport->health().alive);
}

TEST_F(MpiFaults, AbortWakesEverybodyAndNamesTheRankAndReason) {
  const int last = World::size() - 1;
  const auto transport = World::ring();
  Bytes in(16);
  if (transport->rank() == last) {
    std::this_thread::sleep_for(milliseconds(20));
    transport->abort("disk on fire");
  }
  const TransportError error =
      transport_error([&] { transport->receive(last, 4, in)->wait(); });  // never sent
  EXPECT_EQ(error.rank(), last);
  expect_mentions(error.what(),
                  {"rank " + std::to_string(last) + " aborted the transport: disk on fire"});
  EXPECT_EQ(transport->health().lost_rank, last);
}

TEST_F(MpiFaults, RankThatLeavesIsNamedAtOnceButWhatItSentArrives) {
  auto transport = World::ring();
  Bytes in(1'000'000);
  if (transport->rank() == 0) {
    const Bytes out = block(in.size(), 3);
    std::vector<std::unique_ptr<Ticket>> sends;
    for (int peer = 1; peer < World::size(); ++peer) sends.push_back(transport->send(peer, 1, out));
    for (const auto& send : sends) send->wait();
    sends.clear();
    transport.reset();
    World::meet();
    return;
  }
  const auto first = transport->receive(0, 1, in);
  const auto second = transport->receive(0, 2, in);  // never sent
  World::meet();
  first->wait();
  EXPECT_EQ(in, block(in.size(), 3));
  const TransportError error = transport_error([&] { second->wait(); });
  EXPECT_EQ(error.rank(), 0);
  expect_mentions(error.what(), {"rank 0 has left"});
  EXPECT_EQ(transport->health().lost_rank, 0);
}

TEST_F(MpiFaults, SilentRankIsNamedAtTheDeadlineAndNothingPassesAfterwards) {
  const auto transport = World::ring(milliseconds(150));
  Bytes buffer(16);
  if (transport->rank() != 0) {
    const auto start = std::chrono::steady_clock::now();
    const TransportError error = transport_error([&] { transport->receive(0, 7, buffer)->wait(); });
    EXPECT_GE(milliseconds_since(start), 150);
    EXPECT_EQ(error.rank(), 0);
    expect_mentions(error.what(), {"rank 0", "150 ms"});
  }
  World::meet();  // rank 0 has been silent
  if (transport->rank() == 0) {
    transport->set_deadline(milliseconds(20'000));
    const TransportError late = transport_error([&] { transport->send(1, 7, buffer)->wait(); });
    EXPECT_EQ(late.rank(), 1);
    expect_mentions(late.what(), {"an earlier message of the two ranks was lost"});
  }
  World::meet();
}

TEST_F(MpiFaults, ReceiveThatWasCalledOffIsNeverWritten) {
  const auto transport = World::ring(2, milliseconds(20'000));
  if (transport == nullptr) return;
  const Bytes out = block(2'000'000, 1);
  for (int round = 0; round < 20; ++round) {
    Bytes in(out.size());
    if (transport->rank() == 0) {
      transport->receive(1, 0, in).reset();
      EXPECT_EQ(in, Bytes(in.size()));
      transport->send(1, 9, {})->wait();
      transport->receive(1, 0, in)->wait();
      EXPECT_EQ(in, out);
    } else {
      transport->receive(0, 9, {})->wait();
      transport->send(0, 0, out)->wait();
    }
  }
}

TEST_F(MpiFaults, WrongShapeOnOneRankIsAConfigErrorOnAll) {
  const auto transport = World::ring();
  RingOptions options{dense(2), Placement::contiguous(64, World::size())};
  options.kv_heads = 2;
  options.head_dim = transport->rank() == 1 ? 24 : 16;
  EXPECT_THROW(RingAttention(options, *transport), ConfigError);
  EXPECT_TRUE(transport->health().alive);
  options.head_dim = 16;
  EXPECT_NO_THROW(RingAttention(options, *transport)) << "everything still works";
}

TEST_F(MpiFaults, BadLuckOfOneRankIsAnErrorOfAll) {
  const auto transport = World::ring();
  RingOptions options{dense(2), Placement::contiguous(64, World::size())};
  options.kv_heads = 2;
  options.head_dim = 16;
  const bool unlucky = transport->rank() == 1;

  const FeignedLuck feigned;
  for (const auto& [bad, text] :
       {std::pair{Luck::no_memory, "out of memory while planning"}, {Luck::no_device, "on fire"}}) {
    World::meet();
    FeignedLuck::of_this_thread = unlucky ? bad : Luck::good;
    if (bad == Luck::no_memory) {
      expect_refusal<OutOfMemory>(options, *transport, text);
    } else {
      expect_refusal<DeviceError>(options, *transport, text);
    }
  }
  FeignedLuck::of_this_thread = Luck::good;
  EXPECT_NO_THROW(RingAttention(options, *transport)) << "everything still works";
}

TEST(Mpi, CommunicatorThatIsNoneIsRefused) {
  EXPECT_THROW((void)make_mpi_transport(
                   {.deadline = milliseconds(5), .communicator = MPI_Comm_c2f(MPI_COMM_NULL)}),
               ConfigError);
  EXPECT_THROW((void)make_mpi_transport({.deadline = milliseconds(0)}), ConfigError);
}

// ---- progress

// Nobody waits for the messages, or calls MPI: the transport's own thread moves them.
TEST(MpiTransport, MessagesMoveWhileTheirRankIsElsewhere) {
  const auto transport = World::ring();
  const int peer = World::size() - 1 - World::rank();
  const Bytes out = block(8 << 20, World::rank());  // many packets
  Bytes in(out.size());
  const auto receive = transport->receive(peer, 0, in);
  const auto send = transport->send(peer, 0, out);
  EXPECT_TRUE(comes_true([&] {
    const TransportCounters moved = transport->counters();
    return moved.messages_sent == 1 && moved.messages_received == 1;
  })) << "nothing moves unless somebody waits for it";
  receive->wait();
  send->wait();
  EXPECT_EQ(in, block(in.size(), peer));
}

// ---- attention

std::vector<Problem> problems() {
  return {
      make_problem("dense_causal_gqa2", dense(4, true), 2, 131, 24),
      make_problem("longnet_batch2", longnet(4, List{16, 40, 97}, List{1, 3, 2}), 4, 97, 16, 2),
      make_problem("longnet_detached_causal", longnet(2, List{37, 150}, List{1, 3}, true), 2, 109,
                   16, 1, MixGradient::detached),
      make_problem("fewer_tokens_than_ranks", dense(2), 1, 3, 8),
  };
}

// This process's rows come from the ring of processes, all others from `base`.
Results with_own_rows(Results base, const RingOptions& options, const Inputs& inputs,
                      Transport& transport) {
  RingAttention ring(options, transport);
  Shard shard(options, transport.rank(), Layout::padded);
  shard.load(inputs);
  shard.forward(ring);
  shard.backward(ring);
  shard.collect(base);
  EXPECT_EQ(shard.damage(), "");
  return base;
}

struct Movement {
  const char* name;
  Schedule schedule;
  BackwardTravel travel;
};

TEST(MpiRing, GivesTheBitsOfThreads) {
  const auto transport = World::ring();
  for (Problem problem : problems()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      // Eight processes share two cores, and do nothing that four do not.
      if (World::size() > 4 && dtype == DType::f32) continue;
      problem.dtype = dtype;
      const Inputs inputs = random_inputs(problem, seed_of(problem.name));
      const Expected expected = reference_of(problem, inputs);
      for (const char* placement : {"contiguous", "zigzag", "striped"}) {
        for (const Movement& movement :
             {Movement{"ring_keys", Schedule::ring, BackwardTravel::keys},
              Movement{"ring_queries", Schedule::ring, BackwardTravel::queries},
              Movement{"gather", Schedule::gather, BackwardTravel::automatic}}) {
          SCOPED_TRACE(problem.name + " " + name_of(dtype) + " " + placement + " " + movement.name);
          RingOptions options =
              ring_options(problem, placement_of(placement, problem.shape.tokens, World::size()));
          options.schedule = movement.schedule;
          options.backward_travel = movement.travel;
          options.threads = 1;
          const Results threads = run_ring(options, inputs);
          const Results processes = with_own_rows(threads, options, inputs, *transport);
          EXPECT_EQ(first_difference(threads, processes), "");
          expect_matches(problem, processes, expected);
        }
      }
    }
  }
}

TEST(MpiRing, ReproducibleGivesTheBitsOfOneRank) {
  const auto transport = World::ring();
  for (Problem problem : problems()) {
    problem.dtype = DType::bf16;
    const Inputs inputs = random_inputs(problem, seed_of(problem.name));
    const auto options = [&](const char* placement, int ranks) {
      RingOptions all = ring_options(problem, placement_of(placement, problem.shape.tokens, ranks));
      all.reproducible = true;
      all.threads = 1;
      return all;
    };
    const Results alone = run_ring(options("contiguous", 1), inputs);
    for (const char* placement : {"contiguous", "hilbert"}) {
      SCOPED_TRACE(problem.name + " " + placement);
      EXPECT_EQ(first_difference(alone, with_own_rows(alone, options(placement, World::size()),
                                                      inputs, *transport)),
                "");
    }
  }
}

// Rows of several packets: 1.5 MiB of K and V a step.
TEST(MpiRing, LongRowsArriveInManyPackets) {
  const auto transport = World::ring();
  const Problem problem =
      make_problem("long", longnet(4, List{64, 512}, List{1, 8}), 4, 768 * World::size(), 64);
  const Inputs inputs = random_inputs(problem, 5);
  RingOptions options =
      ring_options(problem, placement_of("striped", problem.shape.tokens, World::size()));
  options.schedule = Schedule::ring;
  options.threads = 1;
  const Results threads = run_ring(options, inputs);
  EXPECT_EQ(first_difference(threads, with_own_rows(threads, options, inputs, *transport)), "");
}

}  // namespace
}  // namespace annulus::test

int main(int argc, char** argv) { return annulus::test::run_mpi_tests(argc, argv); }
