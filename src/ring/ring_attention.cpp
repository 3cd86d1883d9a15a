#include "annulus/ring_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "annulus/error.h"
#include "ring/agreement.h"
#include "ring/executor.h"
#include "ring/schedule.h"

namespace annulus {

using ring::Courier;
using ring::ParcelShape;
using ring::ReturnCourier;
using ring::Work;
using ring::WorkKind;

BranchState::BranchState() = default;
BranchState::~BranchState() = default;
BranchState::BranchState(BranchState&&) noexcept = default;
BranchState& BranchState::operator=(BranchState&&) noexcept = default;

RingAttention::Impl::Impl(RingOptions options_in, Transport& transport_in)
    : options(std::move(options_in)),
      transport(&transport_in),
      pool(options.pool != nullptr ? options.pool : ThreadPool::shared()),
      kernels(&cpu::chosen_kernels()),
      rank(transport_in.rank()) {
  std::string complaint;
  std::uint64_t pattern_digest = 0;
  try {
    check_options();
    scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(options.head_dim)));
    make_plans();
    make_couriers();
    check_limits();
    pattern_digest = key_plan->digest();
  } catch (const ConfigError& error) {
    complaint = error.what();
  }
  const auto number = [](auto value) { return static_cast<std::uint64_t>(value); };
  const std::initializer_list<ring::Claim> claims = {
      {ring::kTheCall, 0},
      {"batch", number(options.batch)},
      {"kv_heads", number(options.kv_heads)},
      {"head_dim", number(options.head_dim)},
      {"dtype", number(options.dtype)},
      {"scale", std::bit_cast<std::uint64_t>(scale)},
      {"pattern, placement or schedule", pattern_digest},
      {"mix_gradient", number(options.mix_gradient)},
      {"reproducible", number(options.reproducible)},
      {"backward", number(options.backward)},
      {"which rows travel in backward", number(travel)}};
  ring::agree(*transport, "RingAttention", complaint, claims);
  for (const ring::Claim& claim : claims) identity = (identity ^ claim.value) * 0x100000001b3U;
  // What only one rank may fail at (memory) is again everybody's error.
  std::exception_ptr failure;
  try {
    make_work();
    allocate();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    complaint = error.what();
  }
  try {
    ring::agree(*transport, "RingAttention", complaint, {});
  } catch (const ConfigError&) {
    if (failure != nullptr) std::rethrow_exception(failure);
    throw;
  }
}

void RingAttention::Impl::check_options() const {
  options.pattern.validate();
  if (options.placement.ranks() != transport->size()) {
    throw ConfigError(fmt::format("placement '{}' is for {} ranks, the transport has {}",
                                  options.placement.name(), options.placement.ranks(),
                                  transport->size()));
  }
  if (options.batch < 1)
    throw ConfigError(fmt::format("batch is {}, expected at least 1", options.batch));
  if (options.kv_heads < 1 || options.pattern.heads % options.kv_heads != 0) {
    throw ConfigError(fmt::format("kv_heads is {}, expected a divisor of the {} query heads",
                                  options.kv_heads, options.pattern.heads));
  }
  if (options.head_dim < 8 || options.head_dim > cpu::kMaxHeadDim || options.head_dim % 8 != 0) {
    throw ConfigError(fmt::format(
        "head_dim is {}, expected a multiple of 8 from 8 to {}: pad the heads with zeros",
        options.head_dim, cpu::kMaxHeadDim));
  }
  if (options.scale.has_value() && !(std::isfinite(*options.scale) && *options.scale > 0)) {
    throw ConfigError(fmt::format("scale is {}, expected a finite number above 0", *options.scale));
  }
  if (options.reproducible && options.schedule == Schedule::ring) {
    throw ConfigError(
        "reproducible needs every row's keys in one order: use schedule gather or auto instead of "
        "ring");
  }
  // In floating point, and before anything is multiplied out in integers: a huge batch must not
  // wrap.
  const double elements = static_cast<double>(options.batch) * static_cast<double>(local_tokens()) *
                          (options.pattern.heads + 2.0 * options.kv_heads) * options.head_dim;
  constexpr double kMostElements = 0x1p58;  // of which byte counts still fit 63 bits
  if (elements > static_cast<double>(options.limits.qkv_elements) || elements > kMostElements) {
    throw ConfigError(
        fmt::format("q, k and v of this rank have {:.0f} elements, limits.qkv_elements allows {}: "
                    "use more ranks or raise the limit",
                    elements, options.limits.qkv_elements));
  }
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;
  if (options.placement.tokens() >= kMaxTokens) {
    throw ConfigError(
        fmt::format("{} tokens, expected fewer than 2^31", options.placement.tokens()));
  }
}

