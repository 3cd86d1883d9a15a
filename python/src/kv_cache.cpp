#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_cache.h"
#include "arrays.h"
#include "bindings.h"
#include "executor.h"
#include "flag.h"
#include "interrupt.h"
#include "ring/option_text.h"
#include "transport.h"
#include "values.h"

namespace annulus::python {
namespace {

// A cache and the transport that it uses.
struct KeyValueCache {
  nb::object transport;
  std::shared_ptr<RingCache> core;  // null: closed
  CallerStream stream;

  [[nodiscard]] Transport& ends() const { return nb::cast<Transport&>(transport); }
  // A share, because another thread may close the cache during a call.
  [[nodiscard]] std::shared_ptr<RingCache> open() const {
    if (core == nullptr) throw ConfigError("RingCache: this cache is closed");
    return core;
  }
  void close() {
    stream = {};
    std::shared_ptr<RingCache> last = std::exchange(core, nullptr);
    const nb::gil_scoped_release no_gil;
    last.reset();
  }
};

// An argument of a constructor whose errors the other ranks must hear, too.
std::int64_t whole_number(nb::handle value, const char* name, std::int64_t most = INT64_MAX) {
  std::int64_t number = 0;
  if (!nb::try_cast(value, number) || number > most || number < -most) {
    throw nb::type_error(
        fmt::format("{} is {}: a whole number was expected", name, nb::repr(value).c_str())
            .c_str());
  }
  return number;
}

int small_number(nb::handle value, const char* name) {
  return static_cast<int>(whole_number(value, name, INT32_MAX));
}

// A name, or a torch.device.
Device parse_device(nb::handle value) {
  Device device;
  const auto text = nb::cast<std::string>(nb::object(nb::str(value)));
  const std::string expected =
      ring::read_text({"device", ring::Shared::own, ring::Topic::execution, ""}, text, device);
  if (!expected.empty())
    throw ConfigError(fmt::format("device is '{}', expected {}", text, expected));
  return device;
}

// The tokens of a call, and what they are views of.
struct Tokens {
  std::vector<std::int64_t> counts;
  NewTokens core;

