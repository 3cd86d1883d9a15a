#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>
#include <type_traits>

#include "annulus/error.h"
#include "draw/plan_text.h"
#include "pattern/entry_groups.h"
#include "ring/option_list.h"
#include "ring/option_text.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kLargestCount = 2147483647;  // positions inside a segment are 32-bit

const std::vector<std::int64_t> kDefaultSegments = {2048, 4096, 8192, 16384, 32768};
const std::vector<std::int64_t> kDefaultDilations = {1, 2, 4, 8, 16};

using ring::OptionInfo;

// "--max-qkv-elements", or "--no-backward" for an option that is on by default.
std::string flag_of(const OptionInfo& info, bool usually_on) {
  std::string flag = std::string(usually_on ? "--no-" : "--") + info.name;
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

template <typename T>
std::string placeholder_of(const OptionInfo& info, const T& option) {
  if constexpr (ring::Named<T>) {
    std::string text;
    for (const auto& name : ring::names_like(option)) {
      text += (text.empty() ? "" : "|") + std::string(name.text);
    }
    return text;
  } else {
    return info.value;
  }
}

template <typename T>
CLI::Option* add_flag(CLI::App& command, std::set<std::string>& given, const OptionInfo& info,
                      T& option) {
  if constexpr (std::is_same_v<T, bool>) {
    const bool usually_on = option;
    const auto take = [&given, &option, info, usually_on](std::int64_t times) {
      if (times == 0) return;
      option = !usually_on;
      given.insert(info.name);
    };
    return command.add_flag_function(flag_of(info, usually_on), take, info.help);
  } else {
    const auto take = [&given, &option, info](const std::string& text) {
      (void)ring::read_text(info, text, option);  // has been checked already
      given.insert(info.name);
    };
    const auto check = [info](const std::string& text) {
      T scratch{};
      const std::string expected = ring::read_text(info, text, scratch);
      return expected.empty() ? "" : fmt::format("found '{}', expected {}", text, expected);
    };
    return command.add_option_function<std::string>(flag_of(info, false), take, info.help)
        ->check(CLI::Validator(check, "", info.name))
        ->type_name(placeholder_of(info, option));
  }
}

// With an empty group, the flags are listed among the command's own.
void add_flags_of(ring::Topic topic, CLI::App& command, ProblemFlags& flags,
                  const std::string& group) {
  ring::for_each_option(flags.options, [&](const OptionInfo& info, auto& option) {
    if (info.topic != topic) return;
    CLI::Option* added = add_flag(command, flags.given, info, option);
    if (!group.empty()) added->group(group);
  });
}

void add_pattern_flags(CLI::App& command, ProblemFlags& flags) {
  const std::string group = "Pattern";
  add_choice(command, "--pattern", flags.pattern, {"dense", "head_groups", "longnet"},
             "Which tokens attend to which (default longnet)")
      ->group(group);
  command
      .add_option("--segments", flags.segments,
                  "Segment length of each branch (default 2048,4096,8192,16384,32768)")
      ->type_name("W,W")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->transform(token_count())
      ->check(whole_number(1, std::numeric_limits<std::int64_t>::max()))
      ->group(group);
  command
      .add_option("--dilations", flags.dilations, "Dilation of each branch (default 1,2,4,8,16)")
      ->type_name("R,R")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(whole_number(1, std::numeric_limits<std::int64_t>::max()))
      ->group(group);
  add_choice(command, "--offsets", flags.offsets, {"blocked", "interleaved", "all"},
             "longnet: offset of head h is h / ceil(H/r) (default) or h mod r, or h has all")
      ->group(group);
  command
      .add_flag("--group-scale", flags.group_scale,
                "longnet, head_groups: multiply the output by 1 / number of branches")
      ->group(group);
  command.add_flag("--causal", flags.causal, "No token attends to a later one")->group(group);
  add_window_flag(command, flags.window)->group(group);
  add_documents_flag(command, flags.documents)->group(group);
  add_flags_of(ring::Topic::pattern, command, flags, group);
}

void add_shape_flags(CLI::App& command, ProblemFlags& flags) {
  const std::string group = "Shape";
  command
      .add_option("--tokens", flags.tokens,
                  "Sequence length, such as 4096, 128k or 1M (default 32768)")
      ->transform(token_count())
      ->check(whole_number(1, kLargestCount))
      ->type_name("N")
      ->group(group);
  command.add_option("--heads", flags.heads, "Query heads (default 8)")
      ->check(whole_number(1, kMostHeads))
      ->type_name("H")
      ->group(group);
  command.add_option("--seed", flags.seed, "Seed of synthetic data and of dropout (default 1)")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->type_name("S")
      ->group(group);
  add_flags_of(ring::Topic::shape, command, flags, group);
}

void add_ring_flags(CLI::App& command, ProblemFlags& flags) {
  const std::string group = "Ring";
  add_ranks_flag(command, flags, "Ranks of the ring (default 4)", 4096)->group(group);
  add_choice(command, "--placement", flags.placement, placement_names(),
             "Which rank holds which tokens (default contiguous)")
      ->group(group);
  command.add_option("--align", flags.align, "contiguous: make shards multiples of this")
      ->transform(token_count())
      ->check(whole_number(1, kLargestCount))
      ->type_name("TOKENS")
      ->group(group);
  command
      .add_option("--grid-rows", flags.grid_rows, "hilbert: number of rows of the grid of tokens")
      ->check(whole_number(1, kLargestCount))
      ->type_name("ROWS")
      ->group(group);
  command
      .add_option("--grid-cols", flags.grid_cols,
                  "hilbert: number of columns of the grid of tokens")
      ->check(whole_number(1, kLargestCount))
      ->type_name("COLS")
      ->group(group);
  add_flags_of(ring::Topic::ring, command, flags, group);
}

}  // namespace

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  const auto check = [least, most](const std::string& text) {
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, problem] = std::from_chars(text.data(), end, value);
    if (problem == std::errc() && stop == end && value >= least && value <= most) {
      return std::string();
    }
    return fmt::format("found '{}', expected a whole number from {} to {}", text, least, most);
  };
  return {check, "", "whole_number"};
}

