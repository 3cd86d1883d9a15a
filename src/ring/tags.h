#pragma once

#include <cstdint>

namespace annulus::ring {

// Tags of the executor's messages. One call at a time uses a transport, so that tags only tell
// kinds apart.
inline constexpr std::uint32_t kTagAgree = 1;
inline constexpr std::uint32_t kTagParcels = 2;
inline constexpr std::uint32_t kTagReturns = 3;
inline constexpr std::uint32_t kTagRecords = 4;

}  // namespace annulus::ring
