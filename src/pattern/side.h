#pragma once

#include <cstdint>

namespace annulus {

enum class Side : std::uint8_t { queries, keys };

}  // namespace annulus