CLI::Validator not_empty(const std::string& expected) {
  const auto check = [expected](const std::string& text) {
    return text.empty() ? "found '', expected " + expected : std::string();
  };
  return {check, "", "not_empty"};
}

CLI::Validator token_count() {
  // Leaves other text unchanged, so that whole_number() rejects it.
  const auto expand = [](std::string& text) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() >> 20;
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, problem] = std::from_chars(text.data(), end, value);
    if (problem != std::errc() || end - stop != 1 || value < 0 || value > kMost) {
      return std::string();
    }
    if (*stop == 'k' || *stop == 'K')
      text = std::to_string(value << 10);
    else if (*stop == 'm' || *stop == 'M')
      text = std::to_string(value << 20);
    return std::string();
  };
  return {expand, "", "token_count"};
}

CLI::Option* add_choice(CLI::App& command, const std::string& flag, std::string& value,
                        const std::vector<std::string>& choices, const std::string& help) {
  return command.add_option(flag, value, help)
      ->check(CLI::IsMember(choices).description(""))
      ->type_name(fmt::format("{}", fmt::join(choices, "|")));
}

void add_problem_flags(CLI::App& command, ProblemFlags& flags) {
  add_pattern_flags(command, flags);
  add_shape_flags(command, flags);
  add_ring_flags(command, flags);
}

CLI::Option* add_ranks_flag(CLI::App& command, ProblemFlags& flags, const std::string& help,
                            int most) {
  return command.add_option("--ranks", flags.ranks, help)
      ->check(whole_number(1, most))
      ->each([&flags](const std::string&) { flags.given.insert("ranks"); })
      ->type_name("P");
}

CLI::Option* add_transport_flag(CLI::App& command, ProblemFlags& flags) {
  return add_choice(command, "--transport", flags.transport, {"mpi", "in-process"},
                    "Ranks are MPI processes (default under mpirun) or threads");
}

CLI::Option* add_window_flag(CLI::App& command, Window& window) {
  const auto read = [](const std::string& text) -> std::optional<Window> {
    const std::size_t comma = text.find(',');
    if (comma == std::string::npos) return std::nullopt;
    const OptionInfo limit{.name = "window", .shared = {}, .topic = {}, .help = "", .least = -1};
    Window found;
    if (!ring::read_text(limit, text.substr(0, comma), found.before).empty() ||
        !ring::read_text(limit, text.substr(comma + 1), found.after).empty()) {
      return std::nullopt;
    }
    return found;
  };
  const auto check = [read](const std::string& text) {
    if (read(text)) return std::string();
    return fmt::format(
        "found '{}', expected two whole numbers from -1 (no limit), such as 1023,0 or 4k,-1", text);
  };
  return command
      .add_option_function<std::string>(
          "--window", [&window, read](const std::string& text) { window = *read(text); },
          "Token t attends only to tokens t-BEFORE to t+AFTER; -1: no limit")
      ->check(CLI::Validator(check, "", "window"))
      ->type_name("BEFORE,AFTER");
}

