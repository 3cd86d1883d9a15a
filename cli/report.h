#pragma once

#include <string>

#include "cli/job.h"
#include "cli/recording.h"

namespace annulus::cli {

// A self-contained page that needs no network: timeline, balance, time waited, bytes per link,
// memory. `facts` are lines about the run: {"pattern": "...", ...}. The page itself is
// cli/report.html.
[[nodiscard]] std::string report_page(const Recording& recording, const JobReport& job,
                                      const Json& facts);

// The data of the page, for tests and for the page.
[[nodiscard]] Json report_data(const Recording& recording, const JobReport& job, const Json& facts);

}  // namespace annulus::cli
