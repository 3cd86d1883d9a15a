#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_check.h"
#include "support/asleep.h"
#include "support/gate.h"
#include "support/late_backend.h"
#include "support/ring_fixture.h"
#include "support/transport_contract.h"

// Every transport rejects wrong calls, ends hopeless waits, does not touch memory that it no longer
// owns, and moves memory of queues at the right time.
namespace annulus::test {

// ---- wrong calls are rejected

TEST_P(TransportContract, WrongArgumentsAreConfigErrors) {
  const Ring ring = make(2);
  Bytes bytes(16);
  const Region region(bytes);
  const auto post = [&](int peer, std::int64_t offset, std::int64_t size, const Region* memory) {
    const Message message{Way::receive, peer, 0, memory, offset, size};
    ring[0]->post(std::span(&message, 1), Event())->wait();
  };
  EXPECT_THROW(post(2, 0, 16, &region), ConfigError);
  EXPECT_THROW(post(-1, 0, 16, &region), ConfigError);
  EXPECT_THROW(post(1, 0, 17, &region), ConfigError);
  EXPECT_THROW(post(1, 10, 7, &region), ConfigError);
  EXPECT_THROW(post(1, -1, 4, &region), ConfigError);
  EXPECT_THROW(post(1, 4, -4, &region), ConfigError);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(post(1, kMost, 16, &region), ConfigError) << "the end overflows";
  EXPECT_THROW(post(1, 16, kMost, &region), ConfigError) << "the end overflows";
  EXPECT_THROW(post(1, 0, 0, nullptr), ConfigError);
  EXPECT_THROW(ring[0]->set_deadline(milliseconds(0)), ConfigError);
  EXPECT_THROW(ring[0]->set_deadline(milliseconds(-5)), ConfigError);

  const auto send = ring[0]->send(1, 0, bytes);  // nothing has happened to the ring
  EXPECT_NO_THROW(ring[1]->receive(0, 0, bytes)->wait());
  EXPECT_TRUE(ring[0]->health().alive);
}

TEST_P(TransportContract, LongestDeadlineIsNotInThePast) {
  const Ring ring = make(2, milliseconds::max());
  const auto send = ring[0]->send(1, 0, {});
  EXPECT_NO_THROW(ring[1]->receive(0, 0, {})->wait());
  EXPECT_NO_THROW(send->wait());
}

TEST_P(TransportContract, SecondUserIsRefusedAndEndsTheRing) {
  const Ring ring = make(2);
  Bytes in(8);
  std::thread waiting([&] {
    const TransportError error = transport_error([&] { ring[1]->receive(0, 0, in)->wait(); });
    EXPECT_EQ(error.rank(), 0);
    expect_mentions(error.what(), {"one call at a time"});
  });
  std::this_thread::sleep_for(milliseconds(10));
  {
    const Transport::Use first(*ring[0], "first");
    try {
      const Transport::Use second(*ring[0], "second");
      ADD_FAILURE() << "two users at the same time";
    } catch (const ConfigError& error) {
      expect_mentions(error.what(), {"[rank 0/2] second", "one call at a time"});
    }
  }
  waiting.join();
  EXPECT_FALSE(ring[1]->health().alive);
  EXPECT_NO_THROW(Transport::Use(*ring[1], "later"));

  const Ring alone = make(1);
  {
    const Transport::Use first(*alone[0], "first");
    EXPECT_THROW(Transport::Use(*alone[0], "second"), ConfigError);
    EXPECT_THROW((void)check_ring(*alone[0]), ConfigError) << "its messages would meet the user's";
  }
  EXPECT_TRUE(check_ring(*alone[0]).forward_ok) << "nobody else could have mixed anything up";
}

// ---- errors reach waiting ranks

TEST_P(TransportContract, SizeMismatchIsAnErrorOnBothSides) {
  for (const bool send_first : {false, true}) {
    const Ring ring = make(2);
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
    expect_mentions(at_receiver.what(), {"[rank 1/2]", "100 bytes", "200 bytes", "rank 0"});
    expect_mentions(at_sender.what(), {"[rank 0/2]", "100 bytes", "200 bytes", "rank 1"});
    EXPECT_EQ(in, Bytes(100));
    EXPECT_EQ(ring[0]->counters().messages_sent, 0U);
  }
}

TEST_P(TransportContract, DeadPeerRaisesWithinTheDeadline) {
  const Ring ring = make(8);
  ring[3]->set_deadline(milliseconds(150));  // the others' are much longer
  Bytes buffer(4096);
  const auto start = std::chrono::steady_clock::now();
  const auto receive = ring[3]->receive(2, 7, buffer);
  const TransportError error = transport_error([&] { receive->wait(); });
  EXPECT_GE(milliseconds_since(start), 150);
  expect_mentions(error.what(), {"[rank 3/8]", "rank 2", "150 ms"});
  EXPECT_EQ(error.rank(), 2);
  transport_error([&] { receive->wait(); });  // still failed
  const Health health = ring[3]->health();
  EXPECT_FALSE(health.alive);
  EXPECT_EQ(health.lost_rank, 2);
  EXPECT_FALSE(health.reason.empty());
}

TEST_P(TransportContract, DeadlineCountsFromPosting) {
  // If deadlines were counted from wait(), none would end earlier than that. A busy machine delays
  // some of them, but not all.
  double quickest = 1e9;
  for (int attempt = 0; attempt < 100 && quickest >= 150; ++attempt) {
    const Ring ring = make(2, milliseconds(200));
    const auto send = ring[0]->send(1, 0, {});
    std::this_thread::sleep_for(milliseconds(250));
    const auto start = std::chrono::steady_clock::now();
    expect_mentions(transport_error([&] { send->wait(); }).what(), {"rank 1", "200 ms"});
    quickest = std::min(quickest, milliseconds_since(start));
  }
  EXPECT_LT(quickest, 150);
}

TEST_P(TransportContract, FinishedBatchIsNoErrorAfterTheDeadline) {
  // Long enough for a machine that pauses for a moment between the two halves.
  const int deadline = static_cast<int>(500 * std::min(slowness(), 3.0));
  const Ring ring = make(2, milliseconds(deadline));
  const auto send = ring[0]->send(1, 0, {});
  const auto receive = ring[1]->receive(0, 0, {});
  std::this_thread::sleep_for(milliseconds(deadline + 30));
  EXPECT_NO_THROW(send->wait());
  EXPECT_NO_THROW(receive->wait());
}

// If the two ranks were still connected, the message for the lost receive would silently arrive in
// the next one.
TEST_P(TransportContract, NothingPassesBetweenTwoRanksAfterALostMessage) {
  const Ring ring = make(3);
  ring[1]->set_deadline(milliseconds(50));
  Bytes buffer(8);
  const auto lost = ring[1]->receive(0, 7, buffer);
  transport_error([&] { lost->wait(); });
  const TransportError late = transport_error([&] { ring[0]->send(1, 7, buffer)->wait(); });
  expect_mentions(late.what(), {"[rank 0/3]", "rank 1", "50 ms"});
  EXPECT_EQ(late.rank(), 1);
}

TEST_P(TransportContract, AbortFromAnyThreadWakesEverybody) {
  const Ring ring = make(3);
  Bytes buffer(16);
  std::vector<std::thread> waiting;
  for (const std::size_t rank : {0U, 2U}) {
    waiting.emplace_back([&, rank] {
      Bytes in(16);
      const TransportError error = transport_error([&] {
        const auto receive = ring[rank]->receive(1, 4, in);
        receive->wait();
      });
      EXPECT_EQ(error.rank(), 1);
      expect_mentions(error.what(),
                      {"[rank " + std::to_string(rank) + "/3]", "rank 1 aborted", "disk on fire"});
    });
  }
  const auto pending = ring[0]->send(2, 11, buffer);
  std::this_thread::sleep_for(milliseconds(30));
  for (const auto& transport : ring) EXPECT_TRUE(transport->health().alive);
  std::thread([&] { ring[1]->abort("disk on fire"); }).join();
  ring[2]->abort("too late to matter");
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(transport_error([&] { pending->wait(); }).rank(), 1);
  for (const auto& transport : ring) {
    const TransportError error = transport_error([&] { transport->send(0, 5, buffer)->wait(); });
    EXPECT_EQ(error.rank(), 1);
    expect_mentions(error.what(), {"disk on fire"});
    const Health health = transport->health();
    EXPECT_FALSE(health.alive);
    EXPECT_EQ(health.lost_rank, 1);
    expect_mentions(health.reason, {"disk on fire"});
  }
}

TEST_P(TransportContract, HealthCanBeAskedWhileMessagesPass) {
  const Ring ring = make(2);
  std::atomic<bool> ending{false};
  std::thread asking([&] {
    while (!ending) {
      for (const auto& transport : ring) EXPECT_TRUE(transport->health().alive);
      std::this_thread::yield();
    }
  });
  run_in_process(ring, [](Transport& transport) {
    for (int round = 0; round < 50; ++round) EXPECT_TRUE(check_ring(transport, 64).forward_ok);
  });
  ending = true;
  asking.join();
}

// ---- cancelled

TEST_P(TransportContract, CancelledReceiveIsNeverWritten) {
  const Ring ring = make(2);
  const Bytes out = block(64, 1);
  auto abandoned = std::make_unique<Bytes>(64);
  ring[1]->receive(0, 0, *abandoned).reset();
  const Bytes untouched = *abandoned;
  const auto send = ring[0]->send(1, 0, out);
  std::this_thread::sleep_for(milliseconds(2));
  EXPECT_EQ(*abandoned, untouched);
  abandoned.reset();  // AddressSanitizer would see a late copy
  Bytes in(64);
  ring[1]->receive(0, 0, in)->wait();
  EXPECT_EQ(in, out);
}

TEST_P(TransportContract, CancelTakesOneMessageOutOfTheMiddle) {
  const Ring ring = make(2);
  const std::vector<Bytes> out = {block(8, 0), block(8, 1), block(8, 2)};
  std::vector<std::unique_ptr<Ticket>> sends;
  for (const Bytes& bytes : out) sends.push_back(ring[0]->send(1, 0, bytes));
  sends[1].reset();
  Bytes in(8);
  ring[1]->receive(0, 0, in)->wait();
  EXPECT_EQ(in, out[0]);
  ring[1]->receive(0, 0, in)->wait();
  EXPECT_EQ(in, out[2]);
}

// The receiver frees its memory right after the cancel, while the sender may still be copying.
TEST_P(TransportContract, CancelWaitsForACopyUnderWay) {
  constexpr int kRounds = 100;
  constexpr std::size_t kBytes = 1 << 20;
  const Ring ring = make(2);
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

// ---- memory of devices with queued work

// Rank 0 sends and rank 1 receives. One of them has earlier work, which ends when the test says so.
TEST_P(TransportContract, QueuedMemoryIsCopiedAfterItsEvent) {
  for (const int late_rank : {0, 1}) {
    const Ring ring = make(2);
    constexpr std::size_t kBytes = 5000;
    const Bytes right = block(kBytes, 3);
    Bytes buffers[2] = {Bytes(kBytes, std::byte{0xee}), Bytes(kBytes, std::byte{0x11})};
    if (late_rank == 1) buffers[0] = right;
    const auto gate = std::make_shared<Gate>();
    std::atomic<int> returned{0};
    Bytes found;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto queue = make_late_queue();
        Transport& transport = *ring[static_cast<std::size_t>(rank)];
        const Region region = transport.expose(buffers[rank], Device{}, make_late_queue());
        const Message message{rank == 0 ? Way::send : Way::receive, 1 - rank, 2, &region, 0,
                              static_cast<std::int64_t>(kBytes)};
        const auto ticket =
            transport.post(std::span(&message, 1), rank == late_rank ? Event(gate) : Event());
        ticket->wait(*queue);
        ++returned;
        queue->record().wait();
        if (rank == 1) found = buffers[1];
      });
    }
    if (GetParam().by_queues) {
      EXPECT_TRUE(comes_true([&] { return returned == 2; })) << "wait(queue) waits for the device";
    }
    std::this_thread::sleep_for(milliseconds(20));
    EXPECT_EQ(buffers[1], Bytes(kBytes, std::byte{0x11})) << "written before its event";
    std::copy(right.begin(), right.end(), buffers[0].begin());
    gate->open();
    for (std::thread& thread : ranks) thread.join();
    EXPECT_TRUE(found == right) << "what is enqueued after wait(queue) does not find the bytes";
  }
}

TEST_P(TransportContract, CancelledCopyOfQueuedMemoryIsOver) {
  for (int round = 0; round < 20; ++round) {
    const Ring ring = make(2);
    Bytes out = block(5000, 1);
    Bytes in(5000);
    const auto copies = make_late_queue();
    const auto gate = std::make_shared<Gate>();
    const Region from = ring[0]->expose(out, Device{}, make_late_queue());
    const Region to = ring[1]->expose(in, Device{}, copies);
    std::thread opening([&] {
      std::this_thread::sleep_for(milliseconds(5));
      gate->open();
    });
    const Message send{Way::send, 1, 0, &from, 0, from.bytes};
    const Message receive{Way::receive, 0, 0, &to, 0, to.bytes};
    auto sending = ring[0]->post(std::span(&send, 1), Event(gate));
    ring[1]->post(std::span(&receive, 1), Event()).reset();
    const Bytes mine(5000, std::byte{0x33});
    in = mine;
    opening.join();
    copies->record().wait();
    EXPECT_TRUE(in == mine) << "written to after the ticket was destroyed";
    sending.reset();
  }
}

}  // namespace annulus::test
