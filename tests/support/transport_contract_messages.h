#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "annulus/ring_check.h"
#include "support/transport_contract.h"

// Every transport moves bytes.
namespace annulus::test {

TEST_P(TransportContract, EveryPairOfRanksExchangesBlocks) {
  for (const int ranks : {1, 2, 3, 8}) {
    run(ranks, [&](Transport& transport) {
      EXPECT_EQ(transport.size(), ranks);
      EXPECT_FALSE(transport.name().empty());
      const auto size = [](int from, int to) {
        return static_cast<std::size_t>(1 + 100 * from + 13 * to);
      };
      std::vector<Bytes> out;
      std::vector<Bytes> in;
      for (int peer = 0; peer < ranks; ++peer) {
        out.push_back(block(size(transport.rank(), peer), transport.rank() * ranks + peer));
        in.emplace_back(size(peer, transport.rank()));
      }
      std::vector<std::unique_ptr<Ticket>> tickets;
      // Odd ranks send first, so that both orders of arrival happen.
      for (int pass = 0; pass < 2; ++pass) {
        for (int peer = 0; peer < ranks; ++peer) {
          const auto p = static_cast<std::size_t>(peer);
          const bool send = (pass + transport.rank()) % 2 == 1;
          tickets.push_back(send ? transport.send(peer, 5, out[p])
                                 : transport.receive(peer, 5, in[p]));
        }
      }
      for (const auto& ticket : tickets) ticket->wait();
      for (int peer = 0; peer < ranks; ++peer) {
        EXPECT_EQ(in[static_cast<std::size_t>(peer)],
                  block(size(peer, transport.rank()), peer * ranks + transport.rank()));
      }
    });
  }
}

TEST_P(TransportContract, MessagesOfOneTagKeepTheirOrder) {
  run(3, [](Transport& transport) {
    constexpr int kMessages = 50;
    std::vector<int> out(kMessages);
    std::iota(out.begin(), out.end(), 1000 * transport.rank());
    std::vector<int> in(kMessages, -1);
    std::vector<std::unique_ptr<Ticket>> tickets;
    for (int& value : out)
      tickets.push_back(transport.send(next(transport), 1, std::as_bytes(std::span(&value, 1))));
    for (int& value : in) {
      tickets.push_back(
          transport.receive(previous(transport), 1, std::as_writable_bytes(std::span(&value, 1))));
    }
    for (const auto& ticket : tickets) ticket->wait();
    for (int i = 0; i < kMessages; ++i)
      EXPECT_EQ(in[static_cast<std::size_t>(i)], 1000 * previous(transport) + i);
  });
}

TEST_P(TransportContract, TagsAreIndependent) {
  run(2, [](Transport& transport) {
    constexpr std::uint32_t kTags = 300;
    std::vector<std::uint32_t> tags(kTags);
    std::iota(tags.begin(), tags.end(), 0xffffff00U);  // wraps around: every tag value is allowed
    std::shuffle(tags.begin(), tags.end(), std::mt19937(static_cast<unsigned>(transport.rank())));
    std::vector<std::uint32_t> values(tags);
    std::vector<std::unique_ptr<Ticket>> tickets;
    for (std::uint32_t i = 0; i < kTags; ++i) {
      const auto bytes = std::as_writable_bytes(std::span(&values[i], 1));
      if (transport.rank() == 0) {
        tickets.push_back(transport.send(1, tags[i], bytes));
      } else {
        values[i] = 0;
        tickets.push_back(transport.receive(0, tags[i], bytes));
      }
    }
    for (const auto& ticket : tickets) ticket->wait();
    EXPECT_EQ(values, tags);
  });
}

// All to all from and into parts of two exposed regions, in one batch.
TEST_P(TransportContract, BatchesMixSendsAndReceives) {
  for (const int ranks : {1, 3}) {
    run(ranks, [&](Transport& transport) {
      constexpr std::int64_t kBytes = 40;
      Bytes out = block(static_cast<std::size_t>(kBytes * ranks), transport.rank());
      Bytes in(out.size() + 1, std::byte{0x55});
      const Region from = transport.expose(out, Device{}, nullptr);
      const Region to = transport.expose(in, Device{}, nullptr);
      std::vector<Message> batch;
      for (int peer = 0; peer < ranks; ++peer) {
        batch.push_back({Way::receive, peer, 9, &to, peer * kBytes, kBytes});
        batch.push_back({Way::send, peer, 9, &from, peer * kBytes, kBytes});
      }
      transport.post(batch, Event())->wait();
      for (int peer = 0; peer < ranks; ++peer) {
        const Bytes theirs = block(static_cast<std::size_t>(kBytes * ranks), peer);
        EXPECT_TRUE(std::equal(in.begin() + peer * kBytes, in.begin() + (peer + 1) * kBytes,
                               theirs.begin() + transport.rank() * kBytes));
      }
      EXPECT_EQ(in.back(), std::byte{0x55});
      transport.post({}, Event())->wait();  // nothing is moved at once
    });
  }
}

// Rank 1 sends what rank 0 waits for first only after it has received what rank 0 posted second.
TEST_P(TransportContract, BatchesProgressIndependently) {
  run(2, [](Transport& transport) {
    Bytes first(1000);
    const Bytes second = block(1000, 2);
    if (transport.rank() == 0) {
      const auto early = transport.receive(1, 7, first);
      const auto late = transport.send(1, 8, second);
      late->wait();
      early->wait();
      EXPECT_EQ(first, block(1000, 1));
    } else {
      Bytes heard(1000);
      transport.receive(0, 8, heard)->wait();
      EXPECT_EQ(heard, second);
      const Bytes answer = block(1000, 1);
      transport.send(0, 7, answer)->wait();
    }
  });
}

TEST_P(TransportContract, MessagesMayBeEmpty) {
  run(2, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    const Region nothing;
    const Message batch[] = {{Way::send, peer, 1, &nothing, 0, 0},
                             {Way::receive, peer, 1, &nothing, 0, 0}};
    transport.post(batch, Event())->wait();
    const auto send = transport.send(peer, 2, {});
    transport.receive(peer, 2, {})->wait();
    send->wait();
  });
}

