#include "annulus/ring_attention.h"

#include <optional>
#include <utility>

#include "annulus/error.h"
#include "core/caches.h"
#include "ring/executor.h"
#include "ring/pieces.h"

namespace annulus {

BranchState::BranchState() = default;
BranchState::~BranchState() = default;
BranchState::BranchState(BranchState&&) noexcept = default;
BranchState& BranchState::operator=(BranchState&&) noexcept = default;

namespace {

Memory borrow(std::span<std::byte> bytes, const Device& device) {
  return {bytes.data(), std::ssize(bytes), device, nullptr};
}

ring::CallValues values_of(const OptionalInputs& more) {
  ring::CallValues values{std::nullopt, more.dropout_seed_of_rank_0, more.claims};
  if (more.dropout_seed.has_value()) values.dropout = DropoutSeed{.seed = *more.dropout_seed};
  return values;
}

}  // namespace

RingAttention::RingAttention(RingOptions options, Transport& transport)
    : pieces_(std::make_unique<Pieces>(std::move(options), transport)) {}
RingAttention::~RingAttention() = default;
RingAttention::RingAttention(RingAttention&&) noexcept = default;
RingAttention& RingAttention::operator=(RingAttention&&) noexcept = default;

void RingAttention::set_documents(std::vector<Document> documents) {
  pieces_->set_documents(std::move(documents));
}

void RingAttention::forward(const ConstTensorView& q, const ConstTensorView& k,
                            const ConstTensorView& v, const TensorView& o, const TensorView& lse,
                            BranchState* state, const OptionalInputs& more) {
  BranchState::Data* const data = state == nullptr ? nullptr : state->data_.get();
  const ring::ForwardTensors tensors{q, k, v, o, lse, more.sinks, values_of(more)};
  pieces_->run(tensors, data);
}

void RingAttention::backward(const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v, const ConstTensorView& o,
                             const ConstTensorView& lse, const ConstTensorView& dout,
                             const TensorView& dq, const TensorView& dk, const TensorView& dv,
                             const BranchState* state, const OptionalInputs& more,
                             const OptionalGradients& gradients) {
  const BranchState::Data* const data = state == nullptr ? nullptr : state->data_.get();
  const ring::BackwardTensors tensors{
      q, k, v, o, lse, dout, dq, dk, dv, more.sinks, gradients.sinks, values_of(more)};
  pieces_->run(tensors, data);
}

void RingAttention::synchronize() { pieces_->synchronize(); }

Queue& RingAttention::queue() { return *pieces_->queue; }

void RingAttention::use_queue(std::shared_ptr<Queue> queue) {
  const Device& device = options().device;
  if (queue == nullptr || queue->device() != device) {
    throw ConfigError(std::string("RingAttention::use_queue: ") +
                      (queue == nullptr ? "no queue"
                                        : "the queue is of " + name_of(queue->device()) +
                                              ", the executor of " + name_of(device)));
  }
  pieces_->use_queue(std::move(queue));
}

void RingAttention::interrupt() noexcept { pieces_->interrupt(); }

void RingAttention::refuse(Transport& transport, const std::string& reason) {
  const Transport::Use use(transport, "RingAttention");
  const ring::Claim claim{ring::kTheCall, "refusal of a call"};
  ring::agree(transport, "RingAttention", reason, std::span(&claim, 1));
  throw ConfigError(ring::prefix(transport, "RingAttention") + "refused without a reason");
}

BranchState RingAttention::make_branch_state() const {
  const std::int64_t outputs = branch_state_rows() * options().head_dim *
                               static_cast<std::int64_t>(size_of(options().dtype));
  BranchState state;
  state.data_ = std::make_unique<BranchState::Data>();
  Backend& backend = *pieces_->backend;
  with_caches_dropped([&] {
    state.data_->o = backend.allocate(outputs, "branch outputs");
    state.data_->lse = backend.allocate(branch_state_rows() * 4, "branch log-sum-exps");
  });
  return state;
}

BranchState RingAttention::make_branch_state(std::span<std::byte> o, std::span<float> lse,
                                             bool filled) const {
  BranchState state;
  state.data_ = std::make_unique<BranchState::Data>();
  state.data_->o = borrow(o, options().device);
  state.data_->lse = borrow(std::as_writable_bytes(lse), options().device);
  state.data_->filled = filled;
  return state;
}

std::int64_t RingAttention::branch_state_rows() const { return pieces_->branch_rows(); }

const RingOptions& RingAttention::options() const { return pieces_->options; }
const Plan& RingAttention::plan() const { return *pieces_->current().key_plan; }
const Plan& RingAttention::backward_plan() const {
  if (!options().backward)
    throw ConfigError("RingAttention::backward_plan: built with backward = false");
  const Impl& impl = pieces_->current();
  return impl.travel == Travel::queries ? *impl.query_plan : *impl.key_plan;
}
Schedule RingAttention::schedule() const { return pieces_->current().schedule; }
std::string RingAttention::transfers() const { return pieces_->current().link->way(); }
std::string RingAttention::kernels() const { return pieces_->current().engine->kernels(); }
const std::string& RingAttention::recovery() const { return pieces_->recovery; }

std::int64_t RingAttention::predicted_forward_bytes() const {
  return pieces_->predicted_forward_bytes();
}

std::int64_t RingAttention::predicted_backward_bytes() const {
  return pieces_->predicted_backward_bytes();
}

MemoryInfo RingAttention::memory_info() const { return pieces_->memory_info(); }

}  // namespace annulus
