#include "annulus/transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_check.h"

namespace annulus {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

Bytes block(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((static_cast<std::size_t>(seed) * 131 + i * 7) & 0xffU);
  }
  return bytes;
}

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The error that `action` must raise.
TransportError transport_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const TransportError& error) {
    return error;
  }
  ADD_FAILURE() << "no TransportError was thrown";
  return TransportError("none");
}

void expect_mentions(const TransportError& error, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
        << "'" << word << "' is missing in: " << error.what();
  }
}

class TransportRing : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, TransportRing, testing::Range(1, 9),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

TEST_P(TransportRing, MovesBlocksBetweenEveryPairOfRanks) {
  const int ranks = GetParam();
  run_in_process(ranks, [&](Transport& transport) {
    EXPECT_EQ(transport.size(), ranks);
    EXPECT_EQ(transport.name(), "in_process");
    const auto size = [](int from, int to) {
      return static_cast<std::size_t>(1 + 100 * from + 13 * to);
    };
    std::vector<Bytes> out;
    std::vector<Bytes> in;
    for (int peer = 0; peer < ranks; ++peer) {
      out.push_back(block(size(transport.rank(), peer), transport.rank() * ranks + peer));
      in.emplace_back(size(peer, transport.rank()));
    }
    std::vector<std::unique_ptr<Ticket>> transfers;
    // Odd ranks send first, so that both orders of arrival happen.
    for (int pass = 0; pass < 2; ++pass) {
      for (int peer = 0; peer < ranks; ++peer) {
        const auto p = static_cast<std::size_t>(peer);
        const bool send = (pass + transport.rank()) % 2 == 1;
        transfers.push_back(send ? transport.send(peer, 5, out[p])
                                 : transport.receive(peer, 5, in[p]));
      }
    }
    for (const auto& transfer : transfers) transfer->wait();
    for (int peer = 0; peer < ranks; ++peer) {
      EXPECT_EQ(in[static_cast<std::size_t>(peer)],
                block(size(peer, transport.rank()), peer * ranks + transport.rank()));
    }
  });
}

TEST_P(TransportRing, KeepsTheOrderOfMessagesWithTheSameTag) {
  run_in_process(GetParam(), [](Transport& transport) {
    constexpr int kMessages = 50;
    const int next = (transport.rank() + 1) % transport.size();
    const int previous = (transport.rank() + transport.size() - 1) % transport.size();
    std::vector<int> out(kMessages);
    std::iota(out.begin(), out.end(), 1000 * transport.rank());
    std::vector<int> in(kMessages, -1);
    std::vector<std::unique_ptr<Ticket>> transfers;
    for (std::size_t i = 0; i < kMessages; ++i) {
      transfers.push_back(transport.send(next, 1, std::as_bytes(std::span(&out[i], 1))));
    }
    for (std::size_t i = 0; i < kMessages; ++i) {
      transfers.push_back(
          transport.receive(previous, 1, std::as_writable_bytes(std::span(&in[i], 1))));
    }
    for (const auto& transfer : transfers) transfer->wait();
    for (int i = 0; i < kMessages; ++i)
      EXPECT_EQ(in[static_cast<std::size_t>(i)], 1000 * previous + i);
  });
}

TEST_P(TransportRing, RingCheckPasses) {
  run_in_process(GetParam(), [](Transport& transport) {
    for (const std::size_t bytes : {std::size_t{4096}, std::size_t{1}, std::size_t{0}}) {
      const RingCheck check = check_ring(transport, bytes);
      EXPECT_TRUE(check.forward_ok) << check.detail;
      EXPECT_TRUE(check.backward_ok) << check.detail;
      EXPECT_NE(check.detail.find("forward: "), std::string::npos);
    }
    EXPECT_EQ(transport.counters().messages_sent, 6U);
  });
}

