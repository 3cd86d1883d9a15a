#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "arrays.h"
#include "bindings.h"
#include "core/lease_pool.h"
#include "interrupt.h"
#include "local_ring.h"
#include "ring/option_text.h"
#include "values.h"

namespace annulus::python {
namespace {

using Lengths = std::optional<std::vector<std::int64_t>>;

using LocalRings = LeasePool<std::shared_ptr<LocalRing>>;

// Never destroyed: at exit other threads may still be in a call.
LocalRings& local_rings() {
  constexpr std::size_t kMostRings = 20;
  static auto* rings = new LocalRings(kMostRings);
  return *rings;
}

// Rings whose memory belongs to CUDA graphs, which may be replayed at any time.
void keep_for_graphs(std::shared_ptr<LocalRing> ring) {
  static auto* lock = new std::mutex;
  static auto* captured = new std::set<std::shared_ptr<LocalRing>>;
  const std::lock_guard guard(*lock);
  captured->insert(std::move(ring));
}

// The arguments of attention and attention_backward, except the arrays.
struct Request {
  nb::handle pattern;
  const Lengths& segments;
  const Lengths& dilations;
  bool causal;
  nb::handle window;
  DocumentArguments documents;
  const std::string& offsets;
  bool group_scale;
  std::optional<double> scale;
  int ranks;
  nb::handle placement;
  const std::string& schedule;
  bool reproducible;
  double softcap;
  double dropout_p;
};

// With `keys_of_q`, `view` is k and `like` is q: they may differ in tokens and heads. Other arrays
// have the shape of the one that they are compared with.
void expect_shape(const char* where, const char* name, const ConstTensorView& view,
                  const ConstTensorView& like, const char* like_name, bool keys_of_q) {
  const auto same = [&](std::size_t axis) { return view.shape[axis] == like.shape[axis]; };
  if (!same(0) || (!keys_of_q && (!same(1) || !same(2))) || (view.rank == 4 && !same(3))) {
    const auto extent = [&](std::size_t axis, const char* any) {
      return keys_of_q ? any : std::to_string(like.shape[axis]);
    };
    throw ConfigError(
        fmt::format("{}: {} is {}, expected [{}, {}, {}{}] like {}", where, name,
                    shape_string(view), like.shape[0], extent(1, "tokens"), extent(2, "key heads"),
                    view.rank == 4 ? fmt::format(", {}", like.shape[3]) : "", like_name));
  }
  if (view.rank == 4 && view.dtype != like.dtype) {
    throw ConfigError(fmt::format("{}: {} is {}, expected {} like {}", where, name,
                                  python_name_of(view.dtype), python_name_of(like.dtype),
                                  like_name));
  }
}

// A ring for the request: the last one of its kind if it is free, else a new one. It is returned to
// the pool when the pass succeeds. After an error its transport may be dead, so the next call makes
// a new one.
class Lease {
 public:
  Lease(const char* where, const Request& request, const ConstTensorView& q,
        const ConstTensorView& k, bool backward, const Arrays& arrays) {
    const auto heads = static_cast<int>(std::min<std::int64_t>(q.shape[2], 1 << 20));
    Pattern pattern =
        parse_pattern(request.pattern, heads, request.segments, request.dilations, request.causal,
                      request.window, request.offsets, request.group_scale);
    if (pattern.heads != heads) {
      throw ConfigError(
          fmt::format("{}: q has {} heads, the pattern is for {}", where, heads, pattern.heads));
    }
    try {
      pattern = with_documents(std::move(pattern), request.documents,
                               SequenceLengths{q.shape[1], k.shape[1]});
    } catch (const ConfigError& error) {
      throw ConfigError(std::string(where) + ": " + error.what());
    }
    const Schedule schedule = parse_schedule(request.schedule);
    const bool named = nb::isinstance<nb::str>(request.placement);
    if (!named && !nb::isinstance<Placement>(request.placement)) {
      throw ConfigError(std::string(where) +
                        ": placement is neither a name nor a Placement: expected 'contiguous', "
                        "'zigzag', 'striped', 'hilbert' or annulus.Placement");
    }

    // Named placements are made only for a new ring: a Hilbert curve takes longer than a small
    // attention.
    static const Placement none_yet = Placement::contiguous(1, 1);
    RingOptions options{
        .pattern = std::move(pattern),
        .placement = named ? none_yet : nb::cast<const Placement&>(request.placement)};
    options.batch = q.shape[0];
    options.kv_heads = static_cast<int>(std::min<std::int64_t>(k.shape[2], 1 << 20));
    options.head_dim = static_cast<int>(std::min<std::int64_t>(q.shape[3], 1 << 20));
    options.dtype = q.dtype;
    options.device = device_ = q.device;
    captures_ = arrays.stream() && cuda_capturing(reinterpret_cast<void*>(*arrays.stream()));
    options.scale = request.scale;
    options.softcap = request.softcap;
    options.dropout_p = request.dropout_p;
    options.schedule = schedule;
    options.reproducible = request.reproducible;
    options.backward = backward;
    // A ring takes any documents.
    std::vector<Document> documents = std::exchange(options.pattern.documents, {});
    key_ = ring::options_key(options);
    options.pattern.documents = std::move(documents);
    if (named) {
      key_ += fmt::format("|{} {} {} {}", nb::cast<std::string>(request.placement), request.ranks,
                          q.shape[1], k.shape[1]);
    } else if (const Placement& placement = options.placement;
               placement.tokens() != q.shape[1] ||
               (request.ranks != 1 && request.ranks != placement.ranks())) {
      throw ConfigError(
          fmt::format("{}: placement '{}' is for {} tokens on {} ranks, expected {} tokens{}",
                      where, placement.name(), placement.tokens(), placement.ranks(), q.shape[1],
                      request.ranks == 1 ? "" : fmt::format(" on {} ranks", request.ranks)));
    }

    if (!named && k.shape[1] != q.shape[1]) {
      throw ConfigError(fmt::format(
          "{}: q has {} tokens and k {}: placement was expected to be a name, which both can have",
          where, q.shape[1], k.shape[1]));
    }

    if ((q.shape[1] == 0) != (k.shape[1] == 0)) {
      throw ConfigError(fmt::format("{}: q has {} tokens and k {}, expected at least one of each",
                                    where, q.shape[1], k.shape[1]));
    }

    // No sequences or no tokens: there is nothing to compute once the names have been checked.
    if (q.shape[0] * q.shape[1] == 0) {
      if (named) (void)Placement::named(nb::cast<std::string>(request.placement), 1, request.ranks);
      return;
    }
    const std::vector<Document>& wanted = options.pattern.documents;
    const auto accept = [&](const std::shared_ptr<LocalRing>& ring) {
      return captures_ ? ring->has_documents(wanted) : ring->takes_documents(wanted);
    };
    if (auto kept = local_rings().take(key_, accept); kept.has_value()) {
      ring_ = std::move(*kept);
      const nb::gil_scoped_release no_gil;
      ring_->set_documents(wanted);
      return;
    }
    if (captures_) {
      throw ConfigError(fmt::format(
          "{}: a CUDA graph is being captured and this call has not been made before, so that its "
          "workspace would have to be allocated: make it once before capturing",
          where));
    }
    if (named) {
      options.placement =
          Placement::named(nb::cast<std::string>(request.placement), q.shape[1], request.ranks);
      if (k.shape[1] != q.shape[1]) {
        options.key_placement =
            Placement::named(nb::cast<std::string>(request.placement), k.shape[1], request.ranks);
      }
    }
    options.limits = local_limits(options);
    const nb::gil_scoped_release no_gil;
    local_rings().make_room();
    ring_ = std::make_shared<LocalRing>(std::move(options));
  }

