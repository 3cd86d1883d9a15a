#include "annulus/reference.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "bindings.h"
#include "values.h"

namespace annulus::python {
namespace {

using Array = nb::ndarray<const double, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, double>;
using Sinks = std::optional<nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;

std::span<const double> elements(const Array& array) { return {array.data(), array.size()}; }
std::span<const double> elements(const Sinks& sinks) {
  return sinks ? std::span(sinks->data(), sinks->size()) : std::span<const double>();
}

void require(const Array& array, const char* name, std::int64_t batch, std::int64_t tokens,
             std::int64_t heads, std::int64_t dim) {
  const std::int64_t expected[] = {batch, tokens, heads, dim};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    if (static_cast<std::int64_t>(array.shape(axis)) == expected[axis]) continue;
    throw ConfigError(fmt::format("reference: {} has {} elements along axis {}, expected {}", name,
                                  array.shape(axis), axis, expected[axis]));
  }
}

reference::Shape shape_of(const Pattern& pattern, const Array& q, const Array& k, const Array& v) {
  reference::Shape shape;
  shape.batch = static_cast<std::int64_t>(q.shape(0));
  shape.tokens = static_cast<std::int64_t>(q.shape(1));
  shape.q_heads = static_cast<int>(q.shape(2));
  shape.kv_heads = static_cast<int>(k.shape(2));
  shape.head_dim = static_cast<int>(q.shape(3));
  require(q, "q", shape.batch, shape.tokens, pattern.heads, shape.head_dim);
  shape.key_tokens = static_cast<std::int64_t>(k.shape(1));
  require(k, "k", shape.batch, shape.keys(), shape.kv_heads, shape.head_dim);
  require(v, "v", shape.batch, shape.keys(), shape.kv_heads, shape.head_dim);
  if (shape.kv_heads < 1 || shape.q_heads % shape.kv_heads != 0) {
    throw ConfigError(fmt::format("reference: k has {} heads, expected a divisor of q's {}",
                                  shape.kv_heads, shape.q_heads));
  }
  return shape;
}

Result hand_over(std::vector<double> values, std::initializer_list<std::size_t> shape) {
  auto* owned = new std::vector<double>(std::move(values));
  const nb::capsule owner(owned,
                          [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
  return Result(owned->data(), shape, owner);
}

nb::tuple forward(const Array& q, const Array& k, const Array& v, const Pattern& pattern,
                  std::optional<double> scale, const Sinks& sinks, double softcap, double dropout_p,
                  std::uint64_t dropout_seed) {
  const reference::Shape shape = shape_of(pattern, q, k, v);
  reference::Output out;
  {
    const nb::gil_scoped_release no_gil;
    out = reference::forward(pattern, shape, elements(q), elements(k), elements(v), scale,
                             elements(sinks), {softcap, dropout_p, dropout_seed});
  }
  return nb::make_tuple(
      hand_over(std::move(out.o), {q.shape(0), q.shape(1), q.shape(2), q.shape(3)}),
      hand_over(std::move(out.lse), {q.shape(0), q.shape(1), q.shape(2)}));
}

nb::tuple backward(const Array& q, const Array& k, const Array& v, const Array& dout,
                   const Pattern& pattern, std::optional<double> scale,
                   const std::string& mix_gradient, const Sinks& sinks, double softcap,
                   double dropout_p, std::uint64_t dropout_seed) {
  const reference::Shape shape = shape_of(pattern, q, k, v);
  require(dout, "do", shape.batch, shape.tokens, shape.q_heads, shape.head_dim);
  const MixGradient mix = parse_mix_gradient(mix_gradient);
  reference::Gradients out;
  {
    const nb::gil_scoped_release no_gil;
    out = reference::backward(pattern, shape, elements(q), elements(k), elements(v), elements(dout),
                              mix, scale, elements(sinks), {softcap, dropout_p, dropout_seed});
  }
  const auto like = [](std::vector<double> values, const Array& array) {
    return hand_over(std::move(values),
                     {array.shape(0), array.shape(1), array.shape(2), array.shape(3)});
  };
  const nb::object dq = nb::cast(like(std::move(out.dq), q));
  const nb::object dk = nb::cast(like(std::move(out.dk), k));
  const nb::object dv = nb::cast(like(std::move(out.dv), v));
  if (!sinks) return nb::make_tuple(dq, dk, dv);
  return nb::make_tuple(dq, dk, dv, hand_over(std::move(out.dsinks), {sinks->size()}));
}

#define ANNULUS_DOUBLES "numpy.typing.NDArray[numpy.float64]"
#define ANNULUS_SOFTMAX ", softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: int = 0"

}  // namespace

void bind_reference(nb::module_& module) {
  module.def(
      "reference_forward", &forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("pattern"),
      nb::kw_only(), nb::arg("scale") = nb::none(), nb::arg("sinks") = nb::none(),
      nb::arg("softcap") = 0.0, nb::arg("dropout_p") = 0.0, nb::arg("dropout_seed") = 0,
      nb::sig("def reference_forward(q: " ANNULUS_DOUBLES ", k: " ANNULUS_DOUBLES
              ", v: " ANNULUS_DOUBLES
              ", pattern: Pattern, *, scale: float | None = None, sinks: " ANNULUS_DOUBLES
              " | None = None" ANNULUS_SOFTMAX ") "
              "-> tuple[" ANNULUS_DOUBLES ", " ANNULUS_DOUBLES "]"),
      R"(The definition of attention in float64, slow on purpose: what everything else is compared with.

Args:
    q: [batch, tokens, heads, head_dim], C-contiguous; any head_dim.
    k, v: like q, with as many heads or a divisor of them, and any number of tokens.
    pattern: which queries attend to which keys.
    scale: of q.k; None: 1/sqrt(head_dim).
    sinks: [heads], see :func:`attention`.
    softcap, dropout_p, dropout_seed: see :func:`attention`.

Returns:
    (o, lse): like q, and the log-sum-exp of every row, [batch, tokens, heads].)");
  const auto define_backward = [&](const auto&... signature_and_doc) {
    module.def("reference_backward", &backward, nb::arg("q"), nb::arg("k"), nb::arg("v"),
               nb::arg("do"), nb::arg("pattern"), nb::kw_only(), nb::arg("scale") = nb::none(),
               nb::arg("mix_gradient") = "full", nb::arg("sinks") = nb::none(),
               nb::arg("softcap") = 0.0, nb::arg("dropout_p") = 0.0, nb::arg("dropout_seed") = 0,
               signature_and_doc...);
  };
#define ANNULUS_BACKWARD                                                                       \
  "def reference_backward(q: " ANNULUS_DOUBLES ", k: " ANNULUS_DOUBLES ", v: " ANNULUS_DOUBLES \
  ", do: " ANNULUS_DOUBLES                                                                     \
  ", pattern: Pattern, *, scale: float | None = None, mix_gradient: "                          \
  "typing.Literal['full', 'detached'] = 'full', sinks: "
  define_backward(
      nb::sig(ANNULUS_BACKWARD "None = None" ANNULUS_SOFTMAX ") -> tuple[" ANNULUS_DOUBLES
                               ", " ANNULUS_DOUBLES ", " ANNULUS_DOUBLES "]"),
      R"(Gradients (dq, dk, dv) of :func:`reference_forward`, in float64.

Args:
    q, k, v, pattern, scale, sinks, softcap, dropout_p, dropout_seed: as for reference_forward.
    do: gradient of its output, like q.
    mix_gradient: 'full' is the exact gradient, 'detached' holds the weights of the branches constant.

Returns:
    (dq, dk, dv); with sinks (dq, dk, dv, dsinks).)");
  define_backward(nb::sig(ANNULUS_BACKWARD ANNULUS_DOUBLES ANNULUS_SOFTMAX
                          ") -> tuple[" ANNULUS_DOUBLES ", " ANNULUS_DOUBLES ", " ANNULUS_DOUBLES
                          ", " ANNULUS_DOUBLES "]"));
#undef ANNULUS_BACKWARD
}

}  // namespace annulus::python