  Tokens(nb::handle lengths, nb::handle placement) {
    const nb::object list =
        nb::hasattr(lengths, "tolist") ? lengths.attr("tolist")() : nb::borrow(lengths);
    if (!list.is_none() && (!nb::try_cast(list, counts) || counts.empty())) {
      throw ConfigError(
          fmt::format("lengths is {}, expected a whole number for each entry, or None",
                      nb::repr(lengths).c_str()));
    }
    core.counts = counts;
    if (!placement.is_none())
      core.placement = instance_of<Placement>(placement, "placement", "a Placement");
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;
};

// Runs a call without the GIL. A complaint about an array makes it fail on every rank, as for
// executors: the array's view has no axes.
void run(KeyValueCache& self, const Arrays& arrays, const char* method,
         const std::function<void()>& call) {
  Transport& transport = self.ends();
  const auto all = [&] {
    const auto leave = [&] {
      if (arrays.is_given()) self.stream.leave(*self.open());
    };
    try {
      call();
      if (arrays.waits()) self.open()->synchronize();
    } catch (...) {
      leave();
      throw;
    }
    leave();
  };
  try {
    run_interruptibly(waits_in_cpp(transport) && on_main_thread(), all,
                      [&] { transport.abort("interrupted"); });
  } catch (const ConfigError&) {
    arrays.check(
        fmt::format("[rank {}/{}] RingCache.{}", transport.rank(), transport.size(), method)
            .c_str());
    throw;
  }
}

void follow_stream(KeyValueCache& self, const Arrays& arrays) {
  if (arrays.stream() && arrays.complaint().empty())
    self.stream.use(*self.open(), *arrays.stream());
}

void append(KeyValueCache& self, nb::handle k, nb::handle v, nb::handle lengths,
            nb::handle placement, nb::handle stream) {
  const std::shared_ptr<RingCache> core = self.open();
  Arrays arrays(core->options().device,
                telling_others(self.ends(), [&] { return parse_stream(stream); }));
  ConstTensorView k_view, v_view;
  std::optional<Tokens> tokens;
  telling_others(self.ends(), [&] {
    tokens.emplace(lengths, placement);
    k_view = arrays.input(k, "k");
    v_view = arrays.input(v, "v");
    follow_stream(self, arrays);
  });
  run(self, arrays, "append", [&] { core->append(k_view, v_view, tokens->core); });
}

// attend, or step where there are k and v.
nb::tuple attend(KeyValueCache& self, nb::handle q, const std::optional<nb::handle>& k,
                 const std::optional<nb::handle>& v, nb::object o, nb::object lse,
                 nb::handle lengths, nb::handle placement, nb::handle sinks, nb::handle stream) {
  const std::shared_ptr<RingCache> core = self.open();
  Arrays arrays(core->options().device,
                telling_others(self.ends(), [&] { return parse_stream(stream); }));
  ConstTensorView q_view, k_view, v_view;
  TensorView o_view, lse_view;
  OptionalInputs more;
  std::optional<Tokens> tokens;
  std::optional<Result> o_result, lse_result;
  telling_others(self.ends(), [&] {
    tokens.emplace(lengths, placement);
    q_view = arrays.input(q, "q");
    if (k) k_view = arrays.input(*k, "k");
    if (v) v_view = arrays.input(*v, "v");
    if (!sinks.is_none()) more.sinks = arrays.input(sinks, "sinks", 1);
    o_result.emplace(std::move(o), q, q_view, core->options().dtype, 4, arrays.stream());
    lse_result.emplace(std::move(lse), q, q_view, DType::f32, 3, arrays.stream());
    o_view = arrays.output(o_result->writable(), "o");
    lse_view = arrays.output(lse_result->writable(), "lse", 3);
    follow_stream(self, arrays);
  });
  run(self, arrays, k ? "step" : "attend", [&] {
    if (k) {
      core->step(q_view, k_view, v_view, o_view, lse_view, tokens->core, more);
    } else {
      core->attend(q_view, o_view, lse_view, tokens->core, more);
    }
  });
  return nb::make_tuple(o_result->finish(), lse_result->finish());
}

constexpr const char* kCacheDoc =
    R"(Keys and values of growing sequences, spread over the ranks of a ring.

Keys and values stay on the ranks that keep them: new queries go there, and partial results come back in
float32, so that a call sends as many bytes for a long sequence as for a short one. For inference: there
are no gradients, and tensors that require them are read as if detached.

Construction, :meth:`append`, :meth:`attend` and :meth:`step` are collective: every rank makes the same calls in
the same order, and whatever one rank finds wrong is a :class:`ConfigError` on every rank, after which the cache is
as it was. Without a `placement` every rank passes all new rows, and gets all results, with the same bits.
With one, a rank passes the rows that it gives to it, and gets the results of its own queries.

Args:
    transport: carries queries and results; kept alive by the cache. None: this process alone.
    batch: entries, sequences of lengths of their own.
    capacity: tokens that an entry may have, over all ranks. With a window: tokens that it has to hold at a
        time, which is the window and the new tokens of one append.
    heads: query heads.
    kv_heads: key/value heads, a divisor of `heads`; None: as many.
    head_dim: 1 to 512.
    dtype: of q, k, v and o: 'float32', 'float16', 'bfloat16' or a NumPy or PyTorch dtype.
    scale: of q.k, above 0; None: 1/sqrt(head_dim).
    causal: new tokens see those before them, and themselves; False: all tokens of their entry.
    window: (before, after), as in :class:`Pattern`. Tokens that no later query can see give their memory to
        new ones. None: no window.
    block: neighbouring tokens stay on one rank in blocks of this length, and blocks go round the ranks.
    device: of all arrays: 'cpu', 'cuda:0', ...
    threads: of the CPU, as in :class:`RingAttention`.)";

std::vector<std::int64_t> lengths_of(const KeyValueCache& self) {
  const std::shared_ptr<RingCache> core = self.open();
  const auto lengths = core->lengths();
  return {lengths.begin(), lengths.end()};
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  auto cache = nb::class_<KeyValueCache>(module, "RingCache",
                                         nb::type_slots(slots<KeyValueCache>()), kCacheDoc);
  cache.def(
      "__init__",
      [](KeyValueCache* self, nb::object transport, nb::handle batch, nb::handle capacity,
         nb::handle heads, nb::handle kv_heads, nb::handle head_dim, nb::handle dtype,
         nb::handle scale, nb::handle causal, nb::handle window, nb::handle block,
         nb::handle device, nb::handle threads) {
        if (transport.is_none()) transport = nb::cast(std::move(make_in_process_ring(1).front()));
        Transport* ends = nullptr;
        if (!nb::try_cast<Transport*>(transport, ends) || ends == nullptr)
          throw nb::type_error("transport is no annulus.Transport");
        const CacheOptions options = telling_others(*ends, [&] {
          CacheOptions out;
          out.batch = whole_number(batch, "batch");
          out.capacity = whole_number(capacity, "capacity");
          out.heads = small_number(heads, "heads");
          out.kv_heads = kv_heads.is_none() ? out.heads : small_number(kv_heads, "kv_heads");
          out.head_dim = small_number(head_dim, "head_dim");
          out.dtype = parse_dtype(dtype);
          if (!scale.is_none()) out.scale = nb::cast<double>(scale);
          out.causal = *optional_value<Flag>(causal, "causal", "True or False");
          out.window = parse_window(window);
          out.block = whole_number(block, "block");
          out.device = parse_device(device);
          out.threads = small_number(threads, "threads");
          return out;
        });
        std::shared_ptr<RingCache> core;
        construct(*ends, [&] { core = std::make_shared<RingCache>(options, *ends); });
        new (self) KeyValueCache{std::move(transport), std::move(core), {}};
      },
      nb::arg("transport").none() = nb::none(), nb::kw_only(), nb::arg("batch") = 1,
      nb::arg("capacity"), nb::arg("heads"), nb::arg("kv_heads").none() = nb::none(),
      nb::arg("head_dim"), nb::arg("dtype") = "float32", nb::arg("scale").none() = nb::none(),
      nb::arg("causal") = true, nb::arg("window").none() = nb::none(), nb::arg("block") = 128,
      nb::arg("device") = "cpu", nb::arg("threads") = 0,
      nb::sig("def __init__(self, transport: Transport | None = None, *, batch: int = 1, capacity: "
              "int, heads: int, kv_heads: int | None = None, head_dim: int, dtype: typing.Any = "
              "'float32', scale: float | None = None, causal: bool = True, window: tuple[int, int] "
              "| None = None, block: int = 128, device: str = 'cpu', threads: int = 0) -> None"));
  cache.def("append", &append, nb::arg("k").none(), nb::arg("v").none(),
            nb::arg("lengths").none() = nb::none(), nb::arg("placement").none() = nb::none(),
            nb::kw_only(), nb::arg("stream") = nb::none(),
            nb::sig("def append(self, k: typing.Any, v: typing.Any, lengths: "
                    "collections.abc.Sequence[int] | None = None, placement: Placement | None = "
                    "None, *, stream: int | None = None) -> None"),
            R"(Keys and values of new tokens, behind those that the entries have.

k and v are [batch, new tokens, kv_heads, head_dim]. `lengths`: how many rows of each entry count, from the
first on; None: all. `placement`: which of the new tokens this rank passes. `stream` as in
:meth:`RingAttention.forward`.)");
  cache.def(
      "attend",
      [](KeyValueCache& self, nb::handle q, nb::handle lengths, nb::handle placement,
         nb::handle sinks, nb::object o, nb::object lse, nb::handle stream) {
        return attend(self, q, {}, {}, std::move(o), std::move(lse), lengths, placement, sinks,
                      stream);
      },
      nb::arg("q").none(), nb::arg("lengths").none() = nb::none(),
      nb::arg("placement").none() = nb::none(), nb::kw_only(), nb::arg("sinks") = nb::none(),
      nb::arg("o") = nb::none(), nb::arg("lse") = nb::none(), nb::arg("stream") = nb::none(),
      nb::sig("def attend(self, q: ArrayT, lengths: collections.abc.Sequence[int] | None = None, "
              "placement: Placement | None = None, *, sinks: ArrayT | None = None, o: ArrayT | "
              "None = None, lse: ArrayT | None = None, stream: int | None = None) -> tuple[ArrayT, "
              "ArrayT]"),
      R"(Attention of the last tokens of the entries: (o, lse).

q is [batch, tokens, heads, head_dim]: the last rows of each entry, `lengths` of them where given. o is like q;
lse is float32 [batch, tokens, heads]; rows that do not count get 0 and -inf. `sinks` as in
:meth:`RingAttention.forward`. Results are written into `o` and `lse` where given.)");
  cache.def(
      "step",
      [](KeyValueCache& self, nb::handle q, nb::handle k, nb::handle v, nb::handle lengths,
         nb::handle placement, nb::handle sinks, nb::object o, nb::object lse, nb::handle stream) {
        return attend(self, q, k, v, std::move(o), std::move(lse), lengths, placement, sinks,
                      stream);
      },
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
      nb::arg("lengths").none() = nb::none(), nb::arg("placement").none() = nb::none(),
      nb::kw_only(), nb::arg("sinks") = nb::none(), nb::arg("o") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("stream") = nb::none(),
      nb::sig("def step(self, q: ArrayT, k: ArrayT, v: ArrayT, lengths: "
              "collections.abc.Sequence[int] | None = None, placement: Placement | None = None, *, "
              "sinks: ArrayT | None = None, o: ArrayT | None = None, lse: ArrayT | None = None, "
              "stream: int | None = None) -> tuple[ArrayT, ArrayT]"),
      "append(k, v) and attend(q) of the same tokens, with one agreement between the ranks.");
  cache
      .def(
          "truncate",
          [](KeyValueCache& self, std::int64_t entry, std::int64_t length) {
            self.open()->truncate(entry, length);
          },
          nb::arg("entry"), nb::arg("length") = 0,
          R"(Forgets an entry's tokens from `length` on: 0 for a new sequence, or less than a draft was long.

Sends nothing; every rank must do the same. ConfigError where the window of a next token begins before the oldest
token that is left.)")
      .def(
          "copy_entry",
          [](KeyValueCache& self, std::int64_t source, std::int64_t target) {
            const nb::gil_scoped_release no_gil;
            self.open()->copy_entry(source, target);
          },
          nb::arg("source"), nb::arg("target"),
          "Entry `target` becomes a copy of `source`, for beams. Sends nothing; every rank must do "
          "the same.")
      .def(
          "synchronize",
          [](KeyValueCache& self) {
            const nb::gil_scoped_release no_gil;
            self.open()->synchronize();
          },
          "Waits until a CUDA device has done what calls have enqueued.")
      .def(
          "predicted_append_bytes",
          [](const KeyValueCache& self, std::int64_t new_tokens, nb::handle lengths,
             nb::handle placement) {
            const Tokens tokens(lengths, placement);
            return self.open()->predicted_append_bytes(new_tokens, tokens.core);
          },
          nb::arg("new_tokens"), nb::arg("lengths").none() = nb::none(),
          nb::arg("placement").none() = nb::none(),
          nb::sig("def predicted_append_bytes(self, new_tokens: int, lengths: "
                  "collections.abc.Sequence[int] | None = None, placement: Placement | None = "
                  "None) -> int"),
          "Bytes that this rank would send in :meth:`append` of so many tokens to every entry.")
      .def(
          "predicted_attend_bytes",
          [](const KeyValueCache& self, std::int64_t new_tokens, nb::handle lengths,
             nb::handle placement) {
            const Tokens tokens(lengths, placement);
            return self.open()->predicted_attend_bytes(new_tokens, tokens.core);
          },
          nb::arg("new_tokens"), nb::arg("lengths").none() = nb::none(),
          nb::arg("placement").none() = nb::none(),
          nb::sig("def predicted_attend_bytes(self, new_tokens: int, lengths: "
                  "collections.abc.Sequence[int] | None = None, placement: Placement | None = "
                  "None) -> int"),
          "Bytes that this rank would send in :meth:`attend` of so many tokens of every entry.")
      .def("close", &KeyValueCache::close,
           "Frees the keys and values, after the work that has been enqueued. The transport stays "
           "open. Later calls are "
           "errors of this rank alone: every rank closes its cache. Idempotent; also done by "
           "``with``.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> RingCache"))
      .def(
          "__exit__", [](KeyValueCache& self, const nb::args&) { self.close(); },
          nb::sig("def __exit__(self, *error: object) -> None"))
      .def_prop_ro("lengths", &lengths_of, "Tokens appended so far, by entry.")
      .def_prop_ro(
          "cache_bytes", [](const KeyValueCache& self) { return self.open()->cache_bytes(); },
          "Bytes of the keys and values of this rank.")
      .def_prop_ro(
          "workspace_bytes",
          [](const KeyValueCache& self) { return self.open()->workspace_bytes(); },
          "Bytes of messages and partial results.")
      .def_prop_ro(
          "transfers", [](const KeyValueCache& self) { return self.open()->transfers(); },
          "As :attr:`RingAttention.transfers`.")
      .def_prop_ro(
          "transport", [](const KeyValueCache& self) { return self.transport; },
          nb::sig("def transport(self) -> Transport"), "What carries queries and results.")
      .def("__repr__", [](const KeyValueCache& self) {
        if (self.core == nullptr) return std::string("<RingCache: closed>");
        const CacheOptions& options = self.core->options();
        return fmt::format(
            "<RingCache: rank {} of {}, {} entries of up to {} tokens, {} and {} "
            "heads of {}, {}>",
            self.ends().rank(), self.ends().size(), options.batch, options.capacity, options.heads,
            options.kv_heads, options.head_dim, python_name_of(options.dtype));
      });
}

}  // namespace annulus::python