  // 0: there is nothing to compute.
  [[nodiscard]] int ranks() const { return ring_ == nullptr ? 0 : ring_->ranks(); }
  // `cost`: operations relative to forward.
  template <typename Pass>
  void run(const Arrays& arrays, double cost, const Pass& pass) {
    if (ring_ == nullptr) return;  // nothing to compute
    const bool enqueues = arrays.stream().has_value();
    const bool watch = !enqueues && cost * ring_->forward_flops() >= kLongPass && on_main_thread();
    run_interruptibly(
        watch,
        [&] {
          if (enqueues) ring_->use_stream(*arrays.stream());
          pass(*ring_);
          if (arrays.waits()) ring_->synchronize();
          if (arrays.is_given()) ring_->leave_stream();
        },
        [&] { ring_->interrupt(); });
    if (captures_) {
      ring_->keep_documents();
      keep_for_graphs(ring_);
    }
    const std::int64_t bytes = ring_->bytes();
    local_rings().give_back(std::move(key_), std::move(ring_), bytes, device_);
  }

 private:
  std::string key_;
  Device device_;
  bool captures_ = false;
  std::shared_ptr<LocalRing> ring_;
};

OptionalInputs optional_inputs(const char* where, Arrays& arrays, nb::handle sinks,
                               std::optional<std::uint64_t> dropout_seed,
                               const ConstTensorView& q) {
  OptionalInputs more;
  more.dropout_seed = dropout_seed;
  if (sinks.is_none()) return more;
  more.sinks = arrays.input(sinks, "sinks", 1);
  arrays.check(where);
  if (more.sinks->dtype != DType::f32 || more.sinks->shape[0] != q.shape[2]) {
    throw ConfigError(
        fmt::format("{}: sinks is {} {}, expected float32 [{}]: one number per head of q", where,
                    python_name_of(more.sinks->dtype), shape_string(*more.sinks), q.shape[2]));
  }
  return more;
}

nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle pattern,
                     const Lengths& segments, const Lengths& dilations, Flag causal,
                     nb::handle window, nb::handle cu_seqlens, nb::handle cu_seqlens_k,
                     nb::handle query_start, nb::handle seqused_k, nb::handle leftpad_k,
                     const std::string& offsets, Flag group_scale, std::optional<double> scale,
                     int ranks, nb::handle placement, const std::string& schedule,
                     Flag reproducible, nb::object out, Flag return_lse,
                     std::optional<std::uintptr_t> stream, nb::handle sinks, double softcap,
                     double dropout_p, std::optional<std::uint64_t> dropout_seed) {
  const char* where = "attention";
  Arrays arrays(std::nullopt, stream);
  const ConstTensorView q_view = arrays.input(q, "q");
  const ConstTensorView k_view = arrays.input(k, "k");
  const ConstTensorView v_view = arrays.input(v, "v");
  arrays.check(where);
  expect_shape(where, "k", k_view, q_view, "q", true);
  expect_shape(where, "v", v_view, k_view, "k", false);
  const OptionalInputs more = optional_inputs(where, arrays, sinks, dropout_seed, q_view);
  const Result o(std::move(out), q, q_view, q_view.dtype, 4, arrays.stream());
  const TensorView o_view = arrays.output(o.writable(), "out");
  arrays.check(where);
  expect_shape(where, "out", o_view, q_view, "q", false);
  std::optional<Result> lse;
  TensorView lse_view;
  if (return_lse) {
    lse.emplace(nb::none(), q, q_view, DType::f32, 3, arrays.stream());
    lse_view = arrays.output(lse->writable(), "lse", 3);
    arrays.check(where);
  }
  Lease lease(where,
              {pattern,
               segments,
               dilations,
               causal,
               window,
               {cu_seqlens, cu_seqlens_k, query_start, seqused_k, leftpad_k},
               offsets,
               group_scale,
               scale,
               ranks,
               placement,
               schedule,
               reproducible,
               softcap,
               dropout_p},
              q_view, k_view, /*backward=*/false, arrays);
  lease.run(arrays, 1.0, [&](LocalRing& ring) {
    ring.forward(q_view, k_view, v_view, o_view, return_lse ? &lse_view : nullptr, more);
  });
  if (!return_lse) return o.finish();
  return nb::make_tuple(o.finish(), lse->finish());
}

nb::tuple attention_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
                             nb::handle dout, nb::handle pattern, const Lengths& segments,
                             const Lengths& dilations, Flag causal, nb::handle window,
                             nb::handle cu_seqlens, nb::handle cu_seqlens_k, nb::handle query_start,
                             nb::handle seqused_k, nb::handle leftpad_k, const std::string& offsets,
                             Flag group_scale, std::optional<double> scale, int ranks,
                             nb::handle placement, const std::string& schedule, Flag reproducible,
                             std::optional<std::uintptr_t> stream, nb::handle sinks, double softcap,
                             double dropout_p, std::optional<std::uint64_t> dropout_seed) {
  const char* where = "attention_backward";
  Arrays arrays(std::nullopt, stream);
  const ConstTensorView q_view = arrays.input(q, "q");
  const ConstTensorView k_view = arrays.input(k, "k");
  const ConstTensorView v_view = arrays.input(v, "v");
  const ConstTensorView o_view = arrays.input(o, "o");
  const ConstTensorView lse_view = arrays.input(lse, "lse", 3);
  const ConstTensorView dout_view = arrays.input(dout, "do");
  arrays.check(where);
  expect_shape(where, "k", k_view, q_view, "q", true);
  expect_shape(where, "v", v_view, k_view, "k", false);
  expect_shape(where, "o", o_view, q_view, "q", false);
  expect_shape(where, "lse", lse_view, q_view, "q", false);
  expect_shape(where, "do", dout_view, q_view, "q", false);
  const OptionalInputs more = optional_inputs(where, arrays, sinks, dropout_seed, q_view);
  const Result dq(nb::none(), q, q_view, q_view.dtype, 4, arrays.stream());
  const Result dk(nb::none(), k, k_view, q_view.dtype, 4, arrays.stream());
  const Result dv(nb::none(), v, v_view, q_view.dtype, 4, arrays.stream());
  const TensorView dq_view = arrays.output(dq.writable(), "dq");
  const TensorView dk_view = arrays.output(dk.writable(), "dk");
  const TensorView dv_view = arrays.output(dv.writable(), "dv");
  arrays.check(where);
  Lease lease(where,
              {pattern,
               segments,
               dilations,
               causal,
               window,
               {cu_seqlens, cu_seqlens_k, query_start, seqused_k, leftpad_k},
               offsets,
               group_scale,
               scale,
               ranks,
               placement,
               schedule,
               reproducible,
               softcap,
               dropout_p},
              q_view, k_view, /*backward=*/true, arrays);
  std::optional<Result> dsinks;  // of every rank
  std::optional<TensorView> dsinks_view;
  if (more.sinks) {
    ConstTensorView shape = q_view;
    shape.shape = {lease.ranks(), q_view.shape[2]};
    dsinks.emplace(nb::none(), q, shape, DType::f32, 2, arrays.stream());
    dsinks_view = arrays.output(dsinks->writable(), "dsinks", 2);
    arrays.check(where);
  }
  lease.run(arrays, 2.5, [&](LocalRing& ring) {
    ring.backward(q_view, k_view, v_view, o_view, lse_view, dout_view, dq_view, dk_view, dv_view,
                  more, dsinks_view);
  });
  if (!more.sinks) return nb::make_tuple(dq.finish(), dk.finish(), dv.finish());
  std::optional<TorchStreamScope> scope;
  if (arrays.stream()) scope.emplace(q_view.device.index, *arrays.stream());
  return nb::make_tuple(dq.finish(), dk.finish(), dv.finish(), dsinks->finish().attr("sum")(0));
}

