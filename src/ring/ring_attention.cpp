#include "annulus/ring_attention.h"

#include <array>
#include <exception>
#include <initializer_list>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "annulus/error.h"
#include "annulus/events.h"
#include "ring/executor.h"

namespace annulus {

BranchState::BranchState() = default;
BranchState::~BranchState() = default;
BranchState::BranchState(BranchState&&) noexcept = default;
BranchState& BranchState::operator=(BranchState&&) noexcept = default;

std::string RingAttention::Impl::check_tensor(const char* name, const ConstTensorView& view,
                                              bool heads_of_keys) const {
  const std::int64_t heads = heads_of_keys ? options.kv_heads : options.pattern.heads;
  const std::array<std::int64_t, 4> expected{options.batch, local_tokens(), heads,
                                             options.head_dim};
  if (view.rank != 4 || view.shape != expected) {
    return fmt::format(
        "{} is {}, expected [{}, {}, {}, {}]: placement '{}' gives this rank {} tokens", name,
        shape_string(view), expected[0], expected[1], expected[2], expected[3],
        options.placement.name(), local_tokens());
  }
  if (view.dtype != options.dtype) {
    return fmt::format("{} is {}, expected {}", name, name_of(view.dtype), name_of(options.dtype));
  }
  if (view.device != options.device) {
    return fmt::format("{} is on {}, expected {} like all tensors of this executor", name,
                       name_of(view.device), name_of(options.device));
  }
  if (view.stride[3] != 1 && options.head_dim > 1) {
    return fmt::format("{} has stride {} on its last axis, expected 1: make head_dim contiguous",
                       name, view.stride[3]);
  }
  if (view.data == nullptr && view.elements() > 0)
    return fmt::format("{} has no data (null pointer)", name);
  return "";
}

std::string RingAttention::Impl::check_lse(const ConstTensorView& view) const {
  const std::array<std::int64_t, 4> expected{options.batch, local_tokens(), options.pattern.heads,
                                             0};
  if (view.rank != 3 || view.shape != expected) {
    return fmt::format("lse is {}, expected [{}, {}, {}]: placement '{}' gives this rank {} tokens",
                       shape_string(view), expected[0], expected[1], expected[2],
                       options.placement.name(), local_tokens());
  }
  if (view.dtype != DType::f32) return fmt::format("lse is {}, expected fp32", name_of(view.dtype));
  if (view.device != options.device) {
    return fmt::format("lse is on {}, expected {} like all tensors of this executor",
                       name_of(view.device), name_of(options.device));
  }
  if (view.data == nullptr && view.elements() > 0) return "lse has no data (null pointer)";
  return "";
}

std::string RingAttention::Impl::check_state(const BranchState::Data& state) const {
  if (state.o.bytes() == branch_output_bytes() && state.lse.bytes() == branch_rows() * 4) return "";
  return "the branch state was made by an executor of another shape: make it with this one's "
         "make_branch_state()";
}

namespace {

// Of a result: threads would write its elements over each other's. Of all shapes and strides, this
// is the mistake that an expanded view makes.
std::string check_distinct(const char* name, const ConstTensorView& view) {
  if (view.rank != 3 && view.rank != 4) return "";  // refused anyway
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.stride[axis] != 0 || view.shape[axis] <= 1 || view.elements() == 0) continue;
    return fmt::format("{} has stride 0 on axis {}, expected a tensor whose elements are distinct",
                       name, axis);
  }
  return "";
}

struct Named {
  std::string_view name;
  const ConstTensorView& view;
};

// Rows of a tensor that is read would be overwritten while they are needed.
std::string check_apart(std::initializer_list<Named> results, std::initializer_list<Named> read) {
  for (const Named& result : results) {
    for (const std::initializer_list<Named>& others : {read, results}) {
      for (const Named& other : others) {
        if (result.name == other.name || !share_memory(result.view, other.view)) continue;
        return fmt::format("{} shares memory with {}, expected memory of its own", result.name,
                           other.name);
      }
    }
  }
  return "";
}

TensorRows rows_of(const ConstTensorView& view) {
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  // Kernels write through the same type they read through; what is const stays unwritten by
  // construction.
  auto* base = static_cast<std::byte*>(const_cast<void*>(view.data));
  return {base, view.stride[0] * size, view.stride[2] * size, view.stride[1] * size};
}

Memory borrow(std::span<std::byte> bytes, const Device& device) {
  return {bytes.data(), std::ssize(bytes), device, nullptr};
}

// A call that fails is over: what it and those before it have enqueued touches the caller's tensors
// no more, and the caller may free them.
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

