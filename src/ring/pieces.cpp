#include "ring/pieces.h"

#include <optional>
#include <type_traits>
#include <utility>

#include "annulus/error.h"
#include "annulus/events.h"
#include "core/caches.h"
#include "pattern/entry_groups.h"
#include "ring/option_text.h"

namespace annulus {
namespace {

// The sequences and heads of one piece.
struct Part {
  std::int64_t first_sequence, sequences;
  std::int64_t first_kv_head, kv_heads;
  std::int64_t group;  // query heads per K/V head

  template <typename View>
  [[nodiscard]] View of(View view, bool heads_of_keys) const {
    const std::int64_t heads = heads_of_keys ? 1 : group;
    const std::int64_t offset =
        first_sequence * view.stride[0] + first_kv_head * heads * view.stride[2];
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>,
                                    const std::byte, std::byte>;
    if (view.data != nullptr) {
      view.data =
          static_cast<Byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
    }
    view.shape[0] = sequences;
    view.shape[2] = kv_heads * heads;
    return view;
  }
  // A vector with one number per query head.
  template <typename View>
  [[nodiscard]] std::optional<View> of(std::optional<View> view) const {
    if (!view.has_value()) return view;
    // Its only axis is that of heads: give it the shape that of(view) expects.
    view->stride[2] = view->stride[0];
    view->stride[0] = 0;
    View part = of(*view, false);
    part.stride[0] = part.stride[2];
    part.shape[0] = part.shape[2];
    return part;
  }
  // Pairs keep the numbers that they have in the whole.
  [[nodiscard]] ring::CallValues of(ring::CallValues values) const {
    if (!values.dropout.has_value()) return values;
    values.dropout->first_batch += first_sequence;
    values.dropout->first_head += static_cast<int>(first_kv_head * group);
    return values;
  }
  [[nodiscard]] ring::ForwardTensors of(const ring::ForwardTensors& t) const {
    return {of(t.q, false),   of(t.k, true), of(t.v, true), of(t.o, false),
            of(t.lse, false), of(t.sinks),   of(t.values)};
  }
  // Pieces after the first sequence add to the gradients of sinks.
  [[nodiscard]] ring::BackwardTensors of(const ring::BackwardTensors& t) const {
    return {of(t.q, false),    of(t.k, true),   of(t.v, true),     of(t.o, false), of(t.lse, false),
            of(t.dout, false), of(t.dq, false), of(t.dk, true),    of(t.dv, true), of(t.sinks),
            of(t.dsinks),      of(t.values),    first_sequence > 0};
  }
};

// The rows of a piece in a branch state, which are contiguous (KeptRows). `Data` is
// BranchState::Data.
template <typename Data>
Data part_of(const Data& state, std::int64_t first, std::int64_t rows, std::int64_t all_rows) {
  const auto cut = [&](const Memory& memory) {
    const std::int64_t row = all_rows == 0 ? 0 : memory.bytes() / all_rows;
    return Memory(memory.data() == nullptr ? nullptr : memory.data() + first * row, rows * row,
                  memory.device(), nullptr);
  };
  Data part;
  part.o = cut(state.o);
  part.lse = cut(state.lse);
  part.filled = state.filled;
  return part;
}

const char* where_of(const ring::ForwardTensors&) { return "RingAttention::forward"; }
const char* where_of(const ring::BackwardTensors&) { return "RingAttention::backward"; }

// Only forward fills a branch state. `Data` is BranchState::Data.
template <typename Data>
void set_filled(Data* state, bool filled) {
  if constexpr (!std::is_const_v<Data>) {
    if (state != nullptr) state->filled = filled;
  }
}

}  // namespace

RingAttention::Pieces::Pieces(RingOptions options_in, Transport& transport_in)
    : options(std::move(options_in)), transport(&transport_in) {
  make();
}

void RingAttention::Pieces::make() {
  ring::Trials trials(options);
  try {
    make(ring::Strategy());
    return;
  } catch (const ring::SharedShortage& shortage) {
    trials.add(shortage);
  }
  // A SharedShortage is thrown on all ranks, so all of them are here.
  if (options.recover) {
    for (const ring::Strategy& strategy : ring::strategies(options)) {
      try {
        const EventScope trying(EventKind::recovery, strategy.event(), transport->rank());
        drop_caches();
        make(strategy);
        return;
      } catch (const ring::SharedShortage& shortage) {
        trials.add(shortage, strategy);
      }
    }
  }
  record_event(EventKind::recovery, "gave up", transport->rank(), trials.error().shortage().needed);
  throw trials.error();
}

void RingAttention::Pieces::drop() {
  std::unique_ptr<Impl> old;
  const std::lock_guard lock(mutex_);
  old = std::move(executor_);
  key_.clear();
}

void RingAttention::Pieces::make(const ring::Strategy& strategy) {
  try {
    forget();  // the memory is needed
    strategy_ = strategy;
    made_for_ = options.pattern.documents;
    if (strategy.whole()) {
      kinds_.push_back({strategy.applied_to(options), "whole", {{}}, 0});
      executor_of(0);
    } else {
      make_pieces();
    }
    recovery = strategy.text();
  } catch (const std::exception&) {
    forget();
    throw;
  }
}

void RingAttention::Pieces::forget() {
  drop();
  strategy_ = {};
  kinds_.clear();
  branch_rows_ = forward_bytes_ = backward_bytes_ = 0;
  info_ = {};
}

void RingAttention::Pieces::make_pieces() {
  const RingOptions asked = strategy_.applied_to(options);
  const std::int64_t sequences = strategy_.sequences > 0 ? strategy_.sequences : options.batch;
  const int kv_heads = strategy_.kv_heads > 0 ? strategy_.kv_heads : options.kv_heads;
  const int group = options.pattern.heads / options.kv_heads;
  for (int first = 0; first < options.kv_heads; first += kv_heads) {
    RingOptions piece = asked;
    piece.batch = sequences;
    piece.kv_heads = kv_heads;
    piece.pattern = ring::pattern_of_heads(options.pattern, first * group, kv_heads * group);
    for (std::int64_t entry = 0; entry < options.batch; entry += sequences) {
      piece.pattern.documents = documents_of_part(options.pattern, entry, entry + sequences);
      std::string key = ring::options_key(piece);
      if (kinds_.empty() || kinds_.back().key != key)
        kinds_.push_back({piece, std::move(key), {}, 0});
      kinds_.back().pieces.push_back({entry, first});
    }
  }
  // A pass starts with an agreement, and it starts and ends with the executor of the last piece.
  // Count its bytes in the same way.
  const auto sent = [&] { return static_cast<std::int64_t>(transport->counters().bytes_sent); };
  executor_of(kinds_.size() - 1);
  forward_bytes_ = backward_bytes_ = ring::agreement_bytes(transport->size());
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    const std::int64_t before = sent();
    const Impl& executor = executor_of(i);
    const std::int64_t making = sent() - before;
    const std::int64_t pieces = std::ssize(kinds_[i].pieces);
    forward_bytes_ += making + pieces * executor.predicted_forward_bytes();
    backward_bytes_ += making + pieces * executor.predicted_backward_bytes();
    kinds_[i].branch_rows = executor.branch_rows();
    branch_rows_ += pieces * executor.branch_rows();
    MemoryInfo info = executor.memory_info();
    if (info.workspace_bytes > info_.workspace_bytes) info_ = std::move(info);
  }
  if (!options.backward) backward_bytes_ = 0;
}