#define ANNULUS_ATTENTION_SIGNATURE                                                           \
  "pattern: Pattern | typing.Literal['dense', 'longnet', 'head_groups'] | None = None, "      \
  "segment_lengths: Sequence[int] | None = None, dilation_rates: Sequence[int] | None = "     \
  "None, is_causal: bool = False, window: tuple[int, int] | None = None, cu_seqlens: "        \
  "Sequence[int] | Sequence[Sequence[int]] | None = None, cu_seqlens_k: Sequence[int] | "     \
  "Sequence[Sequence[int]] | None = None, query_start: int | Sequence[int] | "                \
  "Sequence[Sequence[int]] | None = None, seqused_k: int | Sequence[int] | None = None, "     \
  "leftpad_k: int | Sequence[int] | None = None, offsets: "                                   \
  "typing.Literal['blocked', 'interleaved', 'all'] = 'blocked', "                             \
  "group_scale: bool = False, scale: float | None = None, ranks: int = 1, placement: "        \
  "Placement | typing.Literal['contiguous', 'zigzag', 'striped', 'hilbert'] = 'contiguous', " \
  "schedule: typing.Literal['auto', 'ring', 'gather'] = 'auto', reproducible: bool = False"

#define ANNULUS_SOFTMAX \
  ", softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: int | None = None"

}  // namespace

