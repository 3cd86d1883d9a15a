#include "ring/tensor_check.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>

#include <fmt/format.h>

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
};

std::string Check::tensor(const char* name, const ConstTensorView& view, bool of_keys) const {
  const Placement& placement = of_keys ? options.keys() : options.placement;
  const std::int64_t tokens = placement.local_tokens(rank);
  const std::int64_t heads = of_keys ? options.kv_heads : options.pattern.heads;
  const std::array<std::int64_t, 4> expected{options.batch, tokens, heads, options.head_dim};
  if (view.rank != 4 || view.shape != expected) {
    return fmt::format(
        "{} is {}, expected [{}, {}, {}, {}]: placement '{}' gives this rank {} tokens", name,
        shape_string(view), expected[0], expected[1], expected[2], expected[3], placement.name(),
        tokens);
  }
  if (view.dtype != options.dtype) {
    return fmt::format("{} is {}, expected {}", name, name_of(view.dtype), name_of(options.dtype));
  }
  if (view.device != options.device) {
    return fmt::format("{} is on {}, expected {} like all tensors of this executor", name,
                       name_of(view.device), name_of(options.device));
  }
  if (view.stride[3] != 1 && options.head_dim > 1) {
    return fmt::format("{} has stride {} on its last axis, expected 1: make head_dim contiguous",
                       name, view.stride[3]);
  }
  if (view.data == nullptr && view.elements() > 0)
    return fmt::format("{} has no data (null pointer)", name);
  return "";
}

std::string Check::lse(const ConstTensorView& view) const {
  const std::int64_t tokens = options.placement.local_tokens(rank);
  const std::array<std::int64_t, 4> expected{options.batch, tokens, options.pattern.heads, 0};
  if (view.rank != 3 || view.shape != expected) {
    return fmt::format("lse is {}, expected [{}, {}, {}]: placement '{}' gives this rank {} tokens",
                       shape_string(view), expected[0], expected[1], expected[2],
                       options.placement.name(), tokens);
  }
  if (view.dtype != DType::f32) return fmt::format("lse is {}, expected fp32", name_of(view.dtype));
  if (view.device != options.device) {
    return fmt::format("lse is on {}, expected {} like all tensors of this executor",
                       name_of(view.device), name_of(options.device));
  }
  if (view.data == nullptr && view.elements() > 0) return "lse has no data (null pointer)";
  return "";
}

std::string Check::sinks(const char* name, const std::optional<ConstTensorView>& view) const {
  if (!view.has_value()) return "";
  if (view->rank != 1 || view->shape[0] != options.pattern.heads) {
    return fmt::format("{} is {}, expected [{}]: one number per query head", name,
                       shape_string(*view), options.pattern.heads);
  }
  if (view->dtype != DType::f32)
    return fmt::format("{} is {}, expected fp32", name, name_of(view->dtype));
  if (view->device != options.device) {
    return fmt::format("{} is on {}, expected {} like all tensors of this executor", name,
                       name_of(view->device), name_of(options.device));
  }
  if (view->data == nullptr) return fmt::format("{} has no data (null pointer)", name);
  return "";
}

// Elements of a result must not share memory, or threads would overwrite each other's. Detects
// strides of 0, as in expanded views, not every overlap.
std::string check_distinct(const char* name, const ConstTensorView& view) {
  if (view.rank < 1 || view.rank > 4) return "";  // rejected anyway
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.stride[axis] != 0 || view.shape[axis] <= 1 || view.elements() == 0) continue;
    return fmt::format("{} has stride 0 on axis {}, expected a tensor whose elements are distinct",
                       name, axis);
  }
  return "";
}

struct Named {
  std::string_view name;
  ConstTensorView view;
};

// Results must not overlap inputs, which are still read while results are written.
std::string check_apart(std::span<const Named> results, std::span<const Named> read) {
  for (const Named& result : results) {
    for (const std::span<const Named>& others : {read, results}) {
      for (const Named& other : others) {
        if (result.name == other.name || !share_memory(result.view, other.view)) continue;
        return fmt::format("{} shares memory with {}, expected memory of its own", result.name,
                           other.name);
      }
    }
  }
  return "";
}

std::string first_of(std::initializer_list<std::string> complaints) {
  for (const std::string& complaint : complaints) {
    if (!complaint.empty()) return complaint;
  }
  return "";
}

}  // namespace

std::string complaint_about(const ForwardTensors& t, const RingOptions& options, int rank) {
  const Check check{options, rank};
  std::string complaint = first_of({check.tensor("q", t.q, false), check.tensor("k", t.k, true),
                                    check.tensor("v", t.v, true), check.tensor("o", t.o, false),
                                    check.lse(t.lse), check.sinks("sinks", t.sinks),
                                    check_distinct("o", t.o), check_distinct("lse", t.lse)});
  if (!complaint.empty()) return complaint;
  const Named results[] = {{"o", t.o}, {"lse", t.lse}};
  const Named read[] = {{"q", t.q}, {"k", t.k}, {"v", t.v}, {"sinks", t.sinks.value_or(t.v)}};
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
       check.sinks("dsinks", t.dsinks),
       t.dsinks && !t.sinks ? "dsinks is given, but sinks is not: pass what forward got" : "",
       check_distinct("dq", t.dq), check_distinct("dk", t.dk), check_distinct("dv", t.dv),
       t.dsinks ? check_distinct("dsinks", *t.dsinks) : ""});
  if (!complaint.empty()) return complaint;
  const Named results[] = {
      {"dq", t.dq}, {"dk", t.dk}, {"dv", t.dv}, {"dsinks", t.dsinks.value_or(t.dv)}};
  const Named read[] = {{"q", t.q},
                        {"k", t.k},
                        {"v", t.v},
                        {"o", t.o},
                        {"lse", t.lse},
                        {"dout", t.dout},
                        {"sinks", t.sinks.value_or(t.dout)}};
  return check_apart(std::span(results, t.dsinks ? 4 : 3), std::span(read, t.sinks ? 7 : 6));
}

}  // namespace annulus::ring