namespace {

std::vector<Document> read_documents(const std::string& path) {
  std::error_code none;
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path, none))
    throw ConfigError(fmt::format("--documents: {} cannot be read", path));
  std::vector<std::vector<std::int64_t>> lists;
  std::string word;
  bool line_begins = true;
  const auto wrong = [&] {
    std::replace_if(
        word.begin(), word.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    return ConfigError(
        fmt::format("--documents: {} has '{}', expected whole numbers: 0, then the end of each "
                    "document; the list of the next batch entry begins with 0 on a new line",
                    path, word));
  };
  const auto finish_word = [&] {
    if (word.empty()) return;
    std::int64_t number = 0;
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (problem != std::errc() || end != word.data() + word.size()) throw wrong();
    if (lists.empty() || (line_begins && number == 0)) lists.emplace_back();
    lists.back().push_back(number);
    word.clear();
    line_begins = false;
  };
  for (char c = 0; file.get(c);) {
    if (c == ',' || std::isspace(static_cast<unsigned char>(c)) != 0) {
      finish_word();
      line_begins = line_begins || c == '\n';
    } else {
      word += c;
      if (word.size() > 24) throw wrong();  // no number: a file of another kind may have no end
    }
  }
  finish_word();
  if (lists.empty()) lists.emplace_back();
  if (lists.size() == 1) return packed_documents(lists.front());
  std::vector<std::vector<Document>> documents;
  for (const std::vector<std::int64_t>& list : lists) documents.push_back(packed_documents(list));
  return documents_of_entries(documents);
}

}  // namespace

CLI::Option* add_documents_flag(CLI::App& command, std::vector<Document>& documents) {
  return command
      .add_option_function<std::string>(
          "--documents",
          [&documents](const std::string& path) { documents = read_documents(path); },
          "File of document boundaries: 0, then the end of each; or a line for each batch entry")
      ->type_name("FILE");
}

void add_limit_flags(CLI::App& command, ProblemFlags& flags) {
  add_flags_of(ring::Topic::limits, command, flags,
               "Limits per rank (default: derived from the memory that is available)");
}

void add_execution_flags(CLI::App& command, ProblemFlags& flags) {
  add_flags_of(ring::Topic::execution, command, flags, "");
}

void add_machine_flags(CLI::App& command, ProblemFlags& flags) {
  for (const char* name : {"threads", "device"}) add_option_flag(command, flags, name);
}

void add_schedule_limit_flag(CLI::App& command, ProblemFlags& flags) {
  add_option_flag(command, flags, "max_communication_bytes")
      ->description("Limit per rank that schedule auto respects (default 1 GiB)");
}

void add_output_flags(CLI::App& command, bool& json, bool* progress) {
  command.add_flag("--json", json, "Print one JSON object");
  if (progress == nullptr) return;
  command.add_flag("--progress", *progress,
                   "Show progress on standard error even if it is no terminal");
}

CLI::Option* add_option_flag(CLI::App& command, ProblemFlags& flags, const std::string& name) {
  CLI::Option* added = nullptr;
  ring::for_each_option(flags.options, [&](const OptionInfo& info, auto& option) {
    if (info.name == name) added = add_flag(command, flags.given, info, option);
  });
  return added;
}

Shape shape_from(const ProblemFlags& flags) {
  Shape shape;
  shape.batch = flags.options.batch;
  shape.tokens = flags.tokens.value_or(shape.tokens);
  shape.heads = static_cast<int>(flags.heads.value_or(shape.heads));
  shape.kv_heads = flags.has("kv_heads") ? flags.options.kv_heads : shape.heads;
  shape.head_dim = flags.options.head_dim;
  return shape;
}

namespace {

Pattern preset_from(const ProblemFlags& flags, int heads) {
  if (flags.pattern == "dense") {
    if (flags.group_scale) {
      throw ConfigError("--group-scale is for --pattern longnet or head_groups, found dense");
    }
    if (!flags.segments.empty() || !flags.dilations.empty()) {
      throw ConfigError(
          "--segments and --dilations are for --pattern longnet or head_groups, found dense");
    }
    return dense(heads, flags.causal);
  }
  if (flags.segments.empty() != flags.dilations.empty()) {
    throw ConfigError(fmt::format(
        "--{} without --{}: give both, one number each per branch, such as --segments 2048,8192 "
        "--dilations 1,4",
        flags.segments.empty() ? "dilations" : "segments",
        flags.segments.empty() ? "segments" : "dilations"));
  }
  const auto& segments = flags.segments.empty() ? kDefaultSegments : flags.segments;
  const auto& dilations = flags.dilations.empty() ? kDefaultDilations : flags.dilations;
  if (flags.pattern == "head_groups") {
    return head_groups(heads, segments, dilations, flags.causal, flags.group_scale);
  }
  return longnet(heads, segments, dilations, flags.causal,
                 flags.offsets == "blocked"       ? Offsets::blocked
                 : flags.offsets == "interleaved" ? Offsets::interleaved
                                                  : Offsets::all,
                 flags.group_scale);
}

}  // namespace