void bind_attention(nb::module_& module) {
  // Two signatures of one function, so that type checkers know the type of the result.
  const auto define = [&](const auto&... signature_and_doc) {
    module.def(
        "attention", &attention, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
        nb::kw_only(), nb::arg("pattern") = nb::none(), nb::arg("segment_lengths") = nb::none(),
        nb::arg("dilation_rates") = nb::none(), nb::arg("is_causal") = false,
        nb::arg("window").none() = nb::none(), nb::arg("cu_seqlens").none() = nb::none(),
        nb::arg("cu_seqlens_k").none() = nb::none(), nb::arg("query_start").none() = nb::none(),
        nb::arg("seqused_k").none() = nb::none(), nb::arg("leftpad_k").none() = nb::none(),
        nb::arg("offsets") = "blocked", nb::arg("group_scale") = false,
        nb::arg("scale") = nb::none(), nb::arg("ranks") = 1, nb::arg("placement") = "contiguous",
        nb::arg("schedule") = "auto", nb::arg("reproducible") = false, nb::arg("out") = nb::none(),
        nb::arg("return_lse") = false, nb::arg("stream") = nb::none(),
        nb::arg("sinks") = nb::none(), nb::arg("softcap") = 0.0, nb::arg("dropout_p") = 0.0,
        nb::arg("dropout_seed") = nb::none(), signature_and_doc...);
  };
  define(nb::sig("def attention(q: ArrayT, k: ArrayT, v: ArrayT, *, " ANNULUS_ATTENTION_SIGNATURE
                 ", out: ArrayT | None = None, return_lse: typing.Literal[False] = False, "
                 "stream: int | None = None, sinks: ArrayT | None = None" ANNULUS_SOFTMAX
                 ") -> ArrayT"),
         R"(Exact attention over whole sequences in one process.

Args:
    q: [batch, tokens, heads, head_dim], float32, float16 or bfloat16, on the CPU or a CUDA device,
        which then computes everything. Any array with DLPack (NumPy, PyTorch, JAX, ...) whose last axis is
        contiguous is used in place; PyTorch tensors that require gradients are read as if detached.
    k, v: like q, with as many heads or a divisor of them (GQA, MQA): query head h uses head
        h // (heads // kv_heads). They may have another number of tokens (cross-attention, caches).
    pattern: None, 'dense', 'longnet', 'head_groups' or a :class:`Pattern`. None is 'longnet' when
        segment_lengths are given, else 'dense'.
    segment_lengths, dilation_rates: of the branches; one each.
    is_causal: only keys at or before the query.
    window: (before, after), as flash-attention's window_size: the query at t attends only to keys p with
        t - before <= p <= t + after; -1: no limit on that side. Counts tokens, in dilated branches, too.
        With is_causal, after is 0 (or -1). None: no window.
    cu_seqlens: boundaries of packed documents, as flash-attention's: 0, then the end of each. Tokens of
        different documents do not attend each other, and positions start anew in each: see
        :meth:`Pattern.with_documents`. They hold for every batch entry; a list of lists or a 2-D array has
        those of each entry. None: all tokens are one document.
    cu_seqlens_k: likewise of the keys, if they are not as many as the queries.
    query_start: position of the first query among the keys, or one for each document: a chunk of a prompt
        behind a cache. Needed if there is a mask and q and k differ in length. Without cu_seqlens also one
        for each batch entry.
    seqused_k: number of keys, if the rest is padding: one number, or one for each batch entry. As
        flash-attention's. Not with cu_seqlens.
    leftpad_k: number of keys of padding at the beginning, likewise. The other keys keep their positions.
    offsets: 'blocked', 'interleaved' or 'all', see :meth:`Pattern.longnet`.
    group_scale: multiply the output by one over the number of branches.
    scale: of q.k, above 0; None: 1/sqrt(head_dim).
    ranks: more than 1 computes on a ring of that many threads, for experiments: the result is the same.
    placement: of the tokens on these ranks: a name or a :class:`Placement`.
    schedule: 'auto', 'ring' or 'gather', see :class:`RingAttention`.
    reproducible: the same bits for every number of ranks and placement.
    out: array for the result; None: a new one of q's framework.
    return_lse: also return the log-sum-exp (natural logarithm), float32 [batch, tokens, heads].
    stream: the CUDA stream on which the work is enqueued, as a number (a cudaStream_t), and for which
        PyTorch allocates the results. None: PyTorch's current one for PyTorch tensors; for other arrays the
        call waits until the work is done.
    sinks: float32 [heads]: a logit per query head that takes part in the softmax of each of its rows and has no
        value. -inf: none for that head. A row without keys gives 0; its log-sum-exp is the sink. NaN or +inf makes
        all rows of the head NaN.
    softcap: c above 0: scores become c * tanh(score / c) before masks and softmax. 0: they do not.
    dropout_p: from 0 to less than 1: after the softmax, each pair of query and key of a head loses its
        probability with this probability, and the others are divided by 1 - dropout_p.
    dropout_seed: a whole number from 0 on, needed if dropout_p is not 0. Which pairs are dropped follows from it,
        the batch entry, the head and the tokens of query and key alone; pass the same to attention_backward.

Returns:
    The output, like q; or (output, lse). It has no gradient: annulus.attention_backward computes it.

Executors are kept for further calls of the same shape (:func:`clear_cache` frees them). Several threads
may call at the same time. The GIL is released.)");
  define(nb::sig("def attention(q: ArrayT, k: ArrayT, v: ArrayT, *, " ANNULUS_ATTENTION_SIGNATURE
                 ", out: ArrayT | None = None, return_lse: typing.Literal[True], stream: int "
                 "| None = None, sinks: ArrayT | None = None" ANNULUS_SOFTMAX
                 ") -> tuple[ArrayT, ArrayT]"));
  const auto define_backward = [&](const auto&... signature_and_doc) {
    module.def(
        "attention_backward", &attention_backward, nb::arg("q").none(), nb::arg("k").none(),
        nb::arg("v").none(), nb::arg("o").none(), nb::arg("lse").none(), nb::arg("do").none(),
        nb::kw_only(), nb::arg("pattern") = nb::none(), nb::arg("segment_lengths") = nb::none(),
        nb::arg("dilation_rates") = nb::none(), nb::arg("is_causal") = false,
        nb::arg("window").none() = nb::none(), nb::arg("cu_seqlens").none() = nb::none(),
        nb::arg("cu_seqlens_k").none() = nb::none(), nb::arg("query_start").none() = nb::none(),
        nb::arg("seqused_k").none() = nb::none(), nb::arg("leftpad_k").none() = nb::none(),
        nb::arg("offsets") = "blocked", nb::arg("group_scale") = false,
        nb::arg("scale") = nb::none(), nb::arg("ranks") = 1, nb::arg("placement") = "contiguous",
        nb::arg("schedule") = "auto", nb::arg("reproducible") = false,
        nb::arg("stream") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("softcap") = 0.0,
        nb::arg("dropout_p") = 0.0, nb::arg("dropout_seed") = nb::none(), signature_and_doc...);
  };
  define_backward(
      nb::sig("def attention_backward(q: ArrayT, k: ArrayT, v: ArrayT, o: ArrayT, lse: ArrayT, do: "
              "ArrayT, *, " ANNULUS_ATTENTION_SIGNATURE
              ", stream: int | None = None, sinks: None = None" ANNULUS_SOFTMAX
              ") -> tuple[ArrayT, ArrayT, ArrayT]"),
      R"(Gradients of :func:`attention`.

Args:
    q, k, v: as given to attention.
    o, lse: what attention returned for them with return_lse=True.
    do: gradient of o, like q.
    pattern, segment_lengths, dilation_rates, is_causal, window, cu_seqlens, cu_seqlens_k, query_start,
        seqused_k, leftpad_k, offsets, group_scale, scale, ranks, placement, schedule, reproducible, stream, sinks,
        softcap, dropout_p, dropout_seed: as given to attention.

Returns:
    (dq, dk, dv), like q, k and v; with sinks (dq, dk, dv, dsinks).)");
  define_backward(
      nb::sig("def attention_backward(q: ArrayT, k: ArrayT, v: ArrayT, o: ArrayT, lse: ArrayT, do: "
              "ArrayT, *, " ANNULUS_ATTENTION_SIGNATURE
              ", stream: int | None = None, sinks: ArrayT" ANNULUS_SOFTMAX
              ") -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]"));
  module.def(
      "view_of",
      [](nb::handle array) {
        Arrays arrays;
        const ConstTensorView view = arrays.input(array, "array");
        arrays.check("view_of");
        nb::dict dict;
        dict["address"] = reinterpret_cast<std::uintptr_t>(view.data);
        dict["dtype"] = python_name_of(view.dtype);
        dict["device"] = name_of(view.device);
        dict["shape"] = nb::make_tuple(view.shape[0], view.shape[1], view.shape[2], view.shape[3]);
        dict["strides"] =
            nb::make_tuple(view.stride[0], view.stride[1], view.stride[2], view.stride[3]);
        return dict;
      },
      nb::arg("array"), nb::sig("def view_of(array: typing.Any) -> dict[str, typing.Any]"),
      "How the library sees an array of four axes: its address, dtype, device, shape and strides "
      "in elements. For tests that nothing is copied.");
  module.def(
      "clear_cache",
      [] {
        const nb::gil_scoped_release no_gil;
        local_rings().clear();
      },
      "Frees the executors that attention and attention_backward keep between calls, except those "
      "that a running call or a CUDA graph uses. Safe at any time.");
  module.def(
      "cache_info",
      [] {
        nb::dict dict;
        dict["size"] = local_rings().size();
        dict["bytes"] = local_rings().bytes();
        return dict;
      },
      nb::sig("def cache_info() -> dict[str, int]"),
      "The executors that attention and attention_backward keep between calls: their number, "
      "'size', and the 'bytes' that they hold.");
}

}  // namespace annulus::python
