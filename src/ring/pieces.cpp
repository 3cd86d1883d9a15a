#include "ring/pieces.h"

#include <optional>
#include <type_traits>
#include <utility>

#include "annulus/error.h"
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

}  // namespace

RingAttention::Pieces::Pieces(RingOptions options_in, const ring::Strategy& strategy,
                              Transport& transport_in)
    : Executor(std::move(options_in), transport_in), by_ring_(strategy.by_ring) {
  const std::int64_t sequences = strategy.sequences > 0 ? strategy.sequences : options.batch;
  const int kv_heads = strategy.kv_heads > 0 ? strategy.kv_heads : options.kv_heads;
  const int group = options.pattern.heads / options.kv_heads;
  for (int first = 0; first < options.kv_heads; first += kv_heads) {
    RingOptions piece = options;
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
  // A pass starts and ends with the executor of the last piece. Count its bytes in the same way.
  const auto sent = [&] { return static_cast<std::int64_t>(transport->counters().bytes_sent); };
  const Impl& last = executor_of(kinds_.size() - 1);
  queue = last.queue;
  backend = last.backend;
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
  std::unique_ptr<Impl> next;
  {
    const std::lock_guard lock(mutex_);
    next = std::move(executor_);
    key_.clear();
  }
  next.reset();  // frees its memory for the next one
  next = Impl::make(wanted.options, *transport, &options, by_ring_);
  if (queue != nullptr) next->use_queue(queue);
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

std::string RingAttention::Pieces::check_state(const BranchState::Data& state) const {
  const auto row = options.head_dim * static_cast<std::int64_t>(size_of(options.dtype));
  return Impl::check_state(state, branch_rows_ * row, branch_rows_);
}

template <typename Tensors, typename State>
void RingAttention::Pieces::run_all(const char* where, const Tensors& tensors, State* state,
                                    std::string complaint) {
  if (!complaint.empty()) {
    // The other ranks agree on their first piece now, or on the construction of its executor.
    const Transport::Use use(*transport, where);
    const ring::Claim claim{ring::kTheCall, where};
    ring::agree(*transport, where, std::move(complaint), std::span(&claim, 1));
  }
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
}

void RingAttention::Pieces::run(const ring::ForwardTensors& tensors, BranchState::Data* state) {
  if (options.mix_gradient != MixGradient::detached) state = nullptr;
  std::string complaint = ring::complaint_about(tensors, options, transport->rank());
  if (complaint.empty() && state != nullptr) complaint = check_state(*state);
  if (state != nullptr) state->filled = false;
  run_all("RingAttention::forward", tensors, state, std::move(complaint));
  if (state != nullptr) state->filled = true;
}

void RingAttention::Pieces::run(const ring::BackwardTensors& tensors,
                                const BranchState::Data* state) {
  if (options.mix_gradient != MixGradient::detached) state = nullptr;
  std::string complaint = ring::complaint_about(tensors, options, transport->rank());
  if (complaint.empty() && state != nullptr) complaint = check_state(*state);
  run_all("RingAttention::backward", tensors, state, std::move(complaint));
}

const RingAttention::Impl& RingAttention::Pieces::current() const {
  if (executor_ != nullptr) return *executor_;
  throw DeviceError(ring::prefix(*transport, "RingAttention") +
                    "memory ran out in the last pass, and there is no executor until the next one");
}

void RingAttention::Pieces::set_documents(std::vector<Document> documents) {
  if (documents == options.pattern.documents) return;
  throw ConfigError(
      "RingAttention::set_documents: memory ran out, and calls are split (recovery): make another "
      "executor for other documents");
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
