#pragma once

#include <string>

#include "cli/job.h"
#include "cli/recording.h"

namespace annulus::cli {

// One page that needs nothing else, no network either: timeline, balance, time waited, bytes per
// link, memory. `facts` are lines about the run: {"pattern": "...", ...}. The page itself is
// cli/report.html.
[[nodiscard]] std::string report_page(const Recording& recording, const JobReport& job,
                                      const Json& facts);

// What the page shows, for tests and for the page.
[[nodiscard]] Json report_data(const Recording& recording, const JobReport& job, const Json& facts);

}  // namespace annulus::cli
