#include "annulus/transport.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_check.h"
#include "support/forwarding_transport.h"
#include "support/transport_checks.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;
using test::block;
using test::Bytes;
using test::milliseconds;
using test::milliseconds_since;
using test::transport_error;

void expect_mentions(const TransportError& error, const std::vector<std::string>& words) {
  test::expect_mentions(error.what(), words);
}

// What every transport must do is in transport_contract_test; this is about the in-process one.

TEST(Transport, SendsToItselfEvenInPlace) {
  auto ring = make_in_process_ring(1);
  Bytes buffer = block(100, 1);
  const auto receive = ring[0]->receive(0, 0, buffer);
  const auto send = ring[0]->send(0, 0, buffer);
  receive->wait();
  send->wait();
  send->wait();  // again: nothing changes
  EXPECT_EQ(buffer, block(100, 1));
}

TEST(Transport, MessageMovesWhenItsSecondSideComes) {
  auto ring = make_in_process_ring(2);
  const Bytes out = block(64, 3);
  Bytes in(64);
  const auto send = ring[0]->send(1, 0, out);
  EXPECT_EQ(ring[0]->counters().messages_sent, 0U);
  const auto receive = ring[1]->receive(0, 0, in);
  EXPECT_EQ(in, out);
  receive->wait();
}

TEST(Transport, RankThatLeavesFailsThoseWhoWaitForIt) {
  auto ring = make_in_process_ring(3);
  std::thread waiting([&] {
    Bytes in(16);
    const auto receive = ring[0]->receive(1, 4, in);
    const TransportError error = transport_error([&] { receive->wait(); });
    EXPECT_EQ(error.rank(), 1);
    expect_mentions(error, {"rank 1 has left"});
  });
  std::this_thread::sleep_for(milliseconds(30));
  ring[1].reset();
  waiting.join();
  const auto later = ring[2]->send(1, 4, {});
  expect_mentions(transport_error([&] { later->wait(); }), {"rank 1 has left"});
}

TEST(Transport, RankThatFinishesFirstHarmsNobody) {
  auto ring = make_in_process_ring(3);
  const Bytes out = block(32, 4);
  Bytes in(32);
  const auto send = ring[0]->send(1, 0, out);
  ring[1]->receive(0, 0, in)->wait();
  ring[1].reset();
  EXPECT_NO_THROW(send->wait());
  const auto between_others = ring[0]->send(2, 0, out);
  EXPECT_NO_THROW(ring[2]->receive(0, 0, in)->wait());
}

TEST(Transport, TransferMayOutliveItsTransport) {
  auto ring = make_in_process_ring(2);
  const Bytes out = block(32, 4);
  Bytes in(32);
  const auto send = ring[0]->send(1, 0, out);
  ring[0].reset();
  EXPECT_NO_THROW(ring[1]->receive(0, 0, in)->wait());  // its buffer is still there
  EXPECT_EQ(in, out);
  ring.clear();
  EXPECT_NO_THROW(send->wait());
}

