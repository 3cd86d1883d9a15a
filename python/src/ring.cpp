#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "arrays.h"
#include "bindings.h"
#include "executor.h"
#include "flag.h"
#include "interrupt.h"
#include "ring_options.h"
#include "transport.h"
#include "values.h"

namespace annulus::python {
namespace {

// Memory for the branches' outputs; keeps the caller's arrays alive if the memory is theirs.
struct State {
  BranchState core;
  Arrays arrays;
};

// Enqueues a pass over CUDA arrays on their stream.
void follow_stream(Ring& ring, const Arrays& arrays) {
  if (arrays.stream() && arrays.complaint().empty()) ring.stream.use(*ring.core, *arrays.stream());
}

void leave_given(Ring& ring, const Arrays& arrays) {
  if (!arrays.is_given()) return;
  try {
    ring.stream.leave(*ring.core);
  } catch (const Error&) {  // the device has failed; the next call will report it
  }
}

// Runs a pass without the GIL. If there is a complaint about an array, the pass runs all the same,
// to fail on every rank: the array's view has no axes, and the executor tells the other ranks
// before it throws.
void run(Ring& ring, const Arrays& arrays, const char* method, double flops,
         const std::function<void()>& pass) {
  auto& transport = nb::cast<Transport&>(ring.transport);
  // Work for a device is only enqueued here, which takes no time.
  const bool computes = ring.core->options().device.kind == Device::Kind::cpu && flops >= kLongPass;
  const auto all = [&] {
    try {
      pass();
      if (arrays.waits()) ring.core->synchronize();
    } catch (...) {
      leave_given(ring, arrays);
      throw;
    }
    leave_given(ring, arrays);
  };
  try {
    run_interruptibly((computes || waits_in_cpp(transport)) && on_main_thread(), all, [&] {
      ring.core->interrupt();
      transport.abort("interrupted");  // a rank that waits for rows then stops waiting
    });
  } catch (const ConfigError&) {
    arrays.check(
        fmt::format("[rank {}/{}] RingAttention.{}", transport.rank(), transport.size(), method)
            .c_str());
    throw;
  }
}

// The arguments of a pass that are neither arrays nor about memory, as Python gives them: the other
// ranks must hear of wrong types, too.
struct Values {
  nb::handle stream;
  nb::handle dropout_seed;
  nb::handle dropout_seed_of_rank_0;
  nb::handle claims;

