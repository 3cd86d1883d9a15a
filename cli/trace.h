#pragma once

#include <string>

#include "cli/recording.h"

namespace annulus::cli {

// For chrome://tracing and ui.perfetto.dev: a process per rank and a track per kind of event;
// messages that are under way together have tracks of their own.
[[nodiscard]] std::string chrome_trace(const Recording& recording, const Json& facts);

}  // namespace annulus::cli