TEST(Transport, RateLimitSerialisesEachOutgoingLink) {
  // 10 kB at 50 kB/s: 200 ms per message, 400 ms for two on one link.
  auto ring = make_in_process_ring(3, {.bytes_per_second = 5e4});
  const Bytes out = block(10'000, 1);
  Bytes in1(10'000);
  Bytes in2(10'000);
  const auto start = Clock::now();
  const auto send1 = ring[0]->send(1, 0, out);
  const auto send2 = ring[0]->send(2, 0, out);
  const auto receive1 = ring[1]->receive(0, 0, in1);
  const auto receive2 = ring[2]->receive(0, 0, in2);
  receive1->wait();
  EXPECT_GE(milliseconds_since(start), 200);
  receive2->wait();
  EXPECT_GE(milliseconds_since(start), 400);
  EXPECT_EQ(in2, out);
}

// Rank 0's link is busy for three hours. Whoever posts does not wait for it, nor does rank 1's.
TEST(Transport, RateLimitHoldsUpNeitherThePosterNorOtherLinks) {
  auto ring = make_in_process_ring(2, {.bytes_per_second = 1000});
  const Bytes large = block(10'000'000, 1);
  const Bytes small = block(10, 2);
  Bytes large_in(large.size());
  Bytes small_in(small.size());
  const auto hours = ring[0]->send(1, 0, large);
  const auto hours_in = ring[1]->receive(0, 0, large_in);
  const auto send = ring[1]->send(0, 0, small);
  const auto receive = ring[0]->receive(1, 0, small_in);
  EXPECT_NO_THROW(receive->wait());
  EXPECT_NO_THROW(send->wait());
  EXPECT_EQ(small_in, small);
}

TEST(Transport, AbortWakesThoseWhoWaitForASlowLink) {
  auto ring = make_in_process_ring(2, {.bytes_per_second = 1});
  const Bytes out(100);
  Bytes in(100);
  const auto send = ring[0]->send(1, 0, out);
  const auto receive = ring[1]->receive(0, 0, in);
  std::thread aborting([&] {
    std::this_thread::sleep_for(milliseconds(30));
    ring[0]->abort("enough");
  });
  expect_mentions(transport_error([&] { receive->wait(); }), {"rank 0 aborted", "enough"});
  aborting.join();
}

TEST(Transport, SlowLinkCanMissTheDeadline) {
  auto ring = make_in_process_ring(2, {.deadline = milliseconds(50), .bytes_per_second = 1});
  Bytes buffer(100);
  const auto send = ring[0]->send(1, 0, buffer);
  const auto receive = ring[1]->receive(0, 0, buffer);
  expect_mentions(transport_error([&] { receive->wait(); }),
                  {"timed out after 50 ms", "the link is limited"});
}

TEST(Transport, RejectsWrongOptions) {
  EXPECT_THROW((void)make_in_process_ring(0), ConfigError);
  EXPECT_THROW((void)make_in_process_ring(2, {.deadline = milliseconds(0)}), ConfigError);
  EXPECT_THROW((void)make_in_process_ring(2, {.bytes_per_second = -1}), ConfigError);
}

TEST(Transport, TimeoutSaysWhoWasExpectedAndWhatToAsk) {
  auto ring = make_in_process_ring(8, {.deadline = milliseconds(20)});
  Bytes buffer(4096);
  const auto receive = ring[3]->receive(2, 7, buffer);
  EXPECT_STREQ(transport_error([&] { receive->wait(); }).what(),
               "[rank 3/8] receive of 4096 bytes from rank 2 (tag 7) timed out after 20 ms: is "
               "rank 2 still running and making the same calls?");
  // Two ranks have lost each other, not the others.
  const TransportError late = transport_error([&] { (void)ring[2]->send(3, 7, buffer); });
  expect_mentions(late, {"[rank 2/8] send of 4096 bytes to rank 3 (tag 7)", "[rank 3/8] receive",
                         "timed out after 20 ms"});
  ring[3]->set_deadline(milliseconds(60'000));
  const auto other_pair = ring[4]->send(3, 7, buffer);
  EXPECT_NO_THROW(ring[3]->receive(4, 7, buffer)->wait());
}

TEST(Transport, RingCheckReportsASilentNeighbour) {
  auto ring = make_in_process_ring(3, {.deadline = milliseconds(50)});
  const RingCheck check = check_ring(*ring[0]);
  EXPECT_FALSE(check.forward_ok);
  EXPECT_FALSE(check.backward_ok);
  EXPECT_NE(check.detail.find("timed out"), std::string::npos);
}

// A transport whose blocks arrive damaged or from the wrong rank.
class Corrupting final : public test::ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  int rank() const override { return lie_ ? (inner().rank() + 1) % size() : inner().rank(); }
  std::unique_ptr<Ticket> post(std::span<const Message> messages, const Event& after) override {
    const Message& message = messages.front();
    if (message.way == Way::receive) return inner().post(messages, after);
    copy_.assign(message.data(), message.data() + message.bytes);
    if (flip_) copy_[17] ^= std::byte{1};
    return inner().send(message.peer, message.tag, copy_);
  }

  bool flip_ = false;
  bool lie_ = false;

 private:
  Bytes copy_;
};

TEST(Transport, RingCheckFindsASingleFlippedBit) {
  run_in_process(3, [](Transport& transport) {
    Corrupting corrupting(transport);
    corrupting.flip_ = transport.rank() == 1;
    const RingCheck check = check_ring(corrupting);
    EXPECT_EQ(check.forward_ok, transport.rank() != 2) << check.detail;
    EXPECT_EQ(check.backward_ok, transport.rank() != 0) << check.detail;
    if (transport.rank() == 2) {
      EXPECT_NE(check.detail.find("byte 17 of 4096"), std::string::npos) << check.detail;
    }
  });
}

// Each of two ranks takes itself for the other one, so that it meets its own block where it expects
// the neighbour's.
TEST(Transport, RingCheckNamesTheRankWhoseBlockCame) {
  run_in_process(2, [](Transport& transport) {
    Corrupting confused(transport);
    confused.lie_ = true;
    const RingCheck check = check_ring(confused);
    EXPECT_FALSE(check.forward_ok);
    EXPECT_FALSE(check.backward_ok);
    const std::string wrong = "got the block of rank " + std::to_string(confused.rank());
    EXPECT_NE(check.detail.find(wrong), std::string::npos) << check.detail;
  });
}

TEST(RunInProcess, RethrowsTheRootCauseAndNotItsEchoes) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    try {
      run_in_process(4, [](Transport& transport) {
        if (transport.rank() == 2) throw std::runtime_error("the root cause");
        Bytes in(8);
        transport.receive((transport.rank() + 1) % 4, 0, in)->wait();
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "the root cause");
    }
  }
}

// Rank 1 aborts, and the other ranks end before it has thrown what was the reason.
template <typename Run>
void expect_root_cause(const Run& run) {
  try {
    run([](Transport& transport) {
      if (transport.rank() == 1) {
        transport.abort("cleaning up");
        std::this_thread::sleep_for(milliseconds(50));
        throw ConfigError("the root cause");
      }
      Bytes in(8);
      transport.receive(1, 0, in)->wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "the root cause");
  }
}

TEST(RunInProcess, RootCauseWinsEvenWhenEchoesAreQuicker) {
  expect_root_cause([](const auto& body) { run_in_process(3, body); });
}

TEST(RunInProcess, AbortWithoutAnExceptionSurfacesThroughItsEchoes) {
  const TransportError error = transport_error([] {
    run_in_process(2, [](Transport& transport) {
      if (transport.rank() == 0) return transport.abort("stop");
      transport.receive(0, 0, {})->wait();
    });
  });
  EXPECT_EQ(error.rank(), 0);
  expect_mentions(error, {"[rank 1/2]", "rank 0 aborted", "stop"});
}

TEST(RunInProcess, RankThatReturnsEarlyIsMissed) {
  const TransportError error = transport_error([] {
    run_in_process(3, [](Transport& transport) {
      if (transport.rank() == 2) return;
      transport.receive(2, 0, {})->wait();
    });
  });
  EXPECT_EQ(error.rank(), 2);
  expect_mentions(error, {"rank 2 has left"});
}

TEST(RunInProcess, PassesOnExceptionsOfAnyType) {
  EXPECT_THROW(run_in_process(2,
                              [](Transport& transport) {
                                if (transport.rank() == 1) throw 42;
                                transport.receive(1, 0, {})->wait();
                              }),
               int);
  EXPECT_THROW(run_in_process(0, [](Transport&) {}), ConfigError);
}

TEST(RunInProcess, RunsOnARingThatExistsAgainAndAgain) {
  const auto ring = make_in_process_ring(3);
  for (int round = 0; round < 3; ++round) {
    run_in_process(ring,
                   [](Transport& transport) { EXPECT_TRUE(check_ring(transport).forward_ok); });
  }
  EXPECT_EQ(ring[0]->counters().messages_sent, 6U);
  expect_root_cause([&](const auto& body) { run_in_process(ring, body); });
  // What is left of it is an aborted ring.
  EXPECT_EQ(transport_error([&] { (void)ring[0]->send(2, 0, {}); }).rank(), 1);
}

TEST(RunInProcess, OneRankNeedsNoThread) {
  const std::thread::id here = std::this_thread::get_id();
  std::vector<std::thread::id> seen;
  const auto note = [&](Transport&) { seen.push_back(std::this_thread::get_id()); };
  run_in_process(1, note);
  run_in_process(make_in_process_ring(1), note);
  EXPECT_EQ(seen, std::vector(2, here));
}

}  // namespace
}  // namespace annulus
