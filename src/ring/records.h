#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "annulus/transport.h"

namespace annulus::ring {

// Collective: the records of all ranks, element r is what rank r passed. They may have any sizes,
// also none; meant for a few kilobytes, because every rank gets all of them. Costs
// 2 ceil(log2(size)) messages: one round for the sizes, one for the records.
//
// For what an agreement cannot do: where `agree` only says that ranks differ, this shows in what.
[[nodiscard]] std::vector<std::string> gather_records(Transport& transport, std::string_view mine);

}  // namespace annulus::ring
