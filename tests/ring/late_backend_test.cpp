#include "support/late_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "ring/link.h"
#include "support/forwarding_transport.h"
#include "support/gate.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

// How often the host waited while it enqueued both passes.
std::int64_t waits_of_both(RingAttention& ring, Shard& shard) {
  const std::int64_t before = host_waits();
  shard.enqueue(ring);
  return host_waits() - before;
}

class LateBackend : public testing::TestWithParam<RowTravel> {
 protected:
  LateBackend()
      : problem_(make_problem("late", pattern(), 2, 150, 24)),
        inputs_(random_inputs(problem_, 11)),
        options_(ring_options(problem_, Placement::zigzag(150, 3))) {
    GetParam().apply(options_);
  }

  static Pattern pattern() {
    const std::int64_t segments[] = {32, 150};
    const std::int64_t dilations[] = {1, 3};
    return longnet(4, segments, dilations, true);
  }

  // Results, and how often a host thread waited inside the passes.
  std::pair<Results, std::int64_t> run(bool host_only, bool reaches, bool shared = false) {
    const LateBackends late(shared);
    Results results = empty_results(options_);
    std::atomic<std::int64_t> waited{0};
    run_in_process(3, [&](Transport& transport) {
      HostOnlyTransport host(transport, reaches);
      Transport& link = host_only ? static_cast<Transport&>(host) : transport;
      RingAttention ring(options_, link);
      Shard shard(options_, link.rank());
      shard.load(inputs_);
      waited += waits_of_both(ring, shard);
      ring.synchronize();
      shard.collect(results);
    });
    return {std::move(results), waited};
  }

  Problem problem_;
  Inputs inputs_;
  RingOptions options_;
};

INSTANTIATE_TEST_SUITE_P(, LateBackend, testing::ValuesIn(kRowTravels),
                         [](const auto& info) { return info.param.name; });

TEST_P(LateBackend, GivesTheSameBitsAsAtOnce) {
  const Results at_once = run_ring(options_, inputs_);
  const Results late = run(false, true).first;
  EXPECT_EQ(first_difference(at_once, late), "");
  expect_matches(problem_, late, reference_of(problem_, inputs_));
}

TEST_P(LateBackend, IsCarriedByTransportsThatKnowHostMemoryOnly) {
  const Results at_once = run_ring(options_, inputs_);
  const auto [direct, direct_waits] = run(true, true);
  EXPECT_EQ(first_difference(at_once, direct), "");
  EXPECT_GT(direct_waits, 0);
  const auto [staged, staged_waits] = run(true, false);
  EXPECT_EQ(first_difference(at_once, staged), "") << "rows that were staged";
  EXPECT_GT(staged_waits, 0);
}

TEST_P(LateBackend, SharesItsMemoryWithOtherProcesses) {
  const Results at_once = run_ring(options_, inputs_);
  const auto [shared, waits] = run(true, false, true);
  EXPECT_EQ(first_difference(at_once, shared), "");
}

TEST_P(LateBackend, BatchesMayBeCarriedOutOneAfterTheOther) {
  const Results at_once = run_ring(options_, inputs_);
  Results results = empty_results(options_);
  const LateBackends late;
  const auto outcomes = run_ranks(3, [&](Transport& inner) {
    InOrderTransport transport(inner);
    RingAttention ring(options_, transport);
    Shard shard(options_, transport.rank());
    shard.load(inputs_);
    shard.forward(ring);
    shard.backward(ring);
    shard.collect(results);
  });
  for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.message, "");
  EXPECT_EQ(first_difference(at_once, results), "");
}

// Memory of a pass still holds the rows of the one before it, which look right: other inputs follow
// at once.
TEST_P(LateBackend, PassesWithOtherInputsFollowAtOnce) {
  for (const bool shared : {false, true}) {
    const Inputs others = random_inputs(problem_, 12);
    const Results at_once[] = {run_ring(options_, inputs_), run_ring(options_, others)};
    Results results[] = {empty_results(options_), empty_results(options_)};
    const LateBackends late(shared);
    run_in_process(3, [&](Transport& inner) {
      HostOnlyTransport host(inner, false);
      Transport& transport = shared ? static_cast<Transport&>(host) : inner;
      Shard first(options_, transport.rank());
      Shard second(options_, transport.rank());
      RingAttention ring(options_, transport);
      first.load(inputs_);
      second.load(others);
      for (Shard* shard : {&first, &second}) {
        ring.forward(shard->q.view(), shard->k.view(), shard->v.view(), shard->o.view(),
                     shard->lse.view());
        ring.backward(shard->q.view(), shard->k.view(), shard->v.view(), shard->o.view(),
                      shard->lse.view(), shard->dout.view(), shard->dq.view(), shard->dk.view(),
                      shard->dv.view());
      }
      ring.synchronize();
      first.collect(results[0]);
      second.collect(results[1]);
    });
    for (int i = 0; i < 2; ++i) EXPECT_EQ(first_difference(at_once[i], results[i]), "") << i;
  }
}

// All ranks meet before and behind their passes, so that every wait counted is inside a pass.
TEST_P(LateBackend, HostNeverWaitsInsideAPass) {
  for (const bool shared : {false, true}) {
    const LateBackends late(shared);
    std::atomic<std::int64_t> waited{0};
    std::atomic<int> enqueued{0};
    run_in_process(3, [&](Transport& inner) {
      HostOnlyTransport host(inner, false);
      Transport& transport = shared ? static_cast<Transport&>(host) : inner;
      RingAttention ring(options_, transport);
      EXPECT_EQ(ring.transfers(), shared ? "shared device memory" : "device memory");
      Shard shard(options_, transport.rank());
      shard.load(inputs_);
      ++enqueued;
      while (enqueued < 3) std::this_thread::yield();
      waited += waits_of_both(ring, shard);
      ++enqueued;
      while (enqueued < 6) std::this_thread::yield();
      ring.synchronize();
    });
    EXPECT_EQ(waited, 0);
  }
}

// Rows on their way through the host when a batch cannot be posted: the executor must not free
// their memory before they are there.
TEST(Link, FinishWaitsForCopiesOfABatchThatWasNotPosted) {
  const std::shared_ptr<Backend> backend = make_late(backend_of(Device{}, 1));
  const auto ring = make_in_process_ring(2);
  HostOnlyTransport host(*ring[0], false);
  WatchedTransport failing(host);
  failing.fail_after(5, 0);
  const std::shared_ptr<Queue> queue = backend->make_queue();
  ring::Link link(failing, *backend, queue);
  ASSERT_TRUE(link.staged());
  constexpr std::int64_t kMessages = 500;  // so many that their copies take a while
  constexpr std::int64_t kBytes = 4096;
  const ring::Mailbox box = link.make_mailbox(kMessages * kBytes, "rows");
  ring::Batch batch;
  for (std::int64_t i = 0; i < kMessages; ++i) batch.add(Way::send, 1, 5, box, i * kBytes, kBytes);

  const auto gate = std::make_shared<Gate>();
  queue->wait(Event(gate));
  EXPECT_THROW((void)link.post(batch, link.queue().record()), std::runtime_error);
  std::thread opening([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  link.finish();
  const std::vector<std::byte> mine(kMessages * kBytes, std::byte{0x33});
  std::copy(mine.begin(), mine.end(), box.staging.data());
  opening.join();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(std::equal(mine.begin(), mine.end(), box.staging.data()));
}

}  // namespace
}  // namespace annulus::test
