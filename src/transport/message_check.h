#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>

#include "annulus/error.h"
#include "annulus/transport.h"
#include "transport/rank_prefix.h"

namespace annulus {

// Throws ConfigError for a message that no transport can carry.
inline void check_message(const Message& message, int rank, int size) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError(rank_prefix(rank, size) + "Transport::post (" +
                      (message.way == Way::send ? "send" : "receive") + "): " + what);
  };
  if (message.peer < 0 || message.peer >= size) {
    fail("peer is " + std::to_string(message.peer) + ", expected 0.." + std::to_string(size - 1));
  }
  if (message.region == nullptr) fail("a message without a region: expose its memory first");
  const std::int64_t region_bytes = message.region->bytes;
  // Not offset + bytes, which may overflow.
  if (message.offset < 0 || message.bytes < 0 || message.offset > region_bytes ||
      message.bytes > region_bytes - message.offset) {
    fail(std::to_string(message.bytes) + " bytes at " + std::to_string(message.offset) +
         " of a region of " + std::to_string(region_bytes) + ", expected a part of it");
  }
}

// Throws ConfigError for a deadline that is not positive.
inline void check_deadline(std::chrono::milliseconds deadline, const std::string& where) {
  if (deadline.count() > 0) return;
  throw ConfigError(where + ": the deadline is " + std::to_string(deadline.count()) +
                    " ms, expected more than 0");
}

// Throws ConfigError for a negative or non-finite rate.
inline void check_rate(double bytes_per_second, const std::string& where) {
  if (bytes_per_second >= 0 && !std::isinf(bytes_per_second)) return;
  throw ConfigError(where + ": bytes_per_second is " + std::to_string(bytes_per_second) +
                    ", expected 0 (no limit) or more");
}

// now() + milliseconds::max() would overflow. No deadline is longer than this.
inline constexpr std::chrono::milliseconds kLongestDeadline = std::chrono::hours(24 * 365);

}  // namespace annulus
