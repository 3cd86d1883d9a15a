#pragma once

#include <string>

#include "annulus/simulate.h"
#include "cli/console.h"

namespace annulus::cli {

// A preset by its name, or the contents of a JSON file. A file has the members of `Cluster`. Absent
// members come from the preset that the file names with "like", else from Cluster's defaults.
// Anything else is a ConfigError that names the file.
[[nodiscard]] Cluster cluster_from(const std::string& preset_or_file);

// The contents of such a file.
[[nodiscard]] Json to_json(const Cluster& cluster);

}  // namespace annulus::cli