void RingAttention::Impl::make_plans() {
  const auto plan = [&](Schedule s, Travel t) {
    return std::make_unique<Plan>(
        PlanOptions{options.pattern, options.placement, options.placement, options.kv_heads, s, t},
        rank);
  };
  const auto element = static_cast<std::int64_t>(size_of(options.dtype));
  const std::int64_t key_bytes = options.batch * options.head_dim * 2 * element;
  if (options.reproducible) {
    schedule = Schedule::gather;
    key_plan = plan(schedule, Travel::keys);
  } else if (options.schedule != Schedule::automatic) {
    schedule = options.schedule;
    key_plan = plan(schedule, Travel::keys);
  } else {
    key_plan = plan(Schedule::ring, Travel::keys);
    schedule = ring::choose_schedule(*key_plan, options, key_bytes);
    if (schedule == Schedule::gather) {
      key_plan = std::make_unique<Plan>(key_plan->with_schedule(schedule));
    }
  }
  if (!options.backward) return;
  if (options.reproducible) {
    query_plan = plan(schedule, Travel::queries);
    return;
  }
  if (options.backward_travel == BackwardTravel::keys || transport->size() == 1) return;
  // Per row and visit: K and V there, fp32 dK and dV back; or Q, dO and statistics there, fp32 dQ
  // back.
  query_plan = plan(schedule, Travel::queries);
  const auto total = [&](const Plan& p, std::int64_t row) {
    return static_cast<double>(p.total_unit_rows()) * static_cast<double>(row);
  };
  const double keys = total(*key_plan, 2 * options.head_dim * (element + 4));
  const double queries = total(
      *query_plan, 2 * options.head_dim * element + 4 * (1 + deltas()) + 4 * options.head_dim);
  if (options.backward_travel == BackwardTravel::queries || queries < keys) {
    travel = Travel::queries;
  } else {
    query_plan.reset();
  }
}

void RingAttention::Impl::make_couriers() {
  const std::int64_t row = options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
  const std::int64_t wide_row = options.head_dim * static_cast<std::int64_t>(sizeof(float));
  key_courier =
      std::make_unique<Courier>(*key_plan, ParcelShape(*key_plan, options.batch, {row, row}));
  if (!options.backward) return;
  if (query_plan != nullptr) {
    const std::int64_t statistics_row = (1 + deltas()) * static_cast<std::int64_t>(sizeof(float));
    query_courier = std::make_unique<Courier>(
        *query_plan, ParcelShape(*query_plan, options.batch, {row, row, statistics_row}));
  }
  if (options.reproducible) return;
  if (travel == Travel::keys) {
    returns = std::make_unique<ReturnCourier>(
        *key_plan, ParcelShape(*key_plan, options.batch, {wide_row, wide_row}));
  } else {
    returns = std::make_unique<ReturnCourier>(*query_plan,
                                              ParcelShape(*query_plan, options.batch, {wide_row}));
  }
}

void RingAttention::Impl::check_limits() const {
  std::int64_t bytes = key_courier->buffer_bytes();
  if (query_courier != nullptr) bytes += query_courier->buffer_bytes();
  if (returns != nullptr) bytes += returns->buffer_bytes();
  if (bytes > options.limits.communication_bytes) {
    throw ConfigError(
        fmt::format("communication buffers of this rank need {} bytes, limits.communication_bytes "
                    "allows {}: use schedule ring, more "
                    "ranks, or raise the limit",
                    bytes, options.limits.communication_bytes));
  }
}

void RingAttention::Impl::make_work() {
  const int threads = pool->threads();
  const auto work = [&](const Plan& plan, int first, int last, WorkKind kind) {
    return Work(plan, first, last, kind, options.mix_gradient == MixGradient::full, options.batch,
                options.head_dim, threads);
  };
  if (options.reproducible) {
    forward_work.push_back(work(*key_plan, 0, key_plan->steps(), WorkKind::forward));
    if (options.backward) {
      backward_work.push_back(work(*key_plan, 0, key_plan->steps(), WorkKind::query_gradient));
      backward_work.push_back(work(*query_plan, 0, query_plan->steps(), WorkKind::key_gradient));
    }
  } else {
    for (int s = 0; s <= key_plan->steps(); ++s)
      forward_work.push_back(work(*key_plan, s, s, WorkKind::forward));
    const Plan& plan = travel == Travel::keys ? *key_plan : *query_plan;
    for (int s = 0; options.backward && s <= plan.steps(); ++s) {
      backward_work.push_back(work(plan, s, s, WorkKind::gradients));
    }
  }
  std::size_t passes = 0;
  std::size_t longest = 0;
  for (const Work& w : forward_work) {
    passes += w.phases().size();
    longest = std::max(longest, w.longest_run_list());
  }
  for (const Work& w : backward_work) longest = std::max(longest, w.longest_run_list());
  every_row_attends = true;
  for (int h = 0; h < options.pattern.heads; ++h) {
    const auto& branches = options.pattern.branches;
    every_row_attends =
        every_row_attends && std::any_of(branches.begin(), branches.end(), [&](const Branch& b) {
          return b.dilation == 1 && b.offset[static_cast<std::size_t>(h)] == 0;
        });
  }
  // A scaled 16-bit output would be rounded twice.
  direct_output = passes <= 1 && (wide() || options.pattern.output_scale == 1.0);
  runs.resize(static_cast<std::size_t>(threads));
  for (Runs& r : runs) {
    r.queries.reserve(longest);
    r.keys.reserve(longest);
  }
}

