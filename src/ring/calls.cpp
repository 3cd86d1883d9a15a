#include <array>
#include <charconv>
#include <exception>
#include <string_view>
#include <utility>

#include "annulus/error.h"
#include "annulus/events.h"
#include "ring/executor.h"
#include "ring/tensor_rows.h"

namespace annulus {

using ring::numbers_of;
using ring::rows_of;

namespace {

// If a call throws, waits for everything that it and earlier calls have enqueued. The caller may
// then free its tensors.
template <typename Executor>
class OverOnError {
 public:
  explicit OverOnError(Executor& executor) : executor_(executor) {}
  ~OverOnError() {
    if (std::uncaught_exceptions() > before_) executor_.finish_enqueued();
  }
  OverOnError(const OverOnError&) = delete;
  OverOnError& operator=(const OverOnError&) = delete;

 private:
  Executor& executor_;
  const int before_ = std::uncaught_exceptions();
};

}  // namespace

std::string RingAttention::Impl::check_state(const BranchState::Data& state,
                                             std::int64_t output_bytes, std::int64_t rows) {
  if (state.o.bytes() == output_bytes && state.lse.bytes() == rows * 4) return "";
  return "the branch state was made by an executor of another shape: make it with this one's "
         "make_branch_state()";
}

DropoutSeed RingAttention::Impl::agree_on_call(const char* where, std::string wrong,
                                               const ring::CallValues& values,
                                               CallClaims& claims) const {
  claims.set(values);
  DropoutSeed seed = values.dropout.value_or(DropoutSeed{});
  seed.seed =
      ring::agree_on_digest(*transport, where, complaint.empty() ? std::move(wrong) : complaint,
                            claims.claims, claims.digest, {0, seed.seed})
          .number;
  return seed;
}

void RingAttention::Impl::CallClaims::set(const ring::CallValues& values) {
  digest = fixed;
  const auto put = [&](ring::Claim& claim, std::string_view value) {
    claim.value = value.substr(0, kMostShown);  // has the capacity: calls allocate nothing
    digest = ring::extended_digest(digest, value);
  };
  put(claims[claims.size() - (with_seed ? 2 : 1)], values.claims);
  if (!with_seed) return;
  std::array<char, kMostShown> digits;
  std::string_view seed = "none";
  if (values.seed_of_rank_0) {
    seed = "that of rank 0";
  } else if (values.dropout.has_value()) {
    const char* const end = std::to_chars(digits.begin(), digits.end(), values.dropout->seed).ptr;
    seed = {digits.data(), end};
  }
  put(claims.back(), seed);
}

void RingAttention::Impl::run(const ring::ForwardTensors& tensors, BranchState::Data* state) {
  const char* where = "RingAttention::forward";
  const Transport::Use use(*transport, where);
  EventScope pass(EventKind::pass, "forward", rank);
  if (event_stream().on() && complaint.empty()) pass.set_bytes(predicted_forward_bytes());
  const OverOnError over(*this);
  const bool keep = kept != nullptr && state != nullptr;
  std::string wrong = ring::complaint_about(tensors, options, rank);
  if (wrong.empty() && keep) wrong = check_state(*state, branch_output_bytes(), branch_rows());
  CallClaims& claims = forward_claims[keep ? 1 : 0][tensors.sinks ? 1 : 0];
  ForwardCall call;
  call.dropout = agree_on_call(where, std::move(wrong), tensors.values, claims);
  call.q = rows_of(tensors.q);
  call.k = rows_of(tensors.k);
  call.v = rows_of(tensors.v);
  call.o = rows_of(tensors.o);
  call.lse = rows_of(tensors.lse);
  call.sinks = numbers_of(tensors.sinks);
  call.stop = &interrupted;
  if (keep) {
    state->filled = false;
    call.branches = state->outputs();
  }
  guard([&] { forward(call); });
  if (keep) state->filled = true;
}

void RingAttention::Impl::run(const ring::BackwardTensors& tensors,
                              const BranchState::Data* state) {
  const char* where = "RingAttention::backward";
  const Transport::Use use(*transport, where);
  EventScope pass(EventKind::pass, "backward", rank);
  if (event_stream().on() && complaint.empty()) pass.set_bytes(predicted_backward_bytes());
  const OverOnError over(*this);
  const bool detached = options.mix_gradient == MixGradient::detached;
  std::string wrong = ring::complaint_about(tensors, options, rank);
  if (wrong.empty() && detached) {
    wrong = state == nullptr || !state->filled
                ? "mix_gradient detached needs the branch state of forward: make it with "
                  "make_branch_state() and pass it to forward and backward"
                : check_state(*state, branch_output_bytes(), branch_rows());
  }
  CallClaims& claims = backward_claims[tensors.sinks ? 1 : 0];
  BackwardCall call;
  call.dropout = agree_on_call(where, std::move(wrong), tensors.values, claims);
  call.q = rows_of(tensors.q);
  call.k = rows_of(tensors.k);
  call.v = rows_of(tensors.v);
  call.o = rows_of(tensors.o);
  call.lse = rows_of(tensors.lse);
  call.dout = rows_of(tensors.dout);
  call.dq = rows_of(tensors.dq);
  call.dk = rows_of(tensors.dk);
  call.dv = rows_of(tensors.dv);
  call.sinks = numbers_of(tensors.sinks);
  call.dsinks = numbers_of(tensors.dsinks);
  call.adds_dsinks = tensors.adds_dsinks;
  if (detached) call.branches = state->outputs();
  call.stop = &interrupted;
  guard([&] { backward(call); });
}

void RingAttention::Impl::synchronize() {
  guard([&] {
    if (!backend->immediate()) {
      const EventScope waiting(EventKind::wait, "synchronize", rank);
      queue->record().wait();
    }
    link->check();
    check_interrupt();
  });
}

void RingAttention::Impl::use_queue(std::shared_ptr<Queue> other) {
  link->use_queue(other);
  queue = std::move(other);
}

std::int64_t RingAttention::Impl::predicted_forward_bytes() const {
  return key_courier->bytes_sent() + ring::agreement_bytes(transport->size());
}

std::int64_t RingAttention::Impl::predicted_backward_bytes() const {
  if (!options.backward) return 0;
  std::int64_t bytes = ring::agreement_bytes(transport->size());
  if (options.reproducible || travel == Travel::keys) bytes += key_courier->bytes_sent();
  if (query_courier != nullptr) bytes += query_courier->bytes_sent();
  if (returns != nullptr) bytes += returns->bytes_sent();
  return bytes;
}

MemoryInfo RingAttention::Impl::memory_info() const {
  MemoryInfo info;
  info.complexity =
      schedule == Schedule::ring
          ? "O(n/P): fp32 accumulators of the own rows and two slots of travelling rows"
          : "O(n/P + rows needed): fp32 accumulators of the own rows and every needed row of other "
            "ranks";
  info.device = options.device;
  info.workspace_bytes = spare.bytes();
  if (!complaint.empty()) return info;  // there are no plans
  info.communication_bytes = communication_bytes();
  info.state_bytes = engine->state_bytes();
  info.workspace_bytes += info.communication_bytes + info.state_bytes + list_bytes();
  info.scratch_bytes = backend->scratch_bytes();
  return info;
}

}  // namespace annulus
