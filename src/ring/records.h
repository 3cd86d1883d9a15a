#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "annulus/transport.h"

namespace annulus::ring {

// Collective all-gather: element r is the record of rank r. Records may have any size, including 0,
// but every rank receives all of them: keep them to a few kilobytes. Costs 2 ceil(log2(size))
// messages: one round for the sizes, one for the records.
//
// `agree` only reports that ranks differ; records show in what.
[[nodiscard]] std::vector<std::string> gather_records(Transport& transport, std::string_view mine);

}  // namespace annulus::ring