void RingAttention::Impl::allocate() {
  const std::int64_t query_bytes = query_rows() * options.head_dim * 4;
  const std::int64_t key_bytes = key_rows() * options.head_dim * 4;
  key_courier->allocate();
  if (query_courier != nullptr) query_courier->allocate();
  if (returns != nullptr) returns->allocate();
  if (!wide() && (!direct_output || options.backward))
    wide_queries = ring::Buffer(query_bytes, "fp32 accumulators");
  if (!options.backward) return;
  if (!wide()) {
    wide_keys = ring::Buffer(key_bytes, "fp32 gradients of k");
    wide_values = ring::Buffer(key_bytes, "fp32 gradients of v");
  }
  statistics = ring::Buffer(query_rows() * (1 + deltas()) * 4, "row statistics");
}

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
  if (view.data == nullptr && view.elements() > 0) return "lse has no data (null pointer)";
  return "";
}

std::string RingAttention::Impl::check_state(const BranchState::Data& state) const {
  if (state.o.bytes() == branch_rows() * options.head_dim * 4 &&
      state.lse.bytes() == branch_rows() * 4)
    return "";
  return "the branch state was made by an executor of another shape: make it with this one's "
         "make_branch_state()";
}

cpu::Problem RingAttention::Impl::problem() const {
  return {options.dtype, options.head_dim, static_cast<float>(scale), options.pattern.causal};
}

ring::LocalRows RingAttention::Impl::rows_of(const ConstTensorView& view) {
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  // Kernels write through the same type they read through; what is const stays unwritten by
  // construction.
  auto* base = static_cast<std::byte*>(const_cast<void*>(view.data));
  return {base, view.stride[0] * size, view.stride[2] * size, view.stride[1] * size};
}

ring::LocalRows RingAttention::Impl::rows_of(const float* base, int heads,
                                             std::int64_t width) const {
  const std::int64_t row = width * 4;
  auto* bytes = reinterpret_cast<std::byte*>(const_cast<float*>(base));
  return {bytes, local_tokens() * heads * row, row, heads * row};
}

void RingAttention::Impl::for_each_token(FunctionRef<void(std::int64_t, std::int64_t)> body) const {
  constexpr std::int64_t kTokens = 256;
  const std::int64_t blocks = (local_tokens() + kTokens - 1) / kTokens;
  pool->run_parallel(options.batch * blocks, [&](std::int64_t index, int) {
    const std::int64_t first = index % blocks * kTokens;
    for (std::int64_t t = first; t < std::min(local_tokens(), first + kTokens); ++t)
      body(index / blocks, t);
  });
}

void RingAttention::Impl::guard(FunctionRef<void()> pass) {
  try {
    pass();
  } catch (const std::exception& error) {
    key_courier->cancel();
    if (query_courier != nullptr) query_courier->cancel();
    if (returns != nullptr) returns->cancel();
    transport->abort(error.what());  // the others would wait for rows that never come
    throw;
  }
}

void RingAttention::Impl::check_interrupt() const {
  if (interrupted.load(std::memory_order_relaxed))
    throw Interrupted(ring::prefix(*transport, "RingAttention") + "interrupted");
}

namespace {

// Marks the executor as in use. The flag is cleared on every way out.
class InUse {
 public:
  InUse(std::atomic_flag& flag, const Transport& transport, const char* where) : flag_(flag) {
    if (flag_.test_and_set(std::memory_order_acquire)) {
      throw ConfigError(ring::prefix(transport, where) +
                        "this executor is already running in another thread: use one executor per "
                        "concurrent caller");
    }
  }
  ~InUse() { flag_.clear(std::memory_order_release); }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic_flag& flag_;
};

std::string first_of(std::initializer_list<std::string> complaints) {
  for (const std::string& complaint : complaints) {
    if (!complaint.empty()) return complaint;
  }
  return "";
}

}  // namespace

RingAttention::RingAttention(RingOptions options, Transport& transport)
    : impl_(std::make_unique<Impl>(std::move(options), transport)) {}
