#include "values.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "annulus/error.h"
#include "ring/option_text.h"

namespace annulus::python {
namespace {

// `names`: of things with a text and a value.
template <typename Names>
auto parse(const char* option, const std::string& name, const Names& names) {
  std::string expected;
  for (const auto& each : names) {
    if (name == each.text) return each.value;
    expected += std::string(expected.empty() ? "" : ", ") + "'" + each.text + "'";
  }
  throw ConfigError(std::string(option) + " is '" + name + "', expected one of " + expected);
}

}  // namespace

Offsets parse_offsets(const std::string& name) {
  constexpr ring::Name<Offsets> kNames[] = {
      {"blocked", Offsets::blocked}, {"interleaved", Offsets::interleaved}, {"all", Offsets::all}};
  return parse("offsets", name, kNames);
}

Schedule parse_schedule(const std::string& name) {
  return parse("schedule", name, ring::names_like(Schedule{}));
}

Travel parse_travel(const std::string& name) {
  constexpr ring::Name<Travel> kNames[] = {{"keys", Travel::keys}, {"queries", Travel::queries}};
  return parse("travel", name, kNames);
}

MixGradient parse_mix_gradient(const std::string& name) {
  return parse("mix_gradient", name, ring::names_like(MixGradient{}));
}

BackwardTravel parse_backward_travel(const std::string& name) {
  return parse("backward_travel", name, ring::names_like(BackwardTravel{}));
}

DType parse_dtype(nb::handle dtype) {
  // NumPy's dtypes have a name, its scalar types a __name__; PyTorch's only print as torch.<name>.
  std::string name;
  if (nb::isinstance<nb::str>(dtype)) {
    name = nb::cast<std::string>(dtype);
  } else if (nb::hasattr(dtype, "name")) {
    name = nb::str(dtype.attr("name")).c_str();
  } else if (nb::hasattr(dtype, "__name__")) {
    name = nb::str(dtype.attr("__name__")).c_str();
  } else {
    name = nb::str(dtype).c_str();
    if (name.starts_with("torch.")) name.erase(0, 6);
  }
  constexpr ring::Name<DType> kNames[] = {{"float32", DType::f32},   {"float16", DType::f16},
                                          {"bfloat16", DType::bf16}, {"fp32", DType::f32},
                                          {"fp16", DType::f16},      {"bf16", DType::bf16}};
  return parse("dtype", name, kNames);
}

const char* python_name_of(DType dtype) noexcept {
  return dtype == DType::f32 ? "float32" : dtype == DType::f16 ? "float16" : "bfloat16";
}

Window parse_window(nb::handle window) {
  if (window.is_none()) return {};
  // -2: no whole number that fits.
  const auto number = [](nb::handle value) -> std::int64_t {
    if (PyBool_Check(value.ptr())) return -2;
    const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
    const std::int64_t found = index.is_valid() ? PyLong_AsLongLong(index.ptr()) : -2;
    if (PyErr_Occurred() == nullptr) return found;
    PyErr_Clear();
    return -2;
  };
  if (nb::isinstance<nb::tuple>(window) || nb::isinstance<nb::list>(window)) {
    const auto pair = nb::borrow<nb::sequence>(window);
    if (nb::len(pair) == 2) {
      const Window found{number(pair[0]), number(pair[1])};
      if (found.before >= -1 && found.after >= -1) return found;
    }
  }
  throw ConfigError(std::string("window is ") + nb::repr(window).c_str() +
                    ", expected None or a pair (before, after) of whole numbers from -1 (no limit) "
                    "to 2**63 - 1");
}

nb::object object_of(const Window& window) {
  if (window == Window{}) return nb::none();
  return nb::make_tuple(window.before, window.after);
}

Pattern make_longnet(int heads, const std::vector<std::int64_t>& segments,
                     const std::vector<std::int64_t>& dilations, Flag causal,
                     const std::string& offsets, Flag group_scale, nb::handle window) {
  return windowed(longnet(heads, segments, dilations, causal, parse_offsets(offsets), group_scale),
                  window);
}

Pattern windowed(Pattern pattern, nb::handle window) {
  pattern.window = parse_window(window);
  pattern.validate();
  return pattern;
}

Pattern parse_pattern(nb::handle pattern, int heads,
                      const std::optional<std::vector<std::int64_t>>& segments,
                      const std::optional<std::vector<std::int64_t>>& dilations, bool causal,
                      nb::handle window, const std::string& offsets, bool group_scale) {
  const bool lengths = segments.has_value() || dilations.has_value();
  if (nb::isinstance<Pattern>(pattern)) {
    const auto& given = nb::cast<const Pattern&>(pattern);
    // A Pattern already contains all of this. Other values would be ignored silently.
    if (lengths || group_scale || !window.is_none() || (causal && !given.causal)) {
      throw ConfigError(
          "pattern is a Pattern, which already has its segment_lengths, dilation_rates, causal "
          "flag, window and group_scale: leave these arguments out");
    }
    return given;
  }
  if (!pattern.is_none() && !nb::isinstance<nb::str>(pattern)) {
    throw ConfigError("pattern is a " +
                      std::string(nb::str(pattern.type().attr("__name__")).c_str()) +
                      ", expected None, a Pattern, 'dense', 'longnet' or 'head_groups'");
  }
  std::string name = lengths ? "longnet" : "dense";
  if (!pattern.is_none()) name = nb::cast<std::string>(pattern);
  if (name != "dense" && name != "longnet" && name != "head_groups") {
    throw ConfigError("pattern is '" + name +
                      "', expected None, a Pattern, 'dense', 'longnet' or 'head_groups'");
  }
  if (name == "dense") {
    if (lengths || group_scale) {
      throw ConfigError(
          "pattern 'dense' has no segment_lengths, dilation_rates or group_scale: leave them out "
          "or choose 'longnet'");
    }
    return windowed(dense(heads, causal), window);
  }
  if (!segments.has_value() || !dilations.has_value()) {
    throw ConfigError("pattern '" + name + "' needs segment_lengths and dilation_rates");
  }
  if (name == "head_groups")
    return windowed(head_groups(heads, *segments, *dilations, causal, group_scale), window);
  return make_longnet(heads, *segments, *dilations, {causal}, offsets, {group_scale}, window);
}

}  // namespace annulus::python