TEST_P(TransportRing, CountersMatchTheMessagesThatCompleted) {
  run_in_process(GetParam(), [](Transport& transport) {
    const int next = (transport.rank() + 1) % transport.size();
    const int previous = (transport.rank() + transport.size() - 1) % transport.size();
    std::uint64_t total = 0;
    for (std::size_t size : {0U, 1U, 1000U, 70'000U}) {
      const Bytes out(size);
      Bytes in(size);
      const auto send = transport.send(next, 3, out);
      const auto receive = transport.receive(previous, 3, in);
      receive->wait();
      send->wait();
      total += size;
    }
    { const auto cancelled = transport.receive(previous, 99, {}); }
    const TransportCounters counters = transport.counters();
    EXPECT_EQ(counters.bytes_sent, total);
    EXPECT_EQ(counters.bytes_received, total);
    EXPECT_EQ(counters.messages_sent, 4U);
    EXPECT_EQ(counters.messages_received, 4U);
  });
}

TEST(Transport, MatchesManyTagsWhateverTheOrder) {
  run_in_process(2, [](Transport& transport) {
    constexpr std::uint32_t kTags = 300;
    std::vector<std::uint32_t> tags(kTags);
    std::iota(tags.begin(), tags.end(), 0xffffff00U);  // wraps around: every tag value is allowed
    std::shuffle(tags.begin(), tags.end(), std::mt19937(static_cast<unsigned>(transport.rank())));
    std::vector<std::uint32_t> values(tags);
    std::vector<std::unique_ptr<Ticket>> transfers;
    for (std::uint32_t i = 0; i < kTags; ++i) {
      const auto bytes = std::as_writable_bytes(std::span(&values[i], 1));
      if (transport.rank() == 0) {
        transfers.push_back(transport.send(1, tags[i], bytes));
      } else {
        values[i] = 0;
        transfers.push_back(transport.receive(0, tags[i], bytes));
      }
    }
    for (const auto& transfer : transfers) transfer->wait();
    EXPECT_EQ(values, tags);
  });
}

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

TEST(Transport, DoneIsTrueOnlyOnceThePeerHasCome) {
  auto ring = make_in_process_ring(2);
  const Bytes out = block(64, 3);
  Bytes in(64);
  const auto send = ring[0]->send(1, 0, out);
  EXPECT_EQ(ring[0]->counters().messages_sent, 0U);
  const auto receive = ring[1]->receive(0, 0, in);
  EXPECT_EQ(in, out);
  receive->wait();
}

TEST(Transport, DeadPeerRaisesWithinTimeout) {
  auto ring = make_in_process_ring(8, {.deadline = milliseconds(10'000)});
  ring[3]->set_deadline(milliseconds(150));
  Bytes buffer(4096);
  const auto start = Clock::now();
  const auto receive = ring[3]->receive(2, 7, buffer);
  const TransportError error = transport_error([&] { receive->wait(); });
  EXPECT_GE(milliseconds_since(start), 150);
  EXPECT_LT(milliseconds_since(start), 1000);
  EXPECT_STREQ(error.what(),
               "[rank 3/8] receive of 4096 bytes from rank 2 (tag 7) timed out after 150 ms: is "
               "rank 2 still running "
               "and making the same calls?");
  EXPECT_EQ(error.rank(), 2);
  transport_error([&] { receive->wait(); });  // still failed
}

TEST(Transport, DeadlineCountsFromPosting) {
  auto ring = make_in_process_ring(2, {.deadline = milliseconds(100)});
  const auto send = ring[0]->send(1, 0, {});
  std::this_thread::sleep_for(milliseconds(120));
  const auto start = Clock::now();
  expect_mentions(transport_error([&] { send->wait(); }), {"send of 0 bytes to rank 1", "100 ms"});
  EXPECT_LT(milliseconds_since(start), 90);
}

TEST(Transport, FinishedTransferIsNoErrorAfterTheDeadline) {
  auto ring = make_in_process_ring(2, {.deadline = milliseconds(20)});
  const auto send = ring[0]->send(1, 0, {});
  const auto receive = ring[1]->receive(0, 0, {});
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_NO_THROW(send->wait());
  EXPECT_NO_THROW(receive->wait());
}

// Were the channel still open, the message for the lost receive would silently land in the next
// one.
TEST(Transport, NothingPassesBetweenTwoRanksAfterALostMessage) {
  auto ring = make_in_process_ring(3, {.deadline = milliseconds(20)});
  Bytes buffer(8);
  const auto lost = ring[1]->receive(0, 7, buffer);
  transport_error([&] { lost->wait(); });
  const TransportError late = transport_error([&] { (void)ring[0]->send(1, 7, buffer); });
  expect_mentions(late, {"[rank 0/3] send of 8 bytes to rank 1 (tag 7)", "[rank 1/3] receive",
                         "timed out after 20 ms"});
  EXPECT_EQ(late.rank(), 1);
  const auto other_pair = ring[2]->send(1, 7, buffer);
  EXPECT_NO_THROW(ring[1]->receive(2, 7, buffer)->wait());
}

TEST(Transport, CancelledReceiveIsNeverWritten) {
  auto ring = make_in_process_ring(2);
  const Bytes out = block(64, 1);
  auto abandoned = std::make_unique<Bytes>(64);
  ring[1]->receive(0, 0, *abandoned).reset();
  const Bytes untouched = *abandoned;
  const auto send = ring[0]->send(1, 0, out);
  EXPECT_EQ(*abandoned, untouched);
  abandoned.reset();  // AddressSanitizer would see a late copy
  Bytes in(64);
  ring[1]->receive(0, 0, in)->wait();
  EXPECT_EQ(in, out);
}

TEST(Transport, CancelTakesOneTransferOutOfTheMiddleOfTheQueue) {
  auto ring = make_in_process_ring(2);
  std::vector<Bytes> out = {block(8, 0), block(8, 1), block(8, 2)};
  std::vector<std::unique_ptr<Ticket>> sends;
  for (const Bytes& bytes : out) sends.push_back(ring[0]->send(1, 0, bytes));
  sends[1].reset();
  Bytes in(8);
  ring[1]->receive(0, 0, in)->wait();
  EXPECT_EQ(in, out[0]);
  ring[1]->receive(0, 0, in)->wait();
  EXPECT_EQ(in, out[2]);
}

// The receiver frees its buffer right after the cancel, while the sender may be in the middle of
// the copy.
TEST(Transport, CancelWaitsForACopyUnderWay) {
  constexpr int kRounds = 200;
  constexpr std::size_t kBytes = 1 << 20;
  auto ring = make_in_process_ring(2);
  const Bytes out = block(kBytes, 9);
  std::atomic<int> posted{-1};
  std::atomic<int> finished{-1};
  std::thread receiver([&] {
    for (int round = 0; round < kRounds; ++round) {
      auto in = std::make_unique<Bytes>(kBytes);
      auto receive = ring[1]->receive(0, 0, *in);
      posted = round;
      std::this_thread::sleep_for(std::chrono::microseconds(round % 40));
      receive.reset();
      in.reset();
      while (finished != round) std::this_thread::yield();
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    while (posted != round) std::this_thread::yield();
    ring[0]->send(1, 0, out).reset();
    finished = round;
  }
  receiver.join();
}

TEST(Transport, AbortFailsPendingAndFutureOperationsOfEveryRank) {
  auto ring = make_in_process_ring(3);
  Bytes buffer(16);
  std::vector<std::thread> waiting;
  const auto start = Clock::now();
  for (const std::size_t rank : {0U, 2U}) {
    waiting.emplace_back([&, rank] {
      Bytes in(16);
      const auto receive = ring[rank]->receive(1, 4, in);
      const TransportError error = transport_error([&] { receive->wait(); });
      EXPECT_EQ(error.rank(), 1);
      expect_mentions(error,
                      {"[rank " + std::to_string(rank) + "/3]", "rank 1 aborted", "disk on fire"});
    });
  }
  const auto pending = ring[0]->send(2, 11, buffer);
  std::this_thread::sleep_for(milliseconds(30));
  ring[1]->abort("disk on fire");
  ring[2]->abort("too late to matter");
  for (std::thread& thread : waiting) thread.join();
  for (const auto& transport : ring) {
    const TransportError error = transport_error([&] { (void)transport->send(0, 5, buffer); });
    EXPECT_EQ(error.rank(), 1);
    expect_mentions(error, {"disk on fire"});
  }
  EXPECT_LT(milliseconds_since(start), 5000);
}

TEST(Transport, SizeMismatchRaisesOnBothSides) {
  for (const bool send_first : {false, true}) {
    auto ring = make_in_process_ring(2);
    const Bytes out(200);
    Bytes in(100);
    std::unique_ptr<Ticket> send;
    if (send_first) send = ring[0]->send(1, 7, out);
    const auto receive = ring[1]->receive(0, 7, in);
    if (!send_first) send = ring[0]->send(1, 7, out);
    const TransportError at_receiver = transport_error([&] { receive->wait(); });
    const TransportError at_sender = transport_error([&] { send->wait(); });
    EXPECT_EQ(at_receiver.rank(), 0);
    EXPECT_EQ(at_sender.rank(), 1);
    expect_mentions(at_receiver,
                    {"[rank 1/2] receive of 100 bytes from rank 0 (tag 7)", "send of 200 bytes"});
    expect_mentions(at_sender,
                    {"[rank 0/2] send of 200 bytes to rank 1 (tag 7)", "receive of 100 bytes"});
    EXPECT_EQ(in, Bytes(100));
    EXPECT_EQ(ring[0]->counters().messages_sent, 0U);
  }
}

TEST(Transport, RankThatLeavesFailsThoseWhoWaitForIt) {
  auto ring = make_in_process_ring(3);
  const auto start = Clock::now();
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
  EXPECT_LT(milliseconds_since(start), 5000);
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
  Bytes in0(10'000);
  const auto start = Clock::now();
  const auto send1 = ring[0]->send(1, 0, out);
  const auto send2 = ring[0]->send(2, 0, out);
  const auto other_link = ring[1]->send(0, 0, out);
  const auto receive1 = ring[1]->receive(0, 0, in1);
  const auto receive2 = ring[2]->receive(0, 0, in2);
  const auto receive0 = ring[0]->receive(1, 0, in0);
  EXPECT_LT(milliseconds_since(start), 150) << "posting must not block";
  receive0->wait();
  EXPECT_GE(milliseconds_since(start), 200);
  EXPECT_LT(milliseconds_since(start), 380) << "links of two ranks must not share one limit";
  receive1->wait();
  EXPECT_LT(milliseconds_since(start), 380);
  receive2->wait();
  EXPECT_GE(milliseconds_since(start), 400);
  EXPECT_LT(milliseconds_since(start), 1500);
  EXPECT_EQ(in2, out);
}

TEST(Transport, AbortWakesThoseWhoWaitForASlowLink) {
  auto ring = make_in_process_ring(2, {.bytes_per_second = 1});
  const Bytes out(100);
  Bytes in(100);
  const auto send = ring[0]->send(1, 0, out);
  const auto receive = ring[1]->receive(0, 0, in);
  const auto start = Clock::now();
  std::thread aborting([&] {
    std::this_thread::sleep_for(milliseconds(30));
    ring[0]->abort("enough");
  });
  expect_mentions(transport_error([&] { receive->wait(); }), {"rank 0 aborted", "enough"});
  aborting.join();
  EXPECT_LT(milliseconds_since(start), 5000);
}

TEST(Transport, SlowLinkCanMissTheDeadline) {
  auto ring = make_in_process_ring(2, {.deadline = milliseconds(50), .bytes_per_second = 1});
  Bytes buffer(100);
  const auto send = ring[0]->send(1, 0, buffer);
  const auto receive = ring[1]->receive(0, 0, buffer);
  expect_mentions(transport_error([&] { receive->wait(); }),
                  {"timed out after 50 ms", "the link is limited"});
}

TEST(Transport, RejectsWrongArguments) {
  EXPECT_THROW((void)make_in_process_ring(0), ConfigError);
  EXPECT_THROW((void)make_in_process_ring(2, {.deadline = milliseconds(0)}), ConfigError);
  EXPECT_THROW((void)make_in_process_ring(2, {.bytes_per_second = -1}), ConfigError);
  auto ring = make_in_process_ring(2, {.deadline = milliseconds::max()});
  EXPECT_THROW((void)ring[0]->send(2, 0, {}), ConfigError);
  EXPECT_THROW((void)ring[0]->receive(-1, 0, {}), ConfigError);
  EXPECT_THROW(ring[0]->set_deadline(milliseconds(-5)), ConfigError);
  const auto send =
      ring[0]->send(1, 0, {});  // the longest deadline does not overflow into the past
}

TEST(Transport, RingCheckReportsASilentNeighbour) {
  auto ring = make_in_process_ring(3, {.deadline = milliseconds(50)});
  const RingCheck check = check_ring(*ring[0]);
  EXPECT_FALSE(check.forward_ok);
  EXPECT_FALSE(check.backward_ok);
  EXPECT_NE(check.detail.find("timed out"), std::string::npos);
}

// A transport whose blocks arrive damaged or from the wrong rank.
class Corrupting final : public Transport {
 public:
  explicit Corrupting(Transport& inner) : inner_(inner) {}
  int rank() const override { return lie_ ? (inner_.rank() + 1) % size() : inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string name() const override { return "corrupting"; }
  std::unique_ptr<Ticket> post(std::span<const Message> messages, const Event& after) override {
    const Message& message = messages.front();
    if (message.way == Way::receive) return inner_.post(messages, after);
    copy_.assign(message.data(), message.data() + message.bytes);
    if (flip_) copy_[17] ^= std::byte{1};
    return inner_.send(message.peer, message.tag, copy_);
  }
  Health health() const override { return inner_.health(); }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }
  void set_deadline(milliseconds deadline) override { inner_.set_deadline(deadline); }
  TransportCounters counters() const override { return inner_.counters(); }

  bool flip_ = false;
  bool lie_ = false;

 private:
  Transport& inner_;
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

class TransportSoak : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, TransportSoak, testing::Values(2, 3, 8),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

// The traffic of a ring executor: both directions, one step ahead, sizes that change, and every
// seventh round a receive that is given up again.
TEST_P(TransportSoak, ThousandRingStepsDeliverEveryByte) {
  const auto counters = std::make_unique<TransportCounters[]>(static_cast<std::size_t>(GetParam()));
  run_in_process(GetParam(), [&](Transport& transport) {
    constexpr int kSteps = 1000;
    const int next = (transport.rank() + 1) % transport.size();
    const int previous = (transport.rank() + transport.size() - 1) % transport.size();
    const auto size = [](int step) { return static_cast<std::size_t>(step * 37 % 2048); };
    Bytes out[2];
    Bytes forward[2];
    Bytes backward[2];
    std::vector<std::unique_ptr<Ticket>> transfers[2];
    const auto post = [&](int step) {
      const int slot = step % 2;
      const auto tag = static_cast<std::uint32_t>(step % 5);
      out[slot] = block(size(step), transport.rank() + step);
      forward[slot].assign(size(step), std::byte{0});
      backward[slot].assign(size(step), std::byte{0});
      transfers[slot].push_back(transport.receive(previous, tag, forward[slot]));
      transfers[slot].push_back(transport.send(next, tag, out[slot]));
      transfers[slot].push_back(transport.receive(next, tag + 100, backward[slot]));
      transfers[slot].push_back(transport.send(previous, tag + 100, out[slot]));
      if (step % 7 == 0) transport.receive(next, 1000, forward[slot]).reset();
    };
    post(0);
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) post(step + 1);
      const int slot = step % 2;
      for (const auto& transfer : transfers[slot]) transfer->wait();
      transfers[slot].clear();
      ASSERT_EQ(forward[slot], block(size(step), previous + step));
      ASSERT_EQ(backward[slot], block(size(step), next + step));
    }
    counters[static_cast<std::size_t>(transport.rank())] = transport.counters();
  });
  for (int rank = 0; rank < GetParam(); ++rank) {
    EXPECT_EQ(counters[static_cast<std::size_t>(rank)].messages_sent, 2000U);
    EXPECT_EQ(counters[static_cast<std::size_t>(rank)].bytes_received, counters[0].bytes_sent);
  }
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

TEST(RunInProcess, RootCauseWinsEvenWhenEchoesAreQuicker) {
  try {
    run_in_process(3, [](Transport& transport) {
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

TEST(RunInProcess, RankThatReturnsEarlyIsFoundSoon) {
  const auto start = Clock::now();
  const TransportError error = transport_error([] {
    run_in_process(3, [](Transport& transport) {
      if (transport.rank() == 2) return;
      transport.receive(2, 0, {})->wait();
    });
  });
  EXPECT_EQ(error.rank(), 2);
  EXPECT_LT(milliseconds_since(start), 5000);
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
  try {
    run_in_process(ring, [](Transport& transport) {
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