RingAttention::~RingAttention() = default;
RingAttention::RingAttention(RingAttention&&) noexcept = default;
RingAttention& RingAttention::operator=(RingAttention&&) noexcept = default;

void RingAttention::forward(const ConstTensorView& q, const ConstTensorView& k,
                            const ConstTensorView& v, const TensorView& o, const TensorView& lse,
                            BranchState* state) {
  const char* where = "RingAttention::forward";
  const InUse in_use(impl_->busy, *impl_->transport, where);
  const bool keep = state != nullptr && state->data_ != nullptr;
  ring::agree(*impl_->transport, where,
              first_of({impl_->check_tensor("q", q, false), impl_->check_tensor("k", k, true),
                        impl_->check_tensor("v", v, true), impl_->check_tensor("o", o, false),
                        impl_->check_lse(lse), keep ? impl_->check_state(*state->data_) : ""}),
              {{ring::kTheCall, 1},
               {"the executor: its options differ", impl_->identity},
               {"whether a branch state is passed", keep ? 1U : 0U}});
  impl_->guard([&] { impl_->forward(q, k, v, o, lse, keep ? state->data_.get() : nullptr); });
}

void RingAttention::backward(const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v, const ConstTensorView& o,
                             const ConstTensorView& lse, const ConstTensorView& dout,
                             const TensorView& dq, const TensorView& dk, const TensorView& dv,
                             const BranchState* state) {
  const char* where = "RingAttention::backward";
  const InUse in_use(impl_->busy, *impl_->transport, where);
  const bool detached = impl_->options.mix_gradient == MixGradient::detached;
  const bool have_state = state != nullptr && state->data_ != nullptr;
  ring::agree(
      *impl_->transport, where,
      first_of({impl_->options.backward ? "" : "this executor was built with backward = false",
                impl_->check_tensor("q", q, false), impl_->check_tensor("k", k, true),
                impl_->check_tensor("v", v, true), impl_->check_tensor("o", o, false),
                impl_->check_lse(lse), impl_->check_tensor("dout", dout, false),
                impl_->check_tensor("dq", dq, false), impl_->check_tensor("dk", dk, true),
                impl_->check_tensor("dv", dv, true),
                detached && (!have_state || !state->data_->filled)
                    ? "mix_gradient detached needs the branch state of forward: make it with "
                      "make_branch_state() and pass it to forward and backward"
                    : "",
                detached && have_state ? impl_->check_state(*state->data_) : ""}),
      {{ring::kTheCall, 2}, {"the executor: its options differ", impl_->identity}});
  impl_->guard([&] {
    impl_->backward(q, k, v, o, lse, dout, dq, dk, dv, detached ? state->data_.get() : nullptr);
  });
}

void RingAttention::interrupt() noexcept {
  impl_->interrupted.store(true, std::memory_order_relaxed);
}

void RingAttention::refuse(Transport& transport, const std::string& reason) {
  ring::agree(transport, "RingAttention", reason, {});
  throw ConfigError(ring::prefix(transport, "RingAttention") + "refused without a reason");
}

BranchState RingAttention::make_branch_state() const {
  BranchState state;
  state.data_ = std::make_unique<BranchState::Data>();
  state.data_->o =
      ring::Buffer(branch_state_rows() * impl_->options.head_dim * 4, "branch outputs");
  state.data_->lse = ring::Buffer(branch_state_rows() * 4, "branch log-sum-exps");
  return state;
}

BranchState RingAttention::make_branch_state(std::span<float> o, std::span<float> lse,
                                             bool filled) const {
  BranchState state;
  state.data_ = std::make_unique<BranchState::Data>();
  state.data_->o = ring::Buffer(o);
  state.data_->lse = ring::Buffer(lse);
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
std::string RingAttention::isa() const { return impl_->kernels->name; }

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
  info.communication_bytes = impl_->key_courier->buffer_bytes();
  if (impl_->query_courier != nullptr)
    info.communication_bytes += impl_->query_courier->buffer_bytes();
  if (impl_->returns != nullptr) info.communication_bytes += impl_->returns->buffer_bytes();
  info.state_bytes = impl_->wide_queries.bytes() + impl_->wide_keys.bytes() +
                     impl_->wide_values.bytes() + impl_->statistics.bytes();
  info.workspace_bytes = info.communication_bytes + info.state_bytes;
  for (const Work& work : impl_->forward_work) info.workspace_bytes += work.bytes();
  for (const Work& work : impl_->backward_work) info.workspace_bytes += work.bytes();
  info.scratch_bytes =
      static_cast<std::int64_t>(ThreadPool::kScratchBytes) * impl_->pool->threads();
  return info;
}

}  // namespace annulus
