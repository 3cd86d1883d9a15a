#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "annulus/error.h"

// Helpers shared by the tests of transports.
namespace annulus::test {

using std::chrono::milliseconds;
using Bytes = std::vector<std::byte>;

[[nodiscard]] inline Bytes block(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((static_cast<std::size_t>(seed) * 131 + i * 7) & 0xffU);
  }
  return bytes;
}

[[nodiscard]] inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Returns the error that `action` must raise.
inline TransportError transport_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const TransportError& error) {
    return error;
  }
  ADD_FAILURE() << "no TransportError was thrown";
  return TransportError("none");
}

inline void expect_mentions(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is missing in: " << text;
  }
}

}  // namespace annulus::test
