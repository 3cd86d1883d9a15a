#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "cli/console.h"

// Of CLI11, which takes seconds to compile.
namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace annulus::cli {

inline constexpr std::int64_t kMostHeads =
    65536;  // a typing error must not allocate gigabytes of offsets

struct Shape {
  std::int64_t batch = 1;
  std::int64_t tokens = 32768;
  int heads = 8;
  int kv_heads = 8;
  int head_dim = 64;
};

// The flags that describe a problem, as given. Absent ones get their defaults later, because input
// files may determine them. The defaults are LongNet attention over 32,768 tokens on four ranks.
struct ProblemFlags {
  // pattern
  std::string pattern = "longnet";
  std::vector<std::int64_t> segments;   // empty: 2048, 4096, 8192, 16384, 32768
  std::vector<std::int64_t> dilations;  // empty: 1, 2, 4, 8, 16
  std::string offsets = "blocked";
  bool group_scale = false;
  bool causal = false;
  Window window;
  std::vector<Document> documents;
  // shape
  std::optional<std::int64_t> tokens;
  std::optional<std::int64_t> heads;
  std::uint64_t seed = 1;
  // ring
  std::string transport;  // empty: mpi where mpirun has started this process, else in-process
  int ranks = 4;          // of an MPI job: its processes
  std::string placement = "contiguous";
  std::int64_t align = 1;      // contiguous only
  std::int64_t grid_rows = 0;  // hilbert only; 0: the squarest grid
  std::int64_t grid_cols = 0;
  // All other options of an executor (ring/option_list.h). `given` has the names of those that the
  // command line sets. Its pattern and placement are not used.
  RingOptions options{.pattern = {}, .placement = Placement::contiguous(1, 1)};
  std::set<std::string> given;

  [[nodiscard]] bool has(const char* name) const { return given.contains(name); }
};

// Pattern, shape and ring.
void add_problem_flags(CLI::App& command, ProblemFlags& flags);
CLI::Option* add_ranks_flag(CLI::App& command, ProblemFlags& flags, const std::string& help,
                            int most);
CLI::Option* add_transport_flag(CLI::App& command, ProblemFlags& flags);
void add_limit_flags(CLI::App& command, ProblemFlags& flags);
void add_execution_flags(CLI::App& command, ProblemFlags& flags);
void add_machine_flags(CLI::App& command, ProblemFlags& flags);  // --threads, --device
// --max-communication-bytes for commands that allocate nothing: it decides between schedules.
void add_schedule_limit_flag(CLI::App& command, ProblemFlags& flags);
CLI::Option* add_window_flag(CLI::App& command, Window& window);
CLI::Option* add_documents_flag(CLI::App& command, std::vector<Document>& documents);
// --json and, unless null, --progress.
void add_output_flags(CLI::App& command, bool& json, bool* progress = nullptr);
// The flag of a single executor option, by its name in the list.
CLI::Option* add_option_flag(CLI::App& command, ProblemFlags& flags, const std::string& name);

// Building blocks for flags of one command only.
[[nodiscard]] CLI::Validator whole_number(std::int64_t least, std::int64_t most);
[[nodiscard]] CLI::Validator not_empty(const std::string& expected);
[[nodiscard]] CLI::Validator token_count();  // a transform: 128k is 131,072 and 1M is 1,048,576
CLI::Option* add_choice(CLI::App& command, const std::string& flag, std::string& value,
                        const std::vector<std::string>& choices, const std::string& help);

[[nodiscard]] Shape shape_from(const ProblemFlags& flags);
[[nodiscard]] Pattern pattern_from(const ProblemFlags& flags, int heads);
[[nodiscard]] const std::vector<std::string>& placement_names();
[[nodiscard]] Placement placement_from(const ProblemFlags& flags, const Pattern& pattern,
                                       std::int64_t tokens);

[[nodiscard]] RingOptions ring_options_from(const ProblemFlags& flags, const Shape& shape,
                                            DType dtype);

[[nodiscard]] Json window_json(const Pattern& pattern);  // null: no window
// All options as chosen, for --json.
[[nodiscard]] Json parameters_json(const ProblemFlags& flags, const RingOptions& options);
// "longnet, causal, window (4095, 0), segments/dilations 2048/1 4096/2"
[[nodiscard]] std::string describe(const Pattern& pattern);

}  // namespace annulus::cli
