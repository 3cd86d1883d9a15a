#include "support/ring_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <stdexcept>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "support/late_backend.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

// ANNULUS_TEST_BACKEND=late runs a whole test program on late queues; =shared on memory that is
// shared between ranks as between processes.
const std::string kTestBackend = [] {
  const char* name = std::getenv("ANNULUS_TEST_BACKEND");
  return std::string(name == nullptr ? "" : name);
}();
[[maybe_unused]] const std::unique_ptr<LateBackends> kLateBackends = [] {
  return kTestBackend == "late" || kTestBackend == "shared"
             ? std::make_unique<LateBackends>(kTestBackend == "shared")
             : nullptr;
}();

// For ring tests: a transport that carries host memory only, if memory is to be shared.
void with_transport(Transport& transport, const std::function<void(Transport&)>& body) {
  if (kTestBackend != "shared") return body(transport);
  HostOnlyTransport host(transport, false);
  body(host);
}

}  // namespace

RingOptions ring_options(const Problem& problem, Placement placement) {
  return {.pattern = problem.pattern,
          .placement = std::move(placement),
          .batch = problem.shape.batch,
          .kv_heads = problem.shape.kv_heads,
          .head_dim = problem.shape.head_dim,
          .dtype = problem.dtype,
          .scale = problem.scale,
          .softcap = problem.softmax.softcap,
          .dropout_p = problem.softmax.dropout_p,
          .mix_gradient = problem.mix,
          .limits = {},
          .device = test_device()};
}

Results empty_results(const RingOptions& options) {
  const std::int64_t rows = options.batch * options.placement.tokens();
  const std::int64_t key_rows = options.batch * options.keys().tokens();
  const auto queries = static_cast<std::size_t>(rows * options.pattern.heads * options.head_dim);
  const auto keys = static_cast<std::size_t>(key_rows * options.kv_heads * options.head_dim);
  Results results;
  results.o.resize(queries);
  results.lse.resize(static_cast<std::size_t>(rows * options.pattern.heads));
  results.dq.resize(queries);
  results.dk.resize(keys);
  results.dv.resize(keys);
  return results;
}

Results run_ring(const RingOptions& options, const Inputs& inputs, Layout layout) {
  Results results = empty_results(options);
  const auto rank = [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank(), layout);
    shard.load(inputs);
    shard.forward(ring);
    if (options.backward) shard.backward(ring);
    shard.collect(results);
    const std::string damage = shard.damage();
    if (!damage.empty()) throw std::runtime_error(damage);
  };
  const std::size_t heads = inputs.sinks.size();
  results.dsinks_of_ranks.resize(heads * static_cast<std::size_t>(options.placement.ranks()));
  run_in_process(options.placement.ranks(),
                 [&](Transport& transport) { with_transport(transport, rank); });
  results.dsinks.assign(heads, 0.0F);
  for (std::size_t i = 0; i < results.dsinks_of_ranks.size(); ++i)
    results.dsinks[i % heads] += results.dsinks_of_ranks[i];
  return results;
}

std::vector<RankOutcome> run_ranks(int ranks, const std::function<void(Transport&)>& body) {
  return run_ranks(make_in_process_ring(ranks), body);
}

std::vector<RankOutcome> run_ranks(std::span<const std::unique_ptr<Transport>> ring,
                                   const std::function<void(Transport&)>& body) {
  std::vector<RankOutcome> outcomes(ring.size());
  run_in_process(ring, [&](Transport& transport) {
    RankOutcome& outcome = outcomes[static_cast<std::size_t>(transport.rank())];
    const auto end_as = [&](const char* kind, const char* message) {
      outcome.kind = kind;
      outcome.message = message;
    };
    try {
      with_transport(transport, body);
    } catch (const ConfigError& error) {
      end_as("ConfigError", error.what());
    } catch (const TransportError& error) {
      end_as("TransportError", error.what());
      outcome.lost_rank = error.rank();
    } catch (const DeviceError& error) {
      end_as("DeviceError", error.what());
    } catch (const std::exception& error) {
      end_as("other", error.what());
    }
  });
  return outcomes;
}

void expect_everywhere(const std::vector<RankOutcome>& outcomes, const std::string& kind,
                       const std::vector<std::string>& texts) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const RankOutcome& outcome = outcomes[rank];
    EXPECT_EQ(outcome.kind, kind) << "rank " << rank << ": " << outcome.message;
    EXPECT_EQ(outcome.message.find("timed out"), std::string::npos)
        << "rank " << rank << " has waited in vain: " << outcome.message;
    for (const std::string& text : texts) {
      EXPECT_NE(outcome.message.find(text), std::string::npos)
          << "rank " << rank << " says '" << outcome.message << "', without '" << text << "'";
    }
  }
}

WatchedTransport::Count WatchedTransport::sent(std::uint32_t tag) const {
  Count sum;
  for (const auto& [key, count] : sent_) {
    if (key.first != tag) continue;
    sum.bytes += count.bytes;
    sum.messages += count.messages;
  }
  return sum;
}

std::unique_ptr<Ticket> WatchedTransport::post(std::span<const Message> messages,
                                               const Event& after) {
  for (const Message& message : messages) {
    if (message.way == Way::receive) continue;
    if (fail_after_ >= 0 && message.tag == fail_tag_ && fail_after_-- == 0) {
      throw std::runtime_error("rank failure for the test");
    }
    Count& count = sent_[{message.tag, message.peer}];
    count.bytes += message.bytes;
    count.messages += 1;
  }
  return inner().post(messages, after);
}

Placement placement_of(const std::string& name, std::int64_t tokens, int ranks,
                       std::uint64_t seed) {
  if (name == "aligned") return Placement::contiguous(tokens, ranks, 16);
  if (name == "explicit") {
    Random random(seed);
    return random_placement(random, tokens, ranks);
  }
  return Placement::named(name, tokens, ranks);
}

double slowness() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 20.0;
#else
  return 1.0;
#endif
}

}  // namespace annulus::test