std::string first_of(std::initializer_list<std::string> complaints) {
  for (const std::string& complaint : complaints) {
    if (!complaint.empty()) return complaint;
  }
  return "";
}

}  // namespace

RingAttention::RingAttention(RingOptions options, Transport& transport) {
  const Transport::Use use(transport, "RingAttention");
  try {
    impl_ = std::make_unique<Impl>(std::move(options), transport);
  } catch (const Error&) {
    throw;  // every rank has heard of it, or the transport has ended
  } catch (const std::exception& error) {
    transport.abort(error.what());  // out of memory at the wrong moment: others would wait
    throw;
  }
}
RingAttention::~RingAttention() = default;
RingAttention::RingAttention(RingAttention&&) noexcept = default;
RingAttention& RingAttention::operator=(RingAttention&&) noexcept = default;

void RingAttention::forward(const ConstTensorView& q, const ConstTensorView& k,
                            const ConstTensorView& v, const TensorView& o, const TensorView& lse,
                            BranchState* state) {
  const char* where = "RingAttention::forward";
  const Transport::Use use(*impl_->transport, where);
  EventScope pass(EventKind::pass, "forward", impl_->rank);
  if (event_stream().on()) pass.set_bytes(predicted_forward_bytes());
  const OverOnError over(*impl_);
  const bool keep = impl_->kept != nullptr && state != nullptr && state->data_ != nullptr;
  const Impl::CallClaims& claims = impl_->forward_claims[keep ? 1 : 0];
  std::string complaint =
      first_of({impl_->check_tensor("q", q, false), impl_->check_tensor("k", k, true),
                impl_->check_tensor("v", v, true), impl_->check_tensor("o", o, false),
                impl_->check_lse(lse), check_distinct("o", o), check_distinct("lse", lse),
                keep ? impl_->check_state(*state->data_) : ""});
  if (complaint.empty())
    complaint = check_apart({{"o", o}, {"lse", lse}}, {{"q", q}, {"k", k}, {"v", v}});
  ring::agree(*impl_->transport, where, complaint, claims.claims, claims.digest);
  ForwardCall call;
  call.q = rows_of(q);
  call.k = rows_of(k);
  call.v = rows_of(v);
  call.o = rows_of(o);
  call.lse = rows_of(lse);
  call.stop = &impl_->interrupted;
  if (keep) {
    state->data_->filled = false;
    call.branches = state->data_->outputs();
  }
  impl_->guard([&] { impl_->forward(call); });
  if (keep) state->data_->filled = true;
}

void RingAttention::backward(const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v, const ConstTensorView& o,
                             const ConstTensorView& lse, const ConstTensorView& dout,
                             const TensorView& dq, const TensorView& dk, const TensorView& dv,
                             const BranchState* state) {
  const char* where = "RingAttention::backward";
  const Transport::Use use(*impl_->transport, where);
  EventScope pass(EventKind::pass, "backward", impl_->rank);
  if (event_stream().on()) pass.set_bytes(predicted_backward_bytes());
  const OverOnError over(*impl_);
  const bool detached = impl_->options.mix_gradient == MixGradient::detached;
  const bool have_state = state != nullptr && state->data_ != nullptr;
  std::string complaint = first_of(
      {impl_->options.backward ? "" : "this executor was built with backward = false",
       impl_->check_tensor("q", q, false), impl_->check_tensor("k", k, true),
       impl_->check_tensor("v", v, true), impl_->check_tensor("o", o, false), impl_->check_lse(lse),
       impl_->check_tensor("dout", dout, false), impl_->check_tensor("dq", dq, false),
       impl_->check_tensor("dk", dk, true), impl_->check_tensor("dv", dv, true),
       check_distinct("dq", dq), check_distinct("dk", dk), check_distinct("dv", dv),
       detached && (!have_state || !state->data_->filled)
           ? "mix_gradient detached needs the branch state of forward: make it with "
             "make_branch_state() and pass it to forward and backward"
           : "",
       detached && have_state ? impl_->check_state(*state->data_) : ""});
  if (complaint.empty()) {
    complaint = check_apart({{"dq", dq}, {"dk", dk}, {"dv", dv}},
                            {{"q", q}, {"k", k}, {"v", v}, {"o", o}, {"lse", lse}, {"dout", dout}});
  }
  ring::agree(*impl_->transport, where, complaint, impl_->backward_claims.claims,
              impl_->backward_claims.digest);
  BackwardCall call;
  call.q = rows_of(q);
  call.k = rows_of(k);
  call.v = rows_of(v);
  call.o = rows_of(o);
  call.lse = rows_of(lse);
  call.dout = rows_of(dout);
  call.dq = rows_of(dq);
  call.dk = rows_of(dk);
  call.dv = rows_of(dv);
  if (detached) call.branches = state->data_->outputs();
  call.stop = &impl_->interrupted;
  impl_->guard([&] { impl_->backward(call); });
}