Pattern pattern_from(const ProblemFlags& flags, int heads) {
  Pattern pattern = preset_from(flags, heads);
  pattern.window = flags.window;
  pattern.documents = flags.documents;
  pattern.validate();
  return pattern;
}

const std::vector<std::string>& placement_names() {
  static const std::vector<std::string> names = {"contiguous", "zigzag", "striped", "hilbert",
                                                 "balanced"};
  return names;
}

Placement placement_from(const ProblemFlags& flags, const Pattern& pattern, std::int64_t tokens) {
  if (flags.align != 1 && flags.placement != "contiguous") {
    throw ConfigError("--align is for --placement contiguous, found " + flags.placement);
  }
  const bool grid = flags.grid_rows != 0 || flags.grid_cols != 0;
  if (grid && flags.placement != "hilbert") {
    throw ConfigError("--grid-rows and --grid-cols are for --placement hilbert, found " +
                      flags.placement);
  }
  if (grid && (flags.grid_rows == 0 || flags.grid_cols == 0)) {
    throw ConfigError("--grid-rows and --grid-cols: found one of them, expected both or none");
  }
  if (flags.placement == "contiguous")
    return Placement::contiguous(tokens, flags.ranks, flags.align);
  if (grid) return Placement::hilbert(tokens, flags.ranks, flags.grid_rows, flags.grid_cols);
  if (flags.placement == "balanced") return Placement::balanced(pattern, tokens, flags.ranks);
  return Placement::named(flags.placement, tokens, flags.ranks);
}

RingOptions ring_options_from(const ProblemFlags& flags, const Shape& shape, DType dtype) {
  RingOptions options = flags.options;
  options.pattern = pattern_from(flags, shape.heads);
  options.placement = placement_from(flags, options.pattern, shape.tokens);
  options.batch = shape.batch;
  options.kv_heads = shape.kv_heads;
  options.head_dim = shape.head_dim;
  options.dtype = dtype;
  return options;
}

Json window_json(const Pattern& pattern) {
  const Window& window = pattern.window;
  return window == Window{} ? Json() : Json({window.before, window.after});
}

namespace {

// The boundaries of all batch entries, or a list with those of each.
Json documents_json(const Pattern& pattern) {
  if (pattern.documents.empty()) return {};
  Json lists = Json::array();
  for (std::int64_t entry = 0; entry < pattern.counted_entries(); ++entry) {
    Json& boundaries = lists.emplace_back(Json{0});
    for (const Document& document : documents_of(pattern, entry))
      boundaries.push_back(document.query_end);
  }
  return pattern.by_entry() ? lists : lists.front();
}

}  // namespace

Json parameters_json(const ProblemFlags& flags, const RingOptions& options) {
  std::vector<std::int64_t> segments;
  std::vector<std::int64_t> dilations;
  for (const BranchRun& run : branch_runs(options.pattern)) {
    const Branch& branch = options.pattern.branches[run.first];
    segments.push_back(branch.segment_length == kWholeSequence ? options.placement.tokens()
                                                               : branch.segment_length);
    dilations.push_back(branch.dilation);
  }
  Json json = {{"pattern", options.pattern.name},
               {"segments", segments},
               {"dilations", dilations},
               {"offsets", flags.offsets},
               {"group_scale", flags.group_scale},
               {"causal", options.pattern.causal},
               {"window", window_json(options.pattern)},
               {"documents", documents_json(options.pattern)},
               {"tokens", options.placement.tokens()},
               {"heads", options.pattern.heads},
               {"seed", flags.seed},
               {"ranks", options.placement.ranks()},
               {"placement", flags.placement},
               {"align", flags.align},
               {"grid_rows", flags.grid_rows},
               {"grid_cols", flags.grid_cols}};
  ring::for_each_option(options, [&](const OptionInfo& info, const auto& option) {
    using Value = std::decay_t<decltype(option)>;
    if constexpr (std::is_same_v<Value, std::optional<double>>) {
      json[info.name] = ring::scale_of(options);  // the only one
    } else if constexpr (std::is_arithmetic_v<Value>) {
      json[info.name] = option;
    } else {
      json[info.name] = ring::text_of(option);
    }
  });
  return json;
}

std::string describe(const Pattern& pattern) {
  std::string text = pattern.name + mask_text(pattern);
  if (pattern.branches.size() == 1 && pattern.branches[0].segment_length == kWholeSequence &&
      pattern.branches[0].dilation == 1) {
    return text;
  }
  return text + ", segments/dilations" + branches_text(pattern);
}

}  // namespace annulus::cli
