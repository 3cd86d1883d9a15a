#include "ring/tensor_check.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace annulus::ring {
namespace {

struct Check {
  const RingOptions& options;
  int rank;

  [[nodiscard]] std::string tensor(const char* name, const ConstTensorView& view,
                                   bool of_keys) const;
  [[nodiscard]] std::string lse(const ConstTensorView& view) const;
  [[nodiscard]] std::string sinks(const char* name,
                                  const std::optional<ConstTensorView>& view) const;
  [[nodiscard]] std::string seed(const std::optional<DropoutSeed>& given) const;
};

std::string Check::tensor(const char* name, const ConstTensorView& view, bool of_keys) const {
  const Placement& placement = of_keys ? options.keys() : options.placement;
  const std::int64_t tokens = placement.local_tokens(rank);
  const std::int64_t heads = of_keys ? options.kv_heads : options.pattern.heads;
  return complaint_about(name, view,
                         {4,
                          {options.batch, tokens, heads, options.head_dim},
                          options.dtype,
                          options.device,
                          "",
                          &placement});
}

std::string Check::lse(const ConstTensorView& view) const {
  const std::int64_t tokens = options.placement.local_tokens(rank);
  return complaint_about("lse", view,
                         {3,
                          {options.batch, tokens, options.pattern.heads},
                          DType::f32,
                          options.device,
                          "",
                          &options.placement});
}

std::string Check::sinks(const char* name, const std::optional<ConstTensorView>& view) const {
  if (!view.has_value()) return "";
  return complaint_about(
      name, *view,
      {1, {options.pattern.heads}, DType::f32, options.device, "one number per query head"});
}

std::string Check::seed(const std::optional<DropoutSeed>& given) const {
  if (options.dropout_p == 0 || given.has_value()) return "";
  return fmt::format(
      "dropout_p is {}, but there is no dropout_seed: pass the same one on every rank",
      options.dropout_p);
}

std::string first_of(std::initializer_list<std::string> complaints) {
  for (const std::string& complaint : complaints) {
    if (!complaint.empty()) return complaint;
  }
  return "";
}

}  // namespace

std::string complaint_about(const char* name, const ConstTensorView& view,
                            const ExpectedTensor& expected) {
  const auto axes = static_cast<std::size_t>(expected.axes);
  if (view.rank != expected.axes ||
      !std::equal(view.shape.begin(), view.shape.begin() + expected.axes, expected.shape.begin())) {
    const std::string why = expected.placement == nullptr
                                ? std::string(expected.why)
                                : fmt::format("placement '{}' gives this rank {} tokens",
                                              expected.placement->name(), expected.shape[1]);
    return fmt::format("{} is {}, expected [{}]: {}", name, shape_string(view),
                       fmt::join(std::span(expected.shape).first(axes), ", "), why);
  }
  if (view.dtype != expected.dtype) {
    return fmt::format("{} is {}, expected {}", name, name_of(view.dtype), name_of(expected.dtype));
  }
  if (view.device != expected.device) {
    return fmt::format("{} is on {}, expected {} like all tensors of this executor", name,
                       name_of(view.device), name_of(expected.device));
  }
  if (axes == 4 && view.stride[3] != 1 && view.shape[3] > 1) {
    return fmt::format("{} has stride {} on its last axis, expected 1: make head_dim contiguous",
                       name, view.stride[3]);
  }
  if (view.data == nullptr && view.elements() > 0)
    return fmt::format("{} has no data (null pointer)", name);
  return "";
}

std::string check_distinct(const char* name, const ConstTensorView& view) {
  if (view.rank < 1 || view.rank > 4) return "";  // rejected anyway
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.stride[axis] != 0 || view.shape[axis] <= 1 || view.elements() == 0) continue;
    return fmt::format("{} has stride 0 on axis {}, expected a tensor whose elements are distinct",
                       name, axis);
  }
  return "";
}

std::string check_apart(std::span<const NamedTensor> results, std::span<const NamedTensor> read) {
  for (const NamedTensor& result : results) {
    for (const std::span<const NamedTensor>& others : {read, results}) {
      for (const NamedTensor& other : others) {
        if (result.name == other.name || !share_memory(result.view, other.view)) continue;
        return fmt::format("{} shares memory with {}, expected memory of its own", result.name,
                           other.name);
      }
    }
  }
  return "";
}

std::string complaint_about(const ForwardTensors& t, const RingOptions& options, int rank) {
  const Check check{options, rank};
  std::string complaint = first_of(
      {check.tensor("q", t.q, false), check.tensor("k", t.k, true), check.tensor("v", t.v, true),
       check.tensor("o", t.o, false), check.lse(t.lse), check.sinks("sinks", t.sinks),
       check.seed(t.values.dropout), check_distinct("o", t.o), check_distinct("lse", t.lse)});
  if (!complaint.empty()) return complaint;
  const NamedTensor results[] = {{"o", t.o}, {"lse", t.lse}};
  const NamedTensor read[] = {{"q", t.q}, {"k", t.k}, {"v", t.v}, {"sinks", t.sinks.value_or(t.v)}};
  return check_apart(results, std::span(read, t.sinks ? 4 : 3));
}

std::string complaint_about(const BackwardTensors& t, const RingOptions& options, int rank) {
  const Check check{options, rank};
  std::string complaint = first_of(
      {options.backward ? "" : "this executor was built with backward = false",
       check.tensor("q", t.q, false), check.tensor("k", t.k, true), check.tensor("v", t.v, true),
       check.tensor("o", t.o, false), check.lse(t.lse), check.tensor("dout", t.dout, false),
       check.tensor("dq", t.dq, false), check.tensor("dk", t.dk, true),
       check.tensor("dv", t.dv, true), check.sinks("sinks", t.sinks),
       check.sinks("dsinks", t.dsinks), check.seed(t.values.dropout),
       t.dsinks && !t.sinks ? "dsinks is given, but sinks is not: pass what forward got" : "",
       check_distinct("dq", t.dq), check_distinct("dk", t.dk), check_distinct("dv", t.dv),
       t.dsinks ? check_distinct("dsinks", *t.dsinks) : ""});
  if (!complaint.empty()) return complaint;
  const NamedTensor results[] = {
      {"dq", t.dq}, {"dk", t.dk}, {"dv", t.dv}, {"dsinks", t.dsinks.value_or(t.dv)}};
  const NamedTensor read[] = {{"q", t.q},
                              {"k", t.k},
                              {"v", t.v},
                              {"o", t.o},
                              {"lse", t.lse},
                              {"dout", t.dout},
                              {"sinks", t.sinks.value_or(t.dout)}};
  return check_apart(std::span(results, t.dsinks ? 4 : 3), std::span(read, t.sinks ? 7 : 6));
}

}  // namespace annulus::ring