void RingAttention::synchronize() {
  impl_->guard([&] {
    if (!impl_->backend->immediate()) {
      const EventScope waiting(EventKind::wait, "synchronize", impl_->rank);
      impl_->queue->record().wait();
    }
    impl_->link->check();
    impl_->check_interrupt();
  });
}

Queue& RingAttention::queue() { return *impl_->queue; }

void RingAttention::use_queue(std::shared_ptr<Queue> queue) {
  if (queue == nullptr || queue->device() != impl_->options.device) {
    throw ConfigError(ring::prefix(*impl_->transport, "RingAttention::use_queue") +
                      (queue == nullptr
                           ? "no queue"
                           : "the queue is of " + name_of(queue->device()) + ", the executor of " +
                                 name_of(impl_->options.device)));
  }
  impl_->link->use_queue(queue);
  impl_->queue = std::move(queue);
}

void RingAttention::interrupt() noexcept {
  impl_->interrupted.store(true, std::memory_order_relaxed);
}

void RingAttention::refuse(Transport& transport, const std::string& reason) {
  const Transport::Use use(transport, "RingAttention");
  const ring::Claim claim{ring::kTheCall, "refusal of a call"};
  ring::agree(transport, "RingAttention", reason, std::span(&claim, 1));
  throw ConfigError(ring::prefix(transport, "RingAttention") + "refused without a reason");
}

BranchState RingAttention::make_branch_state() const {
  BranchState state;
  state.data_ = std::make_unique<BranchState::Data>();
  state.data_->o = impl_->backend->allocate(impl_->branch_output_bytes(), "branch outputs");
  state.data_->lse = impl_->backend->allocate(branch_state_rows() * 4, "branch log-sum-exps");
  return state;
}

BranchState RingAttention::make_branch_state(std::span<std::byte> o, std::span<float> lse,
                                             bool filled) const {
  BranchState state;
  state.data_ = std::make_unique<BranchState::Data>();
  state.data_->o = borrow(o, impl_->options.device);
  state.data_->lse = borrow(std::as_writable_bytes(lse), impl_->options.device);
  state.data_->filled = filled;
  return state;
}

std::int64_t RingAttention::branch_state_rows() const { return impl_->branch_rows(); }

const RingOptions& RingAttention::options() const { return impl_->options; }
const Plan& RingAttention::plan() const { return *impl_->key_plan; }
const Plan& RingAttention::backward_plan() const {
  if (!impl_->options.backward)
    throw ConfigError("RingAttention::backward_plan: built with backward = false");
  return impl_->travel == Travel::queries ? *impl_->query_plan : *impl_->key_plan;
}
Schedule RingAttention::schedule() const { return impl_->schedule; }
std::string RingAttention::transfers() const { return impl_->link->way(); }
std::string RingAttention::kernels() const { return impl_->engine->kernels(); }

std::int64_t RingAttention::predicted_forward_bytes() const {
  return impl_->key_courier->bytes_sent() + ring::agreement_bytes(impl_->transport->size());
}

std::int64_t RingAttention::predicted_backward_bytes() const {
  if (!impl_->options.backward) return 0;
  std::int64_t bytes = ring::agreement_bytes(impl_->transport->size());
  if (impl_->options.reproducible || impl_->travel == Travel::keys) {
    bytes += impl_->key_courier->bytes_sent();
  }
  if (impl_->query_courier != nullptr) bytes += impl_->query_courier->bytes_sent();
  if (impl_->returns != nullptr) bytes += impl_->returns->bytes_sent();
  return bytes;
}

MemoryInfo RingAttention::memory_info() const {
  MemoryInfo info;
  info.complexity =
      impl_->schedule == Schedule::ring
          ? "O(n/P): fp32 accumulators of the own rows and two slots of travelling rows"
          : "O(n/P + rows needed): fp32 accumulators of the own rows and every needed row of other "
            "ranks";
  info.device = impl_->options.device;
  info.communication_bytes = impl_->communication_bytes();
  info.state_bytes = impl_->engine->state_bytes();
  info.workspace_bytes = info.communication_bytes + info.state_bytes + impl_->list_bytes();
  info.scratch_bytes = impl_->backend->scratch_bytes();
  return info;
}

}  // namespace annulus