RingAttention::Impl& RingAttention::Pieces::executor_of(std::size_t kind) {
  const Kind& wanted = kinds_[kind];
  if (executor_ != nullptr && key_ == wanted.key) return *executor_;
  drop();  // frees its memory for the next one
  const RingOptions whole = strategy_.applied_to(options);
  std::unique_ptr<Impl> next = Impl::make(wanted.options, *transport,
                                          strategy_.whole() ? nullptr : &whole, strategy_.by_ring);
  if (queue != nullptr) next->use_queue(queue);
  queue = next->queue;
  backend = next->backend;
  const std::lock_guard lock(mutex_);
  if (interrupted_) next->interrupted = true;
  executor_ = std::move(next);
  key_ = wanted.key;
  return *executor_;
}

RingAttention::Impl& RingAttention::Pieces::executor_again(std::size_t kind) {
  ring::Trials trials(options);
  try {
    return executor_of(kind);
  } catch (const ring::SharedShortage& shortage) {
    trials.add(shortage);
  }
  drop_caches();
  try {
    return executor_of(kind);
  } catch (const ring::SharedShortage& shortage) {
    trials.add(shortage, ring::strategies(options).front());
  }
  throw trials.error();
}

template <typename Tensors, typename State>
void RingAttention::Pieces::run_pieces(const Tensors& tensors, State* state) {
  const char* where = where_of(tensors);
  if (options.mix_gradient != MixGradient::detached) state = nullptr;
  {
    // Without this, ranks whose documents differ would make executors of different pieces.
    const Transport::Use use(*transport, where);
    const ring::Claim claims[] = {{ring::kTheCall, where},
                                  {ring::kDocumentsClaim, ring::documents_text(options.pattern)}};
    ring::Complaint complaint;
    if (!of_these_documents()) {
      complaint.text = "the documents are others than those for which memory ran out";
      complaint.shortage.emplace();
    } else {
      complaint = ring::complaint_about(tensors, options, transport->rank());
    }
    if (complaint.empty() && state != nullptr) {
      const auto row = options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
      complaint = Impl::check_state(*state, branch_rows_ * row, branch_rows_);
    }
    ring::agree(*transport, where, complaint, claims);
  }
  set_filled(state, false);
  std::int64_t first_row = 0;  // of the branch state
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    const Kind& kind = kinds_[i];
    Impl& executor = executor_again(i);
    for (const auto& [entry, kv_head] : kind.pieces) {
      const Part part{entry, kind.options.batch, kv_head, kind.options.kv_heads,
                      options.pattern.heads / options.kv_heads};
      if (state == nullptr) {
        executor.run(part.of(tensors), nullptr);
        continue;
      }
      BranchState::Data mine = part_of(*state, first_row, kind.branch_rows, branch_rows_);
      executor.run(part.of(tensors), &mine);
      first_row += kind.branch_rows;
    }
  }
  set_filled(state, true);
}