  // Refers to the text of the claims, which the caller of the pass keeps alive.
  void read(OptionalInputs& inputs) const {
    inputs.dropout_seed = optional_value<std::uint64_t>(dropout_seed, "dropout_seed",
                                                        "a whole number from 0 to 2**64 - 1");
    inputs.dropout_seed_of_rank_0 =
        optional_value<Flag>(dropout_seed_of_rank_0, "dropout_seed_of_rank_0", "True or False")
            .value_or(Flag{});
    inputs.claims = optional_value<const char*>(claims, "claims", "a text").value_or("");
  }
};

nb::tuple forward(Ring& self, nb::handle q, nb::handle k, nb::handle v, nb::object o,
                  nb::object lse, nb::handle state, const Values& values, nb::handle sinks) {
  auto& transport = nb::cast<Transport&>(self.transport);
  Arrays arrays(self.core->options().device,
                telling_others(transport, [&] { return parse_stream(values.stream); }));
  BranchState* state_core = nullptr;
  ConstTensorView q_view, k_view, v_view;
  TensorView o_view, lse_view;
  OptionalInputs more;
  std::optional<Result> o_result, lse_result;
  telling_others(transport, [&] {
    values.read(more);
    if (!state.is_none()) state_core = &instance_of<State>(state, "state", "a BranchState").core;
    q_view = arrays.input(q, "q");
    k_view = arrays.input(k, "k");
    v_view = arrays.input(v, "v");
    if (!sinks.is_none()) more.sinks = arrays.input(sinks, "sinks", 1);
    const DType dtype = self.core->options().dtype;
    o_result.emplace(std::move(o), q, q_view, dtype, 4, arrays.stream());
    lse_result.emplace(std::move(lse), q, q_view, DType::f32, 3, arrays.stream());
    o_view = arrays.output(o_result->writable(), "o");
    lse_view = arrays.output(lse_result->writable(), "lse", 3);
    follow_stream(self, arrays);
  });
  run(self, arrays, "forward", self.flops,
      [&] { self.core->forward(q_view, k_view, v_view, o_view, lse_view, state_core, more); });
  return nb::make_tuple(o_result->finish(), lse_result->finish());
}

nb::tuple backward(Ring& self, nb::handle q, nb::handle k, nb::handle v, nb::handle o,
                   nb::handle lse, nb::handle dout, nb::object dq, nb::object dk, nb::object dv,
                   nb::handle state, const Values& values, nb::handle sinks, nb::object dsinks) {
  auto& transport = nb::cast<Transport&>(self.transport);
  Arrays arrays(self.core->options().device,
                telling_others(transport, [&] { return parse_stream(values.stream); }));
  const BranchState* state_core = nullptr;
  ConstTensorView q_view, k_view, v_view, o_view, lse_view, dout_view;
  TensorView dq_view, dk_view, dv_view;
  std::optional<Result> dq_result, dk_result, dv_result, dsinks_result;
  OptionalInputs more;
  OptionalGradients gradients;
  telling_others(transport, [&] {
    values.read(more);
    if (!state.is_none()) state_core = &instance_of<State>(state, "state", "a BranchState").core;
    q_view = arrays.input(q, "q");
    k_view = arrays.input(k, "k");
    v_view = arrays.input(v, "v");
    o_view = arrays.input(o, "o");
    lse_view = arrays.input(lse, "lse", 3);
    dout_view = arrays.input(dout, "do");
    if (!sinks.is_none()) more.sinks = arrays.input(sinks, "sinks", 1);
    const DType dtype = self.core->options().dtype;
    dq_result.emplace(std::move(dq), q, q_view, dtype, 4, arrays.stream());
    dk_result.emplace(std::move(dk), k, k_view, dtype, 4, arrays.stream());
    dv_result.emplace(std::move(dv), v, v_view, dtype, 4, arrays.stream());
    dq_view = arrays.output(dq_result->writable(), "dq");
    dk_view = arrays.output(dk_result->writable(), "dk");
    dv_view = arrays.output(dv_result->writable(), "dv");
    if (more.sinks || !dsinks.is_none()) {
      ConstTensorView shape = q_view;
      shape.shape = {self.core->options().pattern.heads};
      dsinks_result.emplace(std::move(dsinks), q, shape, DType::f32, 1, arrays.stream());
      gradients.sinks = arrays.output(dsinks_result->writable(), "dsinks", 1);
    }
    follow_stream(self, arrays);
  });
  run(self, arrays, "backward", 2.5 * self.flops, [&] {
    self.core->backward(q_view, k_view, v_view, o_view, lse_view, dout_view, dq_view, dk_view,
                        dv_view, state_core, more, gradients);
  });
  if (!more.sinks)
    return nb::make_tuple(dq_result->finish(), dk_result->finish(), dv_result->finish());
  return nb::make_tuple(dq_result->finish(), dk_result->finish(), dv_result->finish(),
                        dsinks_result->finish());
}

std::unique_ptr<State> make_state(const Ring& self, nb::handle o, nb::handle lse, Flag filled) {
  auto state = std::make_unique<State>();
  if (o.is_none() && lse.is_none() && !filled) {
    state->core = self.core->make_branch_state();
    return state;
  }
  const Device& device = self.core->options().device;
  const std::span<std::byte> o_bytes =
      state->arrays.bytes(o, "o", self.core->options().dtype, device);
  const std::span<std::byte> lse_bytes = state->arrays.bytes(lse, "lse", DType::f32, device);
  const std::span lse_floats(reinterpret_cast<float*>(lse_bytes.data()),
                             lse_bytes.size() / sizeof(float));
  state->arrays.check("RingAttention.make_branch_state");
  state->core = self.core->make_branch_state(o_bytes, lse_floats, filled);
  return state;
}

constexpr const char* kRingDoc = R"(Exact attention over one rank's shard of a sequence.

Construction is collective: every rank makes one with the same options, and a mismatch is a
:class:`ConfigError` on every rank. It plans and allocates everything; :meth:`forward` and
:meth:`backward` are collective, too, and allocate only the results that they are not given. The GIL
is released while they run. One executor serves one caller at a time.

Args:
    pattern: which queries attend to which keys; has the number of query heads.
    placement: which rank holds which tokens, for as many ranks as the transport has.
    key_placement: the same for keys and values, if they are other tokens than the queries; None: as placement.
    transport: carries the rows; kept alive by the executor.
    batch: sequences per call.
    kv_heads: key/value heads, a divisor of the pattern's heads; None: as many. Query head h uses
        key/value head h // (heads // kv_heads).
    head_dim: 1 to 512.
    dtype: of q, k, v and the results: 'float32', 'float16', 'bfloat16' or a NumPy or PyTorch dtype.
    scale: of q.k, above 0; None: 1/sqrt(head_dim).
    mix_gradient: 'full' is the exact gradient, 'detached' holds the weights of the branches constant;
        that needs a state (:meth:`make_branch_state`) passed to forward and backward.
    schedule: 'ring' (rows hop from rank to rank: least memory), 'gather' (directly to the ranks that need them)
        or 'auto'.
    reproducible: the same bits for every ring size and placement.
    backward: False disables backward and saves its memory.
    recover: when memory runs out on any rank, all ranks try again with less: without caches, then some
        sequences, then some heads at a time, then by schedule 'ring'. The results are the same (to
        rounding, unless reproducible), and :attr:`recovery` says what was done. False: the first failure
        raises :class:`OutOfMemory`.
    backward_travel: which rows travel in backward; 'auto': fewer bytes.
    min_tokens_for_ring: shorter sequences gather when the schedule is 'auto'.
    max_qkv_elements: limit on the elements of q, k and v of one rank.
    max_communication_bytes: limit on the buffers for messages of one rank.
    blocking: for debugging: wait for each transfer where it is posted.
    flops_per_second, bytes_per_second: of one rank; 'auto' uses them to choose between ring and gather.
    device: of all arrays: 'cpu', 'cuda' or 'cuda:1', or a torch.device. On a CUDA device calls return when
        their work is enqueued: on the stream that they are given, else on PyTorch's current one if q is
        its tensor. For other arrays they wait for it.
    threads: number of computing threads, shared by all ranks of the process; 0: as many as the process may use.)";

void bind_executor(nb::module_& module) {
  // NOLINTNEXTLINE(bugprone-unused-raii): making it registers the class
  nb::class_<State>(
      module, "BranchState",
      "The output of every branch, which mix_gradient='detached' keeps from forward for "
      "backward. Made by :meth:`RingAttention.make_branch_state`.");

  auto ring = nb::class_<Ring>(module, "RingAttention", nb::type_slots(slots<Ring>()),
                               doc_with_options(kRingDoc));
  ring.def(
      "__init__",
      [](Ring* self, nb::handle pattern, nb::handle placement, const nb::kwargs& given) {
        if (!given.contains("transport")) throw nb::type_error("transport is missing");
        nb::object transport = given["transport"];
        Transport* link = nullptr;
        if (!nb::try_cast<Transport*>(transport, link) || link == nullptr)
          throw nb::type_error("transport is no annulus.Transport");
        RingOptions options = telling_others(
            *link, [&] { return options_from(pattern, placement, given, "transport"); });
        std::shared_ptr<RingAttention> core;
        construct(*link,
                  [&] { core = std::make_shared<RingAttention>(std::move(options), *link); });
        new (self) Ring(std::move(transport), std::move(core));
      },
      nb::arg("pattern").none(), nb::arg("placement").none(), nb::arg("options"),
      nb::sig(signature_with_options("__init__", ", transport: Transport) -> None")));
  ring.def(
      "forward",
      [](Ring& self, nb::handle q, nb::handle k, nb::handle v, nb::object o, nb::object lse,
         nb::handle state, nb::handle stream, nb::handle sinks, nb::handle dropout_seed,
         nb::handle dropout_seed_of_rank_0, nb::handle claims) {
        return forward(self, q, k, v, std::move(o), std::move(lse), state,
                       {stream, dropout_seed, dropout_seed_of_rank_0, claims}, sinks);
      },
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("o") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("state") = nb::none(), nb::arg("stream") = nb::none(),
      nb::kw_only(), nb::arg("sinks") = nb::none(), nb::arg("dropout_seed") = nb::none(),
      nb::arg("dropout_seed_of_rank_0") = nb::none(), nb::arg("claims") = nb::none(),
      nb::sig("def forward(self, q: ArrayT, k: ArrayT, v: ArrayT, o: ArrayT | None = None, "
              "lse: ArrayT | None = None, state: BranchState | None = None, stream: int | "
              "None = None, *, sinks: ArrayT | None = None, dropout_seed: int | None = None, "
              "dropout_seed_of_rank_0: bool = False, claims: str = '') -> tuple[ArrayT, ArrayT]"),
      R"(Attention of this rank's queries to all keys: (o, lse).

q is [batch, local tokens, heads, head_dim], k and v have kv_heads heads; tokens are in the placement's
order. o is like q; lse is float32 [batch, local tokens, heads], the natural log of the softmax's
denominator. Arrays of any framework with DLPack on the executor's device, any strides whose last axis
is contiguous, are used in place. Results are written into `o` and `lse` where given, else into new
arrays of q's framework (on CUDA devices PyTorch's only). `stream` is the CUDA stream on which to enqueue
the work, as a number (a cudaStream_t); None: see `device` of :class:`RingAttention`. With
mix_gradient='detached', `state` is filled for backward. `sinks`, float32 [heads], on every rank or on
none, are logits that take part in the softmax of their head's rows and have no value (:func:`attention`).
`dropout_seed`, the same whole number on every rank, is needed if dropout_p is not 0 (:func:`attention`). With
`dropout_seed_of_rank_0` the ranks may pass different ones, and all of them use that of rank 0. `claims` is any text that
must be the same on every rank: the ranks compare it with the rest of the call.
PyTorch tensors that require gradients are read as if detached, and results have no gradient: this is the
bare computation, not an autograd function (:func:`annulus.torch.ring_attention` is one).)");
  const auto define_backward = [&](const auto&... signature_and_doc) {
    ring.def(
        "backward",
        [](Ring& self, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
           nb::handle dout, nb::object dq, nb::object dk, nb::object dv, nb::handle state,
           nb::handle stream, nb::handle sinks, nb::object dsinks, nb::handle dropout_seed,
           nb::handle dropout_seed_of_rank_0, nb::handle claims) {
          return backward(self, q, k, v, o, lse, dout, std::move(dq), std::move(dk), std::move(dv),
                          state, {stream, dropout_seed, dropout_seed_of_rank_0, claims}, sinks,
                          std::move(dsinks));
        },
        nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("o").none(),
        nb::arg("lse").none(), nb::arg("do").none(), nb::arg("dq") = nb::none(),
        nb::arg("dk") = nb::none(), nb::arg("dv") = nb::none(), nb::arg("state") = nb::none(),
        nb::arg("stream") = nb::none(), nb::kw_only(), nb::arg("sinks") = nb::none(),
        nb::arg("dsinks") = nb::none(), nb::arg("dropout_seed") = nb::none(),
        nb::arg("dropout_seed_of_rank_0") = nb::none(), nb::arg("claims") = nb::none(),
        signature_and_doc...);
  };
  define_backward(
      nb::sig("def backward(self, q: ArrayT, k: ArrayT, v: ArrayT, o: ArrayT, lse: ArrayT, do: "
              "ArrayT, dq: ArrayT | None = None, dk: ArrayT | None = None, dv: ArrayT | None = "
              "None, state: BranchState | None = None, stream: int | None = None, *, sinks: None = "
              "None, dsinks: None = None, dropout_seed: int | None = None, "
              "dropout_seed_of_rank_0: bool = False, claims: str = '') -> tuple[ArrayT, ArrayT, "
              "ArrayT]"),
      R"(Gradients (dq, dk, dv) of this rank's shards.

q, k, v, o and lse are those of :meth:`forward`, `do` is the gradient of o, like q. Gradients are like
q, k and v; they are written into `dq`, `dk` and `dv` where given, else into new arrays. With
mix_gradient='detached', `state` is the one that forward has filled. `stream` as in forward; `dropout_seed`,
`dropout_seed_of_rank_0` and `claims` are forward's. With the `sinks` of
forward the result is (dq, dk, dv, dsinks): the gradient of the sinks from this rank's rows alone, float32
[heads], whose sum over the ranks is the whole one.)");
  define_backward(nb::sig(
      "def backward(self, q: ArrayT, k: ArrayT, v: ArrayT, o: ArrayT, lse: ArrayT, do: ArrayT, dq: "
      "ArrayT | None = None, dk: ArrayT | None = None, dv: ArrayT | None = None, state: "
      "BranchState | None = None, stream: int | None = None, *, sinks: ArrayT, dsinks: ArrayT | "
      "None = None, dropout_seed: int | None = None, dropout_seed_of_rank_0: bool = False, claims: "
      "str = '') -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]"));
  ring.def(
          "make_branch_state", &make_state, nb::kw_only(), nb::arg("o") = nb::none(),
          nb::arg("lse") = nb::none(), nb::arg("filled") = false,
          nb::sig("def make_branch_state(self, *, o: typing.Any | None = None, lse: typing.Any | "
                  "None = None, filled: bool = False) -> BranchState"),
          R"(Memory for what mix_gradient='detached' keeps from forward for backward: the output of every
branch for the rows that it selects.

Allocates the memory, or uses the caller's: `o` of branch_state_rows * head_dim elements of the
executor's dtype and `lse` of branch_state_rows float32 numbers, contiguous arrays of any shape on its
device, which the state keeps alive.
filled: a forward has written them already.)")
      .def(
          "set_documents",
          [](Ring& self, const Pattern& pattern) {
            self.set_documents(pattern.documents);
            self.documents_key.clear();
          },
          nb::arg("pattern"),
          R"(Takes the documents of a pattern that is otherwise its own, for the passes from now on.

For batches whose boundaries change with every step: plans anew, in the memory that the executor has, which only
grows. The last few plans are kept. Not collective: what is wrong on this rank, and ranks that have other documents,
are errors of the next pass on every rank. If memory runs out, or ran out before and calls are split (``recovery``), the
next pass makes the executor again, as ``recover`` says.

Args:
    pattern: see :meth:`Pattern.with_documents`.)")
      .def_rw("documents_key", &Ring::documents_key,
              "Any text by which a caller recognises the documents that it has set.")
      .def_prop_ro(
          "branch_state_rows", [](const Ring& self) { return self.core->branch_state_rows(); },
          "Rows of a branch state: batch x heads x selected local tokens, over all branches; 0 "
          "unless mix_gradient is 'detached'.")
      .def_static(
          "refuse",
          [](Transport& transport, const std::string& reason) {
            construct(transport, [&] { RingAttention::refuse(transport, reason); });
          },
          nb::arg("transport"), nb::arg("reason"),
          nb::sig("def refuse(transport: Transport, reason: str) -> typing.NoReturn"),
          R"(Takes the place of a construction or of a call of forward or backward, for a rank that has found an
error before it: the other ranks' construction or call raises a :class:`ConfigError` with this reason,
and so does this. Empty: another rank has the reason.)")
      .def(
          "interrupt", [](Ring& self) { self.core->interrupt(); },
          R"(Ends the running pass, or else the next one. Callable from any thread.

The pass soon raises :class:`Interrupted` on this rank and :class:`TransportError` on the others. The
executor and its transport are of no further use. Ctrl-C does this for a pass that the main thread has
called.)")
      .def(
          "synchronize",
          [](Ring& self) {
            const nb::gil_scoped_release no_gil;
            self.core->synchronize();
          },
          "Waits until a CUDA device has done what forward and backward have enqueued; "
          ":class:`DeviceError` if it could not. On the CPU there is nothing to wait for.")
      // Copies, which share their parts: set_documents makes other plans.
      .def_prop_ro(
          "plan", [](const Ring& self) { return self.core->plan(); }, "The plan of forward.")
      .def_prop_ro(
          "backward_plan", [](const Ring& self) { return self.core->backward_plan(); },
          "The plan of the side that travels in backward; ConfigError with backward=False.")
      .def_prop_ro(
          "schedule", [](const Ring& self) { return std::string(name_of(self.core->schedule())); },
          "The schedule as chosen: 'ring' or 'gather'.")
      .def_prop_ro(
          "transfers", [](const Ring& self) { return self.core->transfers(); },
          "How rows travel between ranks: 'host memory', 'device memory', 'shared device memory' "
          "(between processes of one host) or 'staged through host memory' and why; empty for a "
          "rank alone.")
      .def_prop_ro(
          "kernels", [](const Ring& self) { return self.core->kernels(); },
          "The kernels in use: the CPU's instruction set (:func:`isa`); on CUDA devices 'sm90', "
          "'portable' or one of them for each pass.")
      .def_prop_ro(
          "recovery", [](const Ring& self) { return self.core->recovery(); },
          "How it was made to fit after memory ran out: 'caches dropped' or, for example, "
          "'1 of 4 sequences at a time'; empty: it fitted.")
      .def_prop_ro(
          "transport", [](const Ring& self) { return self.transport; },
          nb::sig("def transport(self) -> Transport"), "The transport that carries the rows.")
      .def_prop_ro(
          "predicted_forward_bytes",
          [](const Ring& self) { return self.core->predicted_forward_bytes(); },
          "Bytes that this rank sends in one forward: what the transport counts.")
      .def_prop_ro(
          "predicted_backward_bytes",
          [](const Ring& self) { return self.core->predicted_backward_bytes(); },
          "Bytes that this rank sends in one backward.")
      .def_prop_ro(
          "memory_info", [](const Ring& self) { return dict_of(self.core->memory_info()); },
          nb::sig("def memory_info(self) -> dict[str, typing.Any]"),
          "Bytes that this executor holds: device, complexity (in words), workspace_bytes (all), "
          "of these "
          "communication_bytes and state_bytes; scratch_bytes (the threads', shared), "
          "cached_workspaces.")
      .def("__repr__", [](const Ring& self) {
        const RingOptions& options = self.core->options();
        const auto& transport = nb::cast<const Transport&>(self.transport);
        std::string plan;
        try {
          plan = fmt::format("schedule {}", name_of(self.core->schedule()));
        } catch (const Error&) {
          plan = "no plan";  // for these documents
        }
        return fmt::format("<RingAttention {}, {}: rank {} of {}, {} tokens, {}, {}>",
                           options.pattern.name, options.placement.name(), transport.rank(),
                           transport.size(), options.placement.tokens(),
                           python_name_of(options.dtype), plan);
      });
}

}  // namespace

void bind_ring(nb::module_& module) {
  module.def("ring_options", &listed_options,
             nb::sig("def ring_options() -> list[dict[str, typing.Any]]"),
             "The options of an executor but its pattern and placement: one dict each.");
  bind_executor(module);
}

}  // namespace annulus::python
