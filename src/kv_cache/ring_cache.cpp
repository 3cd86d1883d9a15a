#include "kv_cache/ring_cache.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include "annulus/error.h"
#include "annulus/events.h"
#include "kernels/head_dim.h"
#include "ring/option_text.h"
#include "ring/tensor_check.h"

namespace annulus {
namespace {

using ring::Claim;

void check_values(const CacheOptions& options) {
  const auto at_least_one = [](const char* name, std::int64_t value) {
    if (value < 1) throw ConfigError(fmt::format("{} is {}, expected at least 1", name, value));
  };
  at_least_one("batch", options.batch);
  at_least_one("capacity", options.capacity);
  at_least_one("block", options.block);
  at_least_one("heads", options.heads);
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;
  if (options.capacity >= kMostTokens || options.block >= kMostTokens) {
    throw ConfigError(fmt::format("capacity is {} and block {}, expected fewer than 2^31",
                                  options.capacity, options.block));
  }
  if (options.kv_heads < 1 || options.heads % options.kv_heads != 0) {
    throw ConfigError(fmt::format("kv_heads is {}, expected a divisor of the {} query heads",
                                  options.kv_heads, options.heads));
  }
  constexpr int kMostShared = 1024;  // whose queries a task has at a time
  if (options.heads / options.kv_heads > kMostShared) {
    throw ConfigError(fmt::format("{} query heads share a K/V head, expected {} or fewer",
                                  options.heads / options.kv_heads, kMostShared));
  }
  if (options.head_dim < 1 || options.head_dim > kMaxHeadDim) {
    throw ConfigError(
        fmt::format("head_dim is {}, expected 1 to {}", options.head_dim, kMaxHeadDim));
  }
  if (options.threads < 0)
    throw ConfigError(fmt::format("threads is {}, expected 0 (all) or more", options.threads));
  const Window& window = options.window;
  if (window.before < -1 || window.after < -1 || (options.causal && window.after > 0)) {
    throw ConfigError(
        fmt::format("window is ({}, {}), expected -1 (no limit) or more, and for a causal cache "
                    "nothing after",
                    window.before, window.after));
  }
  if (options.scale.has_value() &&
      !(std::isfinite(static_cast<float>(*options.scale)) && *options.scale > 0)) {
    throw ConfigError(
        fmt::format("scale is {}, expected a number above 0 that fp32 can hold", *options.scale));
  }
}

double scale_of(const CacheOptions& options) {
  return options.scale.value_or(1.0 / std::sqrt(static_cast<double>(options.head_dim)));
}

std::vector<Claim> claims_of(const CacheOptions& options) {
  using ring::text_of;
  return {{ring::kTheCall, "construction of a cache"},
          {"batch", text_of(options.batch)},
          {"capacity", text_of(options.capacity)},
          {"heads", text_of(options.heads)},
          {"kv_heads", text_of(options.kv_heads)},
          {"head_dim", text_of(options.head_dim)},
          {"dtype", text_of(options.dtype)},
          {"scale", text_of(scale_of(options))},
          {"causal", text_of(options.causal)},
          {"window", fmt::format("({}, {})", options.window.before, options.window.after)},
          {"block", text_of(options.block)},
          {"the kind of device", options.device.kind == Device::Kind::cpu ? "cpu" : "cuda"}};
}

}  // namespace

RingCache::Impl::Impl(CacheOptions options_in, Transport& transport_in)
    : options(std::move(options_in)),
      transport(&transport_in),
      rank(transport_in.rank()),
      ranks(transport_in.size()) {
  const char* where = "RingCache";
  option_claims = claims_of(options);
  identity = fmt::format("{:x}", ring::digest_of(option_claims));
  const ring::Complaint values_complaint = ring::complaint_of([&] {
    check_values(options);
    sequences.emplace(options, ranks);
    backend = backend_of(options.device, options.threads);
    link = std::make_unique<ring::Link>(*transport, *backend, queue = backend->make_queue());
  });
  ring::agree(*transport, where, values_complaint, option_claims);
  link->connect();
  const ring::Complaint memory_complaint = ring::complaint_of([&] {
    CacheShape shape;
    shape.dtype = options.dtype;
    shape.head_dim = options.head_dim;
    shape.heads = options.heads;
    shape.kv_heads = options.kv_heads;
    shape.scale = scale_of(options);
    shape.ranks = ranks;
    kernels = backend->cache_kernels(shape);
    const int padded = padded_head_dim(options.head_dim);
    // In floating point first: a huge cache must not wrap.
    const double bytes = static_cast<double>(options.batch) * options.kv_heads *
                         static_cast<double>(sequences->ring_rows()) * padded *
                         static_cast<double>(size_of(options.dtype));
    if (bytes > 0x1p60) throw ConfigError(fmt::format("K of this rank would have {} bytes", bytes));
    for (Memory* memory : {&keys, &values}) {
      *memory = backend->allocate(static_cast<std::int64_t>(bytes), "cached keys and values");
      // Otherwise rows are never read before they are written.
      if (padded != options.head_dim) backend->clear(memory->data(), memory->bytes(), *queue);
    }
  });
  ring::agree(*transport, where, memory_complaint, {});
}

RingCache::Impl::~Impl() { finish(); }  // memory outlives the work that uses it

void RingCache::Impl::finish() noexcept {
  if (link == nullptr) return;
  try {
    link->finish();
  } catch (const std::exception&) {
    // The device failed and was reported, or nobody asked; it uses the memory no more.
  }
}

std::vector<std::int64_t> RingCache::Impl::counts_of(std::int64_t rows,
                                                     const NewTokens& tokens) const {
  const auto batch = static_cast<std::size_t>(options.batch);
  if (tokens.placement) {
    if (tokens.placement->ranks() != ranks) {
      throw ConfigError(fmt::format("placement '{}' is for {} ranks, the transport has {}",
                                    tokens.placement->name(), tokens.placement->ranks(), ranks));
    }
    rows = tokens.placement->tokens();
  }
  if (tokens.counts.empty()) return std::vector<std::int64_t>(batch, rows);
  if (tokens.counts.size() != batch) {
    throw ConfigError(fmt::format("{} numbers of new tokens, expected {}: one for every entry",
                                  tokens.counts.size(), batch));
  }
  for (std::size_t entry = 0; entry < batch; ++entry) {
    if (tokens.counts[entry] >= 0 && tokens.counts[entry] <= rows) continue;
    throw ConfigError(
        fmt::format("entry {} has {} new tokens, expected 0 to the {} tokens of this call", entry,
                    tokens.counts[entry], rows));
  }
  return {tokens.counts.begin(), tokens.counts.end()};
}

std::string RingCache::Impl::tensor_complaint(const std::optional<Keys>& key_tensors,
                                              const std::optional<Queries>& query_tensors,
                                              const NewTokens& tokens) const {
  const ConstTensorView& first = key_tensors ? key_tensors->k : query_tensors->q;
  std::int64_t rows = first.rank == 4 ? first.shape[1] : 0;
  std::string why = "new tokens are on the second axis";
  if (tokens.placement) {
    rows = tokens.placement->local_tokens(rank);
    why = fmt::format("placement '{}' gives this rank {} tokens", tokens.placement->name(), rows);
  }
  const auto tensor = [&](const char* name, const ConstTensorView& view, int heads) {
    return ring::complaint_about(
        name, view,
        {4, {options.batch, rows, heads, options.head_dim}, options.dtype, options.device, why});
  };
  std::vector<std::string> complaints;
  std::vector<ring::NamedTensor> read;
  if (key_tensors) {
    complaints.push_back(tensor("k", key_tensors->k, options.kv_heads));
    complaints.push_back(tensor("v", key_tensors->v, options.kv_heads));
    read.push_back({"k", key_tensors->k});
    read.push_back({"v", key_tensors->v});
  }
  if (query_tensors) {
    const Queries& t = *query_tensors;
    complaints.push_back(tensor("q", t.q, options.heads));
    complaints.push_back(tensor("o", t.o, options.heads));
    complaints.push_back(ring::complaint_about(
        "lse", t.lse, {3, {options.batch, rows, options.heads}, DType::f32, options.device, why}));
    if (t.sinks) {
      complaints.push_back(ring::complaint_about(
          "sinks", *t.sinks,
          {1, {options.heads}, DType::f32, options.device, "one number per query head"}));
    }
    complaints.push_back(ring::check_distinct("o", t.o));
    complaints.push_back(ring::check_distinct("lse", t.lse));
    read.push_back({"q", t.q});
    if (t.sinks) read.push_back({"sinks", *t.sinks});
  }
  for (const std::string& complaint : complaints)
    if (!complaint.empty()) return complaint;
  if (!query_tensors) return "";
  const ring::NamedTensor written[] = {{"o", query_tensors->o}, {"lse", query_tensors->lse}};
  return ring::check_apart(written, read);
}

std::vector<Claim> RingCache::Impl::claims(const char* where,
                                           const std::vector<std::int64_t>& counts,
                                           const NewTokens& tokens, bool sinks) const {
  return {{ring::kTheCall, where},
          {"the cache (its options differ)", identity},
          {"the entries' lengths", ring::list_text(sequences->lengths())},
          {"the numbers of new tokens", ring::list_text(counts)},
          {"the placement", tokens.placement ? ring::placement_text(*tokens.placement) : "none"},
          {"whether sinks are passed", sinks ? "yes" : "no"}};
}

void RingCache::Impl::reserve(const Room& room) {
  const std::pair<ring::Mailbox*, std::int64_t> needs[] = {{&outgoing, room.out},
                                                           {&incoming, room.in},
                                                           {&queries, room.queries},
                                                           {&results, room.results}};
  for (const auto& [box, bytes] : needs) {
    if (bytes <= box->memory.bytes()) continue;
    link->finish();  // earlier calls may still use it
    *box = {};
    *box = link->make_mailbox(bytes, "messages of a cache");
  }
}

void RingCache::Impl::guard(FunctionRef<void()> work) {
  try {
    work();
  } catch (const std::exception& error) {
    link->abort(error.what());  // the others would wait for rows that never come
    throw;
  }
}

void RingCache::Impl::exchange(ring::Batch& batch, const char* what) {
  if (batch.messages.empty()) return;
  batch.what = what;
  ring::Posted posted = link->post(batch, queue->record());
  link->wait(batch, posted);
}

void RingCache::Impl::call(const char* where, const std::optional<Keys>& key_tensors,
                           const std::optional<Queries>& query_tensors, const NewTokens& tokens) {
  const Transport::Use use(*transport, where);
  try {
    run(where, key_tensors, query_tensors, tokens);
  } catch (const std::exception&) {
    finish();  // of earlier calls, too: the caller may free its tensors
    throw;
  }
}

void RingCache::Impl::run(const char* where, const std::optional<Keys>& key_tensors,
                          const std::optional<Queries>& query_tensors, const NewTokens& tokens) {
  const EventScope pass(EventKind::pass, where, rank);
  std::vector<std::int64_t> counts;
  std::vector<Claim> call_claims;
  Attendance work;
  const ring::Complaint complaint = ring::complaint_of([&] {
    const auto check = [](const std::string& text) {
      if (!text.empty()) throw ConfigError(text);
    };
    const ConstTensorView& first = key_tensors ? key_tensors->k : query_tensors->q;
    counts = counts_of(first.rank == 4 ? first.shape[1] : 0, tokens);
    call_claims = claims(where, counts, tokens, query_tensors && query_tensors->sinks.has_value());
    check(tensor_complaint(key_tensors, query_tensors, tokens));
    std::vector<std::int64_t> lengths = sequences->lengths();
    Room room;
    if (key_tensors) {
      check(sequences->append_complaint(counts));
      // The same on all ranks, and no less than what any of them sends or keeps.
      const std::int64_t token = 2 * options.kv_heads * key_bytes();
      if (tokens.placement) {
        std::int64_t most_passed = 0;
        for (int r = 0; r < ranks; ++r)
          most_passed = std::max(most_passed, tokens.placement->local_tokens(r));
        room.out = options.batch * most_passed * token + ranks * std::int64_t{16};
        for (const std::int64_t count : counts) {
          const std::int64_t blocks = count / (options.block * ranks) + 2;
          room.in += std::min(count, blocks * options.block) * token;
        }
        room.in += ranks * std::int64_t{16};
      }
      for (std::size_t entry = 0; entry < counts.size(); ++entry) lengths[entry] += counts[entry];
    }
    if (query_tensors) {
      check(sequences->attend_complaint(counts, key_tensors ? std::span<const std::int64_t>(counts)
                                                            : std::span<const std::int64_t>()));
      work = attendance(counts, tokens.placement, lengths);
      std::int64_t most = 0;
      for (const kv_cache::Share& share : work.shares) most = std::max(most, share.count);
      room.out = std::max(room.out, work.tokens() * partial_bytes());
      if (ranks > 1) room.in = std::max(room.in, ranks * most * partial_bytes());
      if (work.placed) room.queries = work.tokens() * query_bytes();
      if (work.divided) room.results = work.tokens() * result_bytes();
    }
    reserve(room);
    if (query_tensors) {
      work.runs = runs_of(work, counts, lengths);
      if (!work.runs.empty()) kernels->reserve(cached_keys(rank), work.runs, *queue);
    }
  });
  ring::agree(*transport, where, complaint, call_claims);
  guard([&] {
    if (key_tensors) {
      append(*key_tensors, counts, tokens.placement);
      sequences->append(counts);
    }
    if (query_tensors) attend(*query_tensors, work);
  });
}

void RingCache::Impl::copy_entry(std::int64_t from, std::int64_t to) {
  sequences->check_entry("from", from);
  sequences->check_entry("to", to);
  if (from == to) return;
  const CachedKeys cached = cached_keys(rank);
  std::vector<RowCopy> copies;
  sequences->for_each_kept(from, rank, [&](std::int64_t row, std::int64_t count) {
    copies.push_back({from, row, to, row, count});
  });
  if (!copies.empty()) {
    kernels->copy(cached.k, cached.k, options.kv_heads, key_bytes(), copies, *queue);
    kernels->copy(cached.v, cached.v, options.kv_heads, key_bytes(), copies, *queue);
  }
  sequences->copy(from, to);
}

void RingCache::Impl::synchronize() {
  guard([&] {
    if (!backend->immediate()) {
      const EventScope waiting(EventKind::wait, "synchronize", rank);
      queue->record().wait();
    }
    link->check();
  });
}

// ---- the public class

RingCache::RingCache(CacheOptions options, Transport& transport) {
  const Transport::Use use(transport, "RingCache");
  try {
    impl_ = std::make_unique<Impl>(std::move(options), transport);
  } catch (const Error&) {
    throw;  // every rank has heard of it, or the transport has ended
  } catch (const std::exception& error) {
    transport.abort(error.what());
    throw;
  }
}
RingCache::~RingCache() = default;
RingCache::RingCache(RingCache&&) noexcept = default;
RingCache& RingCache::operator=(RingCache&&) noexcept = default;

void RingCache::append(const ConstTensorView& k, const ConstTensorView& v,
                       const NewTokens& tokens) {
  impl_->call("RingCache::append", Impl::Keys{k, v}, std::nullopt, tokens);
}

void RingCache::attend(const ConstTensorView& q, const TensorView& o, const TensorView& lse,
                       const NewTokens& tokens, const OptionalInputs& more) {
  impl_->call("RingCache::attend", std::nullopt, Impl::Queries{q, o, lse, more.sinks}, tokens);
}

void RingCache::step(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                     const TensorView& o, const TensorView& lse, const NewTokens& tokens,
                     const OptionalInputs& more) {
  impl_->call("RingCache::step", Impl::Keys{k, v}, Impl::Queries{q, o, lse, more.sinks}, tokens);
}

void RingCache::truncate(std::int64_t entry, std::int64_t length) {
  impl_->sequences->truncate(entry, length);
}
void RingCache::copy_entry(std::int64_t from, std::int64_t to) { impl_->copy_entry(from, to); }

std::span<const std::int64_t> RingCache::lengths() const { return impl_->sequences->lengths(); }
const CacheOptions& RingCache::options() const { return impl_->options; }

std::int64_t RingCache::predicted_append_bytes(std::int64_t new_tokens,
                                               const NewTokens& tokens) const {
  return impl_->append_bytes(impl_->counts_of(new_tokens, tokens), tokens.placement) +
         ring::agreement_bytes(impl_->ranks);
}

std::int64_t RingCache::predicted_attend_bytes(std::int64_t new_tokens,
                                               const NewTokens& tokens) const {
  return impl_->attend_bytes(impl_->counts_of(new_tokens, tokens), tokens.placement) +
         ring::agreement_bytes(impl_->ranks);
}

void RingCache::synchronize() { impl_->synchronize(); }
Queue& RingCache::queue() { return *impl_->queue; }

void RingCache::use_queue(std::shared_ptr<Queue> queue) {
  const Device& device = impl_->options.device;
  if (queue == nullptr || queue->device() != device) {
    throw ConfigError(std::string("RingCache::use_queue: ") +
                      (queue == nullptr ? "no queue"
                                        : "the queue is of " + name_of(queue->device()) +
                                              ", the cache of " + name_of(device)));
  }
  impl_->link->use_queue(queue);
  impl_->queue = std::move(queue);
}

std::int64_t RingCache::cache_bytes() const { return impl_->keys.bytes() + impl_->values.bytes(); }

std::int64_t RingCache::workspace_bytes() const {
  std::int64_t bytes = impl_->kernels->workspace_bytes();
  for (const ring::Mailbox* box :
       {&impl_->outgoing, &impl_->incoming, &impl_->queries, &impl_->results})
    bytes += impl_->link->mailbox_bytes(box->memory.bytes());
  return bytes;
}

std::string RingCache::kernels() const { return impl_->backend->kernels(); }
std::string RingCache::transfers() const { return impl_->link->way(); }

}  // namespace annulus
