// Rows travel while the step before them is computed: they are posted before that step's tiles run,
// and nobody waits for them until the tiles are done. What that saves is measured by 'make perf'.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/events.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "ring/tags.h"
#include "support/forwarding_transport.h"
#include "support/ring_fixture.h"

namespace annulus {
namespace {

// Steps that this rank has computed since the event `from`: a record is added when the work ends.
int steps_computed(int rank, std::uint64_t from) {
  int steps = 0;
  for (const EventRecord& event : event_stream().read(from).events) {
    const std::string_view name = event.name();
    if (event.kind == EventKind::compute && event.rank == rank &&
        (name == "forward" || name == "backward"))
      ++steps;
  }
  return steps;
}

// A batch of rows or gradients: how many steps were computed when it was posted, and when it was
// waited for.
struct Moment {
  int posted = -1;
  int awaited = -1;
  friend bool operator==(const Moment&, const Moment&) = default;
};
void PrintTo(const Moment& moment, std::ostream* out) {
  *out << "posted after " << moment.posted << " steps, awaited after " << moment.awaited;
}

class NotingTransport final : public test::ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  void begin_pass() {
    from_ = event_stream().next();
    rows.clear();
    gradients.clear();
  }

  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    auto ticket = inner().post(messages, after);
    std::vector<Moment>* moments = nullptr;
    if (messages.front().tag == ring::kTagParcels) moments = &rows;
    if (messages.front().tag == ring::kTagReturns) moments = &gradients;
    if (moments == nullptr) return ticket;
    moments->push_back({.posted = steps_computed(rank(), from_)});
    return std::make_unique<Noting>(*this, std::move(ticket), *moments);
  }

  std::vector<Moment> rows;
  std::vector<Moment> gradients;

 private:
  class Noting final : public Ticket {
   public:
    Noting(NotingTransport& transport, std::unique_ptr<Ticket> inner, std::vector<Moment>& moments)
        : transport_(transport),
          inner_(std::move(inner)),
          moments_(moments),
          index_(moments.size() - 1) {}
    void wait() override {
      note();
      inner_->wait();
    }
    void wait(Queue& queue) override {
      note();
      inner_->wait(queue);
    }

   private:
    void note() { moments_[index_].awaited = steps_computed(transport_.rank(), transport_.from_); }
    NotingTransport& transport_;
    const std::unique_ptr<Ticket> inner_;
    std::vector<Moment>& moments_;
    const std::size_t index_;
  };

  std::uint64_t from_ = 0;
};

struct Case {
  std::string name;
  BackwardTravel travel;
  bool blocking;
};

class Overlap : public testing::TestWithParam<Case> {
 protected:
  Overlap() { event_stream().start(); }
  ~Overlap() override { event_stream().stop(); }
};
INSTANTIATE_TEST_SUITE_P(, Overlap,
                         testing::Values(Case{"keys", BackwardTravel::keys, false},
                                         Case{"queries", BackwardTravel::queries, false},
                                         Case{"keys_blocking", BackwardTravel::keys, true},
                                         Case{"queries_blocking", BackwardTravel::queries, true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(Overlap, MessagesAreUnderWayWhileAStepIsComputed) {
  constexpr int kRanks = 4;
  const bool blocking = GetParam().blocking;
  const test::Problem problem = test::make_problem("overlap", dense(2), 2, 64, 16);
  RingOptions options = test::ring_options(problem, Placement::contiguous(64, kRanks));
  options.schedule = Schedule::ring;
  options.backward_travel = GetParam().travel;
  options.blocking = blocking;
  // Rows of step s go while step s - 1 is computed; with blocking transfers before it.
  std::vector<Moment> rows;
  for (int s = 1; s < kRanks; ++s) rows.push_back({s - 1, blocking ? s - 1 : s});
  // Gradients of step s go while step s + 1 is computed, if there is one.
  std::vector<Moment> gradients;
  for (int s = 1; s < kRanks; ++s)
    gradients.push_back({s + 1, blocking || s == kRanks - 1 ? s + 1 : s + 2});

  const auto outcomes = test::run_ranks(kRanks, [&](Transport& inner) {
    NotingTransport transport(inner);
    RingAttention ring(options, transport);
    test::Shard shard(options, transport.rank());
    shard.load(test::random_inputs(problem, 1));
    transport.begin_pass();
    shard.forward(ring);
    EXPECT_EQ(transport.rows, rows) << "forward, rank " << transport.rank();
    transport.begin_pass();
    shard.backward(ring);
    EXPECT_EQ(transport.rows, rows) << "backward, rank " << transport.rank();
    EXPECT_EQ(transport.gradients, gradients) << "backward, rank " << transport.rank();
  });
  test::expect_everywhere(outcomes, "", {});
}

// Calls look() before every batch with a message of at least `bytes`: rows, not the records of an
// agreement.
class LookedThroughTransport final : public test::ForwardingTransport {
 public:
  LookedThroughTransport(Transport& inner, std::int64_t bytes, std::function<void()> look)
      : ForwardingTransport(inner), bytes_(bytes), look_(std::move(look)) {}

  std::unique_ptr<Ticket> post(std::span<const Message> messages, const Event& after) override {
    if (std::any_of(messages.begin(), messages.end(),
                    [&](const Message& message) { return message.bytes >= bytes_; }))
      look_();
    return ForwardingTransport::post(messages, after);
  }

 private:
  std::int64_t bytes_;
  std::function<void()> look_;
};

// Links must not be idle while sums are cleared, because every step would wait for that time. fp32
// forward and backward clear the caller's own tensors: when the first rows are sent, these must be
// unchanged.
TEST(Ring, RowsGoOutBeforeAnythingIsCleared) {
  constexpr std::int64_t kTokens = 256;
  constexpr int kRanks = 2;
  constexpr std::int64_t kLocal = kTokens / kRanks;
  for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
    RingOptions options{dense(2), Placement::contiguous(kTokens, kRanks)};
    options.kv_heads = 2;
    options.head_dim = 8;
    options.schedule = schedule;
    options.backward_travel = BackwardTravel::keys;
    run_in_process(kRanks, [&](Transport& inner) {
      std::vector<float> in(kLocal * 2 * 8, 0.5F);
      std::vector<float> o(in.size(), 7);
      std::vector<float> lse(kLocal * 2, 7);
      std::vector<float> dq(in.size(), 7);
      std::vector<float> dk(in.size(), 7);
      std::vector<float> dv(in.size(), 7);
      std::vector<const std::vector<float>*> untouched;
      int looks = 0;
      LookedThroughTransport transport(inner, kLocal * 8 * 4, [&] {
        for (const std::vector<float>* const x : untouched)
          EXPECT_EQ(std::count(x->begin(), x->end(), 7.0F), std::ssize(*x));
        looks += untouched.empty() ? 0 : 1;
        untouched.clear();
      });
      const auto view = [&](std::vector<float>& x) {
        return TensorView(x.data(), DType::f32, {1, kLocal, 2, 8});
      };
      const TensorView lse_view(lse.data(), DType::f32, {1, kLocal, 2});
      RingAttention ring(options, transport);
      untouched = {&o, &lse};
      ring.forward(view(in), view(in), view(in), view(o), lse_view);
      ring.synchronize();
      untouched = {&dq, &dk, &dv};
      ring.backward(view(in), view(in), view(in), view(o), lse_view, view(in), view(dq), view(dk),
                    view(dv));
      ring.synchronize();
      EXPECT_EQ(looks, 2);
      EXPECT_EQ(std::count(lse.begin(), lse.end(), 7.0F), 0);
    });
  }
}

}  // namespace
}  // namespace annulus