template <typename Tensors, typename State>
void RingAttention::Pieces::run(const Tensors& tensors, State* state) {
  const auto run = [&] {
    if (strategy_.whole()) {
      executor_->run(tensors, state);
    } else {
      run_pieces(tensors, state);
    }
  };
  if (made()) {
    try {
      run();
      return;
    } catch (const ring::SharedShortage&) {
      // Of set_documents, because passes allocate nothing; thrown on all ranks.
      if (!options.recover) throw;
    }
  }
  make();
  run();
}

template void RingAttention::Pieces::run(const ring::ForwardTensors&, BranchState::Data*);
template void RingAttention::Pieces::run(const ring::BackwardTensors&, const BranchState::Data*);

const RingAttention::Impl& RingAttention::Pieces::current() const {
  if (!of_these_documents()) {
    throw ConfigError(ring::prefix(*transport, "RingAttention") +
                      "memory ran out for earlier documents: the next pass plans for these");
  }
  if (executor_ == nullptr) {
    throw DeviceError(ring::prefix(*transport, "RingAttention") +
                      "memory ran out in the last pass, and there is no executor until the next "
                      "one");
  }
  if (!executor_->complaint.empty())
    throw ConfigError("RingAttention: " + executor_->complaint.text);
  return *executor_;
}

std::int64_t RingAttention::Pieces::branch_rows() const {
  if (options.mix_gradient != MixGradient::detached) return 0;
  if (strategy_.whole() && executor_ != nullptr && !executor_->complaint.shortage)
    return executor_->branch_rows();
  // The next pass makes its executors first; its branch state exists before.
  return KeptRows(options.pattern, options.placement, transport->rank(), options.batch).rows();
}

std::int64_t RingAttention::Pieces::predicted_forward_bytes() const {
  const Impl& executor = current();
  return strategy_.whole() ? executor.predicted_forward_bytes() : forward_bytes_;
}

std::int64_t RingAttention::Pieces::predicted_backward_bytes() const {
  const Impl& executor = current();
  return strategy_.whole() ? executor.predicted_backward_bytes() : backward_bytes_;
}

MemoryInfo RingAttention::Pieces::memory_info() const {
  return strategy_.whole() && executor_ != nullptr ? executor_->memory_info() : info_;
}

void RingAttention::Pieces::set_documents(std::vector<Document> documents) {
  const Transport::Use use(*transport, "RingAttention::set_documents");
  options.pattern.documents = documents;
  if (strategy_.whole() && executor_ != nullptr) executor_->set_documents(std::move(documents));
}

void RingAttention::Pieces::synchronize() {
  if (executor_ != nullptr) executor_->synchronize();  // earlier ones waited in their destructors
}

void RingAttention::Pieces::use_queue(std::shared_ptr<Queue> other) {
  if (executor_ != nullptr) executor_->use_queue(other);
  queue = std::move(other);
}

void RingAttention::Pieces::interrupt() noexcept {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (executor_ != nullptr) executor_->interrupt();
}

}  // namespace annulus