TEST_P(TransportContract, RankSendsToItself) {
  run(3, [](Transport& transport) {
    const int self = transport.rank();
    Bytes in(100);
    const Bytes out = block(100, self);
    const auto receive = transport.receive(self, 0, in);
    const auto send = transport.send(self, 0, out);
    receive->wait();
    send->wait();
    send->wait();  // again: nothing changes
    EXPECT_EQ(in, out);
  });
}

TEST_P(TransportContract, CountersMatchTheMessagesThatCompleted) {
  for (const int ranks : {1, 3}) {
    run(ranks, [](Transport& transport) {
      std::uint64_t total = 0;
      for (const std::size_t size : {0U, 1U, 1000U, 70'000U}) {
        const Bytes out(size);
        Bytes in(size);
        const auto send = transport.send(next(transport), 3, out);
        const auto receive = transport.receive(previous(transport), 3, in);
        receive->wait();
        send->wait();
        total += size;
      }
      { const auto cancelled = transport.receive(previous(transport), 99, {}); }
      const TransportCounters counters = transport.counters();
      EXPECT_EQ(counters.bytes_sent, total);
      EXPECT_EQ(counters.bytes_received, total);
      EXPECT_EQ(counters.messages_sent, 4U);
      EXPECT_EQ(counters.messages_received, 4U);
    });
  }
}

TEST_P(TransportContract, RingCheckPasses) {
  for (const int ranks : {1, 2, 5}) {
    run(ranks, [](Transport& transport) {
      for (const std::size_t bytes : {std::size_t{4096}, std::size_t{1}, std::size_t{0}}) {
        const RingCheck check = check_ring(transport, bytes);
        EXPECT_TRUE(check.forward_ok) << check.detail;
        EXPECT_TRUE(check.backward_ok) << check.detail;
      }
      EXPECT_EQ(transport.counters().messages_sent, 6U);
    });
  }
}

// The traffic of a ring executor: both directions, one step ahead, with changing sizes, and in
// every seventh round a receive that is cancelled. 1,000 messages of every rank.
TEST_P(TransportContract, ThousandMessagesDeliverEveryByte) {
  for (const int ranks : {2, 3, 8}) {
    run(ranks, [](Transport& transport) {
      constexpr int kSteps = 500;
      const auto size = [](int step) { return static_cast<std::size_t>(step * 37 % 2048); };
      Bytes out[2];
      Bytes forward[2];
      Bytes backward[2];
      std::unique_ptr<Ticket> tickets[2];
      const auto post = [&](int step) {
        const int slot = step % 2;
        const auto tag = static_cast<std::uint32_t>(step % 5);
        out[slot] = block(size(step), transport.rank() + step);
        forward[slot].assign(size(step), std::byte{0});
        backward[slot].assign(size(step), std::byte{0});
        const Region from(out[slot]);
        const Region ahead(forward[slot]);
        const Region behind(backward[slot]);
        const std::int64_t bytes = from.bytes;
        const Message batch[] = {{Way::receive, previous(transport), tag, &ahead, 0, bytes},
                                 {Way::send, next(transport), tag, &from, 0, bytes},
                                 {Way::receive, next(transport), tag + 100, &behind, 0, bytes},
                                 {Way::send, previous(transport), tag + 100, &from, 0, bytes}};
        tickets[slot] = transport.post(batch, Event());
        if (step % 7 == 0) transport.receive(next(transport), 1000, forward[slot]).reset();
      };
      post(0);
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) post(step + 1);
        const int slot = step % 2;
        tickets[slot]->wait();
        ASSERT_EQ(forward[slot], block(size(step), previous(transport) + step));
        ASSERT_EQ(backward[slot], block(size(step), next(transport) + step));
      }
      EXPECT_EQ(transport.counters().messages_sent, 1000U);
      EXPECT_EQ(transport.counters().bytes_received, transport.counters().bytes_sent);
    });
  }
}

}  // namespace annulus::test
