#pragma once

#include <cstdint>

namespace annulus::ring {

// Tags of the executor's messages. Only one call at a time uses a transport, so a tag per kind is
// enough.
inline constexpr std::uint32_t kTagAgree = 1;
inline constexpr std::uint32_t kTagParcels = 2;
inline constexpr std::uint32_t kTagReturns = 3;
inline constexpr std::uint32_t kTagRecords = 4;
inline constexpr std::uint32_t kTagCache = 5;

}  // namespace annulus::ring
