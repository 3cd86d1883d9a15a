// Small records of all ranks, on all ranks.

#include "ring/records.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"

namespace annulus {
namespace {

using ring::gather_records;

// Lengths differ, some are empty, and bytes of zero are nothing special.
std::string record_of(int rank) {
  return std::string(static_cast<std::size_t>(rank * rank % 7), static_cast<char>(rank));
}

TEST(Records, EveryRankGetsTheRecordsOfAllInTheirOrder) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    std::vector<std::string> expected;
    std::uint64_t rounds = 0;
    for (int rank = 0; rank < ranks; ++rank) expected.push_back(record_of(rank));
    for (int known = 1; known < ranks; known *= 2) ++rounds;
    run_in_process(ranks, [&](Transport& transport) {
      for (int call = 0; call < 3; ++call)
        EXPECT_EQ(gather_records(transport, record_of(transport.rank())), expected);
      EXPECT_EQ(transport.counters().messages_sent, 3 * 2 * rounds) << ranks << " ranks";
    });
  }
}

TEST(Records, OfNothingAreNothing) {
  run_in_process(3, [](Transport& transport) {
    EXPECT_EQ(gather_records(transport, ""), std::vector<std::string>(3));
  });
}

TEST(Records, AMissingRankIsAnErrorOnAllOthers) {
  const auto ring = make_in_process_ring(3, {.deadline = std::chrono::milliseconds(100)});
  EXPECT_THROW((void)gather_records(*ring[0], "alone"), TransportError);
  EXPECT_THROW((void)gather_records(*ring[1], "late"), TransportError);  // hears of it at once
}

TEST(Records, AreRefusedWhileSomebodyElseUsesTheTransport) {
  const auto ring = make_in_process_ring(2);
  {
    const Transport::Use use(*ring[0], "somebody else");
    EXPECT_THROW((void)gather_records(*ring[0], "mixed up"), ConfigError);
  }
  EXPECT_THROW((void)gather_records(*ring[1], "alone"), TransportError);  // the ring has ended
}

}  // namespace
}  // namespace annulus
