#include "ring_options.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <list>
#include <optional>
#include <type_traits>

#include "annulus/error.h"
#include "ring/option_list.h"
#include "values.h"

namespace annulus::python {
namespace {

using ring::for_each_option;
using ring::OptionInfo;

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {Device::Kind::cuda, 0};
  if (name.starts_with("cuda:") && name.size() > 5 && name.size() < 10 &&
      name.find_first_not_of("0123456789", 5) == std::string::npos) {
    return {Device::Kind::cuda, std::stoi(name.substr(5))};
  }
  throw ConfigError("device is '" + name + "', expected 'cpu', 'cuda' or 'cuda:1'");
}

void assign(DType& option, nb::handle value) { option = parse_dtype(value); }
void assign(MixGradient& option, nb::handle value) {
  option = parse_mix_gradient(nb::cast<std::string>(value));
}
void assign(Schedule& option, nb::handle value) {
  option = parse_schedule(nb::cast<std::string>(value));
}
void assign(BackwardTravel& option, nb::handle value) {
  option = parse_backward_travel(nb::cast<std::string>(value));
}
void assign(Device& option, nb::handle value) {
  option = parse_device(nb::cast<std::string>(value));
}
template <typename T>
void assign(T& option, nb::handle value) {
  option = nb::cast<T>(value);
}

std::string with_default(bool value) { return value ? "bool = True" : "bool = False"; }
std::string with_default(int value) { return fmt::format("int = {}", value); }
std::string with_default(std::int64_t value) { return fmt::format("int = {}", value); }
std::string with_default(double value) { return fmt::format("float = {:.1f}", value); }
std::string with_default(const std::optional<double>&) { return "float | None = None"; }
std::string with_default(DType value) {
  return fmt::format("typing.Any = '{}'", python_name_of(value));
}
std::string with_default(MixGradient) { return "typing.Literal['full', 'detached'] = 'full'"; }
std::string with_default(Schedule) { return "typing.Literal['auto', 'ring', 'gather'] = 'auto'"; }
std::string with_default(BackwardTravel) {
  return "typing.Literal['auto', 'keys', 'queries'] = 'auto'";
}
std::string with_default(const Device& value) { return "str = '" + name_of(value) + "'"; }

bool is(const OptionInfo& info, const char* name) { return std::string(info.name) == name; }

}  // namespace

RingOptions options_from(const Pattern& pattern, const Placement& placement,
                         const nb::kwargs& given, const char* also) {
  RingOptions options{.pattern = pattern, .placement = placement};
  options.kv_heads = pattern.heads;
  std::size_t known = given.contains(also) ? 1 : 0;
  for_each_option(options, [&](const OptionInfo& info, auto& option) {
    if (!given.contains(info.name)) {
      if (is(info, "head_dim")) throw nb::type_error("head_dim is missing");
      return;
    }
    ++known;
    const nb::object value = given[info.name];
    if (is(info, "kv_heads") && value.is_none()) return;
    try {
      assign(option, value);
    } catch (const nb::cast_error&) {
      throw nb::type_error(
          fmt::format("{} is {}: {} was expected", info.name, nb::repr(value).c_str(),
                      with_default(option).substr(0, with_default(option).find(" = ")))
              .c_str());
    }
  });
  if (known == given.size()) return options;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    bool found = name == also;
    for_each_option(
        options, [&](const OptionInfo& info, auto&) { found = found || is(info, name.c_str()); });
    if (!found) throw nb::type_error(fmt::format("there is no option '{}'", name).c_str());
  }
  return options;
}

const char* signature_with_options(const std::string& name, const std::string& rest) {
  static std::list<std::string> kept;
  const RingOptions usual{.pattern = {}, .placement = Placement::contiguous(1, 1)};
  std::string text = "def " + name + "(self, pattern: Pattern, placement: Placement, *";
  for_each_option(usual, [&](const OptionInfo& info, const auto& option) {
    text += fmt::format(", {}: ", info.name);
    text += is(info, "head_dim")   ? "int"
            : is(info, "kv_heads") ? "int | None = None"
                                   : with_default(option);
  });
  return kept.emplace_back(text + rest).c_str();
}

}  // namespace annulus::python
