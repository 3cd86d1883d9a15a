#include "ring/executor.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include "annulus/error.h"
#include "pattern/segments.h"
#include "ring/option_check.h"
#include "ring/option_text.h"
#include "ring/plans.h"

namespace annulus {

using ring::Claim;
using ring::Courier;
using ring::ReturnCourier;

RingAttention::Impl::Impl(RingOptions options_in, Transport& transport_in, const RingOptions* whole,
                          bool by_ring)
    : options(std::move(options_in)), transport(&transport_in), rank(transport_in.rank()) {
  past_plans.reserve(kMostPastPlans + 1);  // set_documents must not fail half-way
  const auto agree = [&](std::span<const Claim> claims) {
    ring::agree(*transport, "RingAttention", complaint, claims);
  };

  std::vector<Claim> claims{{ring::kTheCall, "construction of an executor"}};
  attempt([&] {
    // Claims of options come first: a rank that runs out of memory later in this part must not hide
    // that its options differ.
    for (Claim& claim : ring::claims_of(options)) claims.push_back(std::move(claim));
    check_options();
    backend = backend_of(options.device, options.threads);
    make_computation();
    make_plans(whole);
    link = std::make_unique<ring::Link>(*transport, *backend, queue = backend->make_queue());
    make_couriers();
    claims.push_back(
        {"the kind of device", options.device.kind == Device::Kind::cpu ? "cpu" : "cuda"});
    claims.push_back({ring::kScheduleClaim, name_of(schedule)});
    claims.push_back({ring::kTravelClaim, name_of(travel)});
    // Different kernels give different bits.
    if (options.reproducible) claims.push_back({"the kernels", backend->kernels()});
  });
  agree(claims);
  link->connect();
  attempt([&] { check_limits(); });
  if (by_ring && !complaint.empty()) {
    complaint.shortage.emplace();
    complaint.over_limit = true;
  }
  attempt([&] {
    make_engine();
    allocate();
    std::erase_if(claims, [](const Claim& claim) { return ring::depends_on_documents(claim); });
    identity = ring::digest_of(claims);
    make_call_claims();
  });
  finish_enqueued();  // tables on their way: if a rank has failed, their memory goes
  agree({});
}

// Errors that only one rank may have (memory, environment) must be errors on every rank.
void RingAttention::Impl::attempt(FunctionRef<void()> part) {
  if (!complaint.empty()) return;
  complaint = ring::complaint_of(part);
  if (!complaint.shortage || engine == nullptr) return;
  complaint.shortage->needed = communication_bytes() + engine->state_bytes();
  complaint.text += fmt::format("; {} in all", complaint.shortage->needed);
}

void RingAttention::Impl::make_computation() {
  kept.reset();
  computation = ring::computation_of(options, *backend, local_queries(), local_keys());
  if (options.mix_gradient != MixGradient::detached) return;
  kept = std::make_unique<KeptRows>(options.pattern, options.placement, rank, options.batch);
  computation.kept = kept.get();
}

void RingAttention::Impl::set_documents(std::vector<Document> documents) {
  if (complaint.empty() && documents == options.pattern.documents) return;
  // Enqueued work still uses the memory.
  if (!backend->replaces_in_order()) finish_enqueued();
  const SpareMemory::Scope scope(spare, end_of_enqueued());
  engine.reset();
  returns.reset();
  query_courier.reset();
  key_courier.reset();
  if (key_plan != nullptr) {
    past_plans.insert(past_plans.begin(),
                      {std::move(options.pattern.documents),
                       {std::move(key_plan), std::move(query_plan), schedule, travel}});
    if (past_plans.size() > kMostPastPlans) past_plans.pop_back();
  }
  complaint = {};
  options.pattern.documents = std::move(documents);
  attempt([&] {
    // First: a rank that finds no memory later has the same documents as the others all the same.
    make_call_claims();
    check_options();
    make_computation();
    make_plans(nullptr);
    make_call_claims();  // of the schedule and the side that travels, as chosen now
    make_couriers();
    check_limits();
    make_engine();
    allocate();
  });
}

void RingAttention::Impl::make_call_claims() {
  const std::string executor =
      fmt::format("{:x} {} {}", identity, name_of(schedule), name_of(travel));
  const std::string documents = ring::documents_text(options.pattern);
  const auto call = [&](const char* name, const char* state, bool sinks) {
    CallClaims out;
    out.claims = {{ring::kTheCall, name},
                  {ring::kDocumentsClaim, documents},
                  {"the executor (its options differ)", executor},
                  {"whether a branch state is passed", state},
                  {"whether sinks are passed", sinks ? "yes" : "no"}};
    out.fixed = ring::digest_of(out.claims);
    out.with_seed = options.dropout_p != 0;
    out.claims.push_back({"the caller's claims", {}});
    if (out.with_seed) out.claims.push_back({"dropout_seed", {}});
    for (Claim& claim : std::span(out.claims).last(out.with_seed ? 2 : 1))
      claim.value.reserve(CallClaims::kMostShown);
    return out;
  };
  for (const bool sinks : {false, true}) {
    forward_claims[0][sinks] = call("forward", "no", sinks);
    forward_claims[1][sinks] = call("forward", "yes", sinks);
    backward_claims[sinks] = call("backward", "", sinks);
  }
}

RingAttention::Impl::~Impl() {
  finish_enqueued();  // enqueued work still uses the memory
}

Event RingAttention::Impl::end_of_enqueued() noexcept {
  try {
    return queue->record();
  } catch (const std::exception&) {
    return {};  // as in finish_enqueued
  }
}

void RingAttention::Impl::finish_enqueued() noexcept {
  if (link == nullptr) return;
  try {
    link->finish();
  } catch (const std::exception&) {
    // The error was reported earlier, or there is no caller to report it to. The device no longer
    // uses the memory.
  }
}

void RingAttention::Impl::check_options() const {
  ring::check_values(options);
  if (options.placement.ranks() != transport->size()) {
    throw ConfigError(fmt::format("placement '{}' is for {} ranks, the transport has {}",
                                  options.placement.name(), options.placement.ranks(),
                                  transport->size()));
  }
  if (options.keys().ranks() != options.placement.ranks()) {
    throw ConfigError(fmt::format("key_placement '{}' is for {} ranks, expected {} like placement",
                                  options.keys().name(), options.keys().ranks(),
                                  options.placement.ranks()));
  }
  check_documents(options.pattern, options.placement.tokens(), options.keys().tokens());
  if (options.pattern.by_entry() && options.pattern.counted_entries() != options.batch) {
    throw ConfigError(fmt::format("documents are of {} batch entries, batch is {}",
                                  options.pattern.counted_entries(), options.batch));
  }
  // In floating point, and before any integer product: a huge batch must not overflow.
  const auto at_least_one = [](std::int64_t tokens) {
    return static_cast<double>(std::max<std::int64_t>(1, tokens));
  };
  const double elements = static_cast<double>(options.batch) * options.head_dim *
                          (at_least_one(local_queries()) * options.pattern.heads +
                           at_least_one(local_keys()) * 2.0 * options.kv_heads);
  constexpr double kMostElements = 0x1p58;  // their byte counts fit 63 bits
  if (elements > static_cast<double>(options.limits.qkv_elements) || elements > kMostElements) {
    throw ConfigError(
        fmt::format("q, k and v of this rank have {:.0f} elements, limits.qkv_elements allows {}: "
                    "use more ranks or raise the limit",
                    elements, options.limits.qkv_elements));
  }
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;
  const std::int64_t tokens = std::max(options.placement.tokens(), options.keys().tokens());
  if (tokens >= kMaxTokens)
    throw ConfigError(fmt::format("{} tokens, expected fewer than 2^31", tokens));
  for (const Document& document : options.pattern.documents) {
    if (document.length() < kMaxTokens) continue;
    throw ConfigError(
        fmt::format("a document has {} positions, expected fewer than 2^31", document.length()));
  }
}

std::unique_ptr<RingAttention::Impl> RingAttention::Impl::make(RingOptions options,
                                                               Transport& transport,
                                                               const RingOptions* whole,
                                                               bool by_ring) {
  const Transport::Use use(transport, "RingAttention");
  try {
    return std::make_unique<Impl>(std::move(options), transport, whole, by_ring);
  } catch (const Error&) {
    throw;  // known on every rank, or the transport has ended
  } catch (const std::exception& error) {
    transport.abort(error.what());  // out of memory outside attempt(): the other ranks would wait
    throw;
  }
}

void RingAttention::Impl::make_plans(const RingOptions* whole) {
  const auto past = std::find_if(past_plans.begin(), past_plans.end(), [&](const PastPlans& plans) {
    return plans.documents == options.pattern.documents;
  });
  ring::Plans plans;
  if (past != past_plans.end()) {
    plans = std::move(past->plans);
    past_plans.erase(past);
  } else {
    admit(0, "plans");
    RingOptions wanted = options;
    if (whole != nullptr) {
      const ring::Plans of_whole = ring::make_plans(*whole, rank);
      wanted.schedule = of_whole.schedule;
      wanted.backward_travel =
          of_whole.travel == Travel::keys ? BackwardTravel::keys : BackwardTravel::queries;
    }
    plans = ring::make_plans(wanted, rank);
  }
  schedule = plans.schedule;
  travel = plans.travel;
  key_plan = std::move(plans.keys);
  query_plan = std::move(plans.queries);
}

void RingAttention::Impl::make_couriers() {
  const std::int64_t row = options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
  const std::int64_t wide_row = options.head_dim * static_cast<std::int64_t>(sizeof(float));
  const auto layout = [&](const Plan& plan, std::vector<std::int64_t> sections) {
    return ParcelLayout(plan, options.batch, std::move(sections));
  };
  key_courier = std::make_unique<Courier>(*key_plan, layout(*key_plan, {row, row}), *link);
  if (!options.backward) return;
  if (query_plan != nullptr) {
    const std::int64_t statistics_row =
        computation.statistics_width() * static_cast<std::int64_t>(sizeof(float));
    query_courier = std::make_unique<Courier>(
        *query_plan, layout(*query_plan, {row, row, statistics_row}), *link);
  }
  if (options.reproducible) return;
  returns = travel == Travel::keys ? std::make_unique<ReturnCourier>(
                                         *key_plan, layout(*key_plan, {wide_row, wide_row}), *link)
                                   : std::make_unique<ReturnCourier>(
                                         *query_plan, layout(*query_plan, {wide_row}), *link);
}

std::int64_t RingAttention::Impl::communication_bytes() const {
  std::int64_t bytes = key_courier->buffer_bytes();
  if (query_courier != nullptr) bytes += query_courier->buffer_bytes();
  if (returns != nullptr) bytes += returns->buffer_bytes();
  return bytes;
}

std::int64_t RingAttention::Impl::list_bytes() const {
  std::int64_t bytes = engine->list_bytes() + key_courier->list_bytes();
  if (query_courier != nullptr) bytes += query_courier->list_bytes();
  if (returns != nullptr) bytes += returns->list_bytes();
  if (kept != nullptr) bytes += kept->bytes();
  return bytes;
}

void RingAttention::Impl::check_limits() const {
  const std::int64_t bytes = communication_bytes();
  if (bytes > options.limits.communication_bytes) {
    throw ConfigError(
        fmt::format("communication buffers of this rank need {} bytes, limits.communication_bytes "
                    "allows {}: use schedule ring, more "
                    "ranks, or raise the limit",
                    bytes, options.limits.communication_bytes));
  }
}

void RingAttention::Impl::make_engine() {
  std::vector<Stage> forward;
  std::vector<Stage> backward;
  const auto stage = [&](Stage::Kind kind, const Plan& plan, int first, int last) {
    return Stage{kind, &plan, first, last};
  };
  if (options.reproducible) {
    forward.push_back(stage(Stage::Kind::forward, *key_plan, 0, key_plan->steps()));
    if (options.backward) {
      backward.push_back(stage(Stage::Kind::query_gradient, *key_plan, 0, key_plan->steps()));
      backward.push_back(stage(Stage::Kind::key_gradient, *query_plan, 0, query_plan->steps()));
    }
  } else {
    for (int s = 0; s <= key_plan->steps(); ++s)
      forward.push_back(stage(Stage::Kind::forward, *key_plan, s, s));
    const Plan& plan = travel == Travel::keys ? *key_plan : *query_plan;
    for (int s = 0; options.backward && s <= plan.steps(); ++s)
      backward.push_back(stage(Stage::Kind::gradients, plan, s, s));
  }
  engine = backend->compile(computation, forward, backward);
}

void RingAttention::Impl::allocate() {
  key_courier->allocate();
  if (query_courier != nullptr) query_courier->allocate();
  if (returns != nullptr) returns->allocate();
  ReceivedRows received;
  received.keys = key_courier->received();
  if (query_courier != nullptr) received.queries = query_courier->received();
  if (returns != nullptr) received.gradients = returns->gradients();
  engine->allocate(received, *queue);
}

}  // namespace annulus
