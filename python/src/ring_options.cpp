#include "ring_options.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
#include <optional>
#include <type_traits>
#include <utility>

#include "annulus/error.h"
#include "flag.h"
#include "ring/option_list.h"
#include "ring/option_text.h"
#include "values.h"

namespace annulus::python {
namespace {

using ring::for_each_option;
using ring::OptionInfo;

void assign(const OptionInfo& /*info*/, DType& option, nb::handle value) {
  option = parse_dtype(value);
}
void assign(const OptionInfo& /*info*/, bool& option, nb::handle value) {
  option = nb::cast<Flag>(value);
}
template <typename T>
void assign(const OptionInfo& info, T& option, nb::handle value) {
  if constexpr (ring::Named<T> || std::is_same_v<T, Device>) {
    // Also accepts a torch.device.
    const bool has_name =
        std::is_same_v<T, Device> && nb::hasattr(value, "index") && nb::hasattr(value, "type");
    const auto text =
        nb::cast<std::string>(has_name ? nb::object(nb::str(value)) : nb::borrow(value));
    const std::string expected = ring::read_text(info, text, option);
    if (!expected.empty())
      throw ConfigError(fmt::format("{} is '{}', expected {}", info.name, text, expected));
  } else {
    option = nb::cast<T>(value);
  }
}

// Type and default for signatures.
std::string with_default(bool value) { return value ? "bool = True" : "bool = False"; }
std::string with_default(int value) { return fmt::format("int = {}", value); }
std::string with_default(std::int64_t value) { return fmt::format("int = {}", value); }
std::string with_default(double value) { return fmt::format("float = {:.1f}", value); }
std::string with_default(const std::optional<double>&) { return "float | None = None"; }
std::string with_default(DType value) {
  return fmt::format("typing.Any = '{}'", python_name_of(value));
}
std::string with_default(const Device& value) { return "str = '" + name_of(value) + "'"; }
template <ring::Named T>
std::string with_default(T value) {
  std::string names;
  for (const auto& name : ring::names_like(value))
    names += std::string(names.empty() ? "'" : ", '") + name.text + "'";
  return fmt::format("typing.Literal[{}] = '{}'", names, ring::text_of(value));
}

// The default as a Python object.
template <typename T>
nb::object object_of(const T& value) {
  if constexpr (std::is_same_v<T, DType>) {
    return nb::str(python_name_of(value));
  } else if constexpr (ring::Named<T> || std::is_same_v<T, Device>) {
    return nb::str(ring::text_of(value).c_str());
  } else {
    return nb::cast(value);
  }
}

template <typename T>
std::string annotation_of(const T& option) {
  const std::string text = with_default(option);
  return text.substr(0, text.find(" = "));
}

bool is(const OptionInfo& info, const char* name) { return std::string(info.name) == name; }

}  // namespace

RingOptions options_from(nb::handle pattern, nb::handle placement, const nb::kwargs& given,
                         const char* also) {
  RingOptions options{.pattern = instance_of<Pattern>(pattern, "pattern", "a Pattern"),
                      .placement = instance_of<Placement>(placement, "placement", "a Placement")};
  options.kv_heads = options.pattern.heads;
  constexpr const char* kKeyPlacement = "key_placement";
  std::size_t known = given.contains(also) ? 1 : 0;
  if (given.contains(kKeyPlacement)) {
    ++known;
    const nb::object keys = given[kKeyPlacement];
    if (!keys.is_none()) {
      options.key_placement = instance_of<Placement>(keys, kKeyPlacement, "a Placement or None");
    }
  }
  for_each_option(options, [&](const OptionInfo& info, auto& option) {
    if (!given.contains(info.name)) {
      if (is(info, "head_dim")) throw nb::type_error("head_dim is missing");
      return;
    }
    ++known;
    const nb::object value = given[info.name];
    if (is(info, "kv_heads") && value.is_none()) return;
    try {
      assign(info, option, value);
    } catch (const nb::cast_error&) {
      throw nb::type_error(fmt::format("{} is {}: {} was expected", info.name,
                                       nb::repr(value).c_str(), annotation_of(option))
                               .c_str());
    }
  });
  if (known == given.size()) return options;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    bool found = name == also || name == kKeyPlacement;
    for_each_option(
        options, [&](const OptionInfo& info, auto&) { found = found || is(info, name.c_str()); });
    if (!found) throw nb::type_error(fmt::format("there is no option '{}'", name).c_str());
  }
  return options;
}

nb::list listed_options() {
  const RingOptions usual{.pattern = {}, .placement = Placement::contiguous(1, 1)};
  nb::list list;
  for_each_option(usual, [&](const OptionInfo& info, const auto& option) {
    using Value = std::decay_t<decltype(option)>;
    nb::dict dict;
    dict["name"] = info.name;
    dict["default"] = object_of(option);
    dict["annotation"] = annotation_of(option);
    dict["shared"] = info.shared == ring::Shared::same     ? "same"
                     : info.shared == ring::Shared::choice ? "choice"
                                                           : "own";
    dict["kind"] = std::is_same_v<Value, bool>     ? "flag"
                   : std::is_integral_v<Value>     ? "whole"
                   : std::is_same_v<Value, double> ? "number"
                   : std::is_same_v<Value, Device> ? "device"
                   : ring::Named<Value>            ? "name"
                                                   : "number or none";
    nb::list names;
    if constexpr (ring::Named<Value>) {
      for (const auto& name : ring::names_like(option)) names.append(name.text);
    }
    dict["names"] = nb::tuple(names);
    if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>)
      dict["most"] = std::min<std::int64_t>(info.most, std::numeric_limits<Value>::max());
    dict["help"] = info.help;
    list.append(dict);
  });
  return list;
}

namespace {

// Never freed, as nanobind requires of its texts.
const char* kept_for_ever(std::string text) {
  static std::list<std::string> kept;
  return kept.emplace_back(std::move(text)).c_str();
}

}  // namespace

const char* doc_with_options(const std::string& text) {
  const RingOptions usual{.pattern = {}, .placement = Placement::contiguous(1, 1)};
  std::string all = text;
  for_each_option(usual, [&](const OptionInfo& info, const auto&) {
    const bool told = all.find(fmt::format("    {}:", info.name)) != std::string::npos ||
                      all.find(fmt::format("    {},", info.name)) != std::string::npos ||
                      all.find(fmt::format(", {}:", info.name)) != std::string::npos;
    if (!told) all += fmt::format("\n    {}: {}.", info.name, info.help);
  });
  return kept_for_ever(std::move(all));
}

const char* signature_with_options(const std::string& name, const std::string& rest) {
  const RingOptions usual{.pattern = {}, .placement = Placement::contiguous(1, 1)};
  std::string text = "def " + name +
                     "(self, pattern: Pattern, placement: Placement, *, key_placement: Placement | "
                     "None = None";
  for_each_option(usual, [&](const OptionInfo& info, const auto& option) {
    text += fmt::format(", {}: ", info.name);
    text += is(info, "head_dim")   ? "int"
            : is(info, "kv_heads") ? "int | None = None"
                                   : with_default(option);
  });
  return kept_for_ever(text + rest);
}

}  // namespace annulus::python
