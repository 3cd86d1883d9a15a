#include "cli/cluster_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <vector>

#include "annulus/error.h"

namespace annulus::cli {
namespace {

template <typename Visit>
void for_each_member(Wire& wire, const Visit& visit) {
  visit("name", wire.name);
  visit("bytes_per_second", wire.bytes_per_second);
  visit("latency_seconds", wire.latency_seconds);
  visit("limits_receiving", wire.limits_receiving);
}

template <typename Visit>
void for_each_member(Cluster& cluster, const Visit& visit) {
  visit("name", cluster.name);
  visit("source", cluster.source);
  visit("ranks_per_host", cluster.ranks_per_host);
  visit("ranks_per_processor", cluster.ranks_per_processor);
  visit("forward_flops_per_second", cluster.forward_flops_per_second);
  visit("backward_flops_per_second", cluster.backward_flops_per_second);
  visit("copy_bytes_per_second", cluster.copy_bytes_per_second);
  visit("stage_seconds", cluster.stage_seconds);
  visit("memory_bytes", cluster.memory_bytes);
  visit("inside", cluster.inside);
  visit("between", cluster.between);
  visit("ports_per_host", cluster.ports_per_host);
}

// Reads an object. Errors name the file and the member.
class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  template <typename Struct>
  void read(const Json& json, const std::string& path, Struct& into) const {
    if (!json.is_object()) refuse(path, json, "an object");
    std::vector<std::string> known;
    if constexpr (std::is_same_v<Struct, Cluster>) known.emplace_back("like");
    for_each_member(into, [&](const char* name, auto& member) {
      known.emplace_back(name);
      if (json.contains(name)) take(json[name], path.empty() ? name : path + "." + name, member);
    });
    for (const auto& [name, value] : json.items()) {
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      throw ConfigError(fmt::format("cluster file '{}': {} has '{}', expected members among {}",
                                    file_, path.empty() ? "it" : path, name,
                                    fmt::join(known, ", ")));
    }
  }

  [[noreturn]] void refuse(const std::string& path, const Json& found, const char* expected) const {
    throw ConfigError(fmt::format("cluster file '{}': {} is {}, expected {}", file_,
                                  path.empty() ? "it" : path, to_text(found), expected));
  }

 private:
  void take(const Json& json, const std::string& path, std::string& text) const {
    if (!json.is_string()) refuse(path, json, "a string");
    text = json.get<std::string>();
  }
  void take(const Json& json, const std::string& path, bool& flag) const {
    if (!json.is_boolean()) refuse(path, json, "true or false");
    flag = json.get<bool>();
  }
  void take(const Json& json, const std::string& path, double& number) const {
    if (!json.is_number()) refuse(path, json, "a number");
    number = json.get<double>();
  }
  template <typename Integer>
  requires std::is_integral_v<Integer>
  void take(const Json& json, const std::string& path, Integer& number) const {
    const double most = static_cast<double>(std::numeric_limits<Integer>::max());
    const double found = json.is_number() ? json.get<double>() : -1.0;
    if (!(found >= 0) || found >= most || found != std::floor(found))
      refuse(path, json, "a whole number of 0 or more");
    number = static_cast<Integer>(found);
  }
  void take(const Json& json, const std::string& path, Wire& wire) const { read(json, path, wire); }

  std::string file_;
};

Cluster read_file(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream || std::filesystem::is_directory(file)) {
    throw ConfigError(
        fmt::format("--cluster is '{}', which is neither one of {} nor a file that can be read",
                    file, fmt::join(cluster_preset_names(), ", ")));
  }
  Json json;
  try {
    json = Json::parse(text.str());
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("cluster file '{}' is not JSON: {}", file, error.what()));
  }
  const Reader reader(file);
  Cluster cluster;
  if (json.is_object() && json.contains("like")) {
    if (!json["like"].is_string()) reader.refuse("like", json["like"], "the name of a preset");
    cluster = cluster_preset(json["like"].get<std::string>());
  }
  if (!json.is_object() || !json.contains("name")) cluster.name = file;
  reader.read(json, "", cluster);
  cluster.validate();
  return cluster;
}

template <typename Struct>
Json members_json(const Struct& of) {
  Json json;
  Struct copy = of;  // the member list is used for reading and so takes no const object
  for_each_member(copy, [&](const char* name, auto& member) {
    if constexpr (std::is_same_v<std::decay_t<decltype(member)>, Wire>) {
      json[name] = members_json(member);
    } else {
      json[name] = member;
    }
  });
  return json;
}

}  // namespace

Cluster cluster_from(const std::string& preset_or_file) {
  const std::vector<std::string>& presets = cluster_preset_names();
  if (std::find(presets.begin(), presets.end(), preset_or_file) != presets.end())
    return cluster_preset(preset_or_file);
  return read_file(preset_or_file);
}

Json to_json(const Cluster& cluster) { return members_json(cluster); }

}  // namespace annulus::cli
