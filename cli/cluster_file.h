#pragma once

#include <string>

#include "annulus/simulate.h"
#include "cli/console.h"

namespace annulus::cli {

// A preset by its name, or what a JSON file says. A file has the members of `Cluster`; those that
// are absent are the preset's that it names with "like", or else Cluster's own. ConfigError in
// words, with the name of the file, for everything else.
[[nodiscard]] Cluster cluster_from(const std::string& preset_or_file);

// As such a file.
[[nodiscard]] Json to_json(const Cluster& cluster);

}  // namespace annulus::cli
