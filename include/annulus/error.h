#pragma once

#include <stdexcept>
#include <string>

namespace annulus {

// Every exception that leaves the library is one of the four kinds below. The library never
// prints, exits or aborts; a message says where, what was found, what was expected and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller is wrong: shapes, options, files. Nothing has been changed.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// The ring is broken. `rank()` is the rank at fault as far as it is known, else -1. The transport
// is dead afterwards: build a new one.
class TransportError : public Error {
 public:
  explicit TransportError(const std::string& message, int rank = -1)
      : Error(message), rank_(rank) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

// The device cannot do it: out of memory, a missing instruction set, CUDA.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// RingAttention::interrupt() ended a pass on this rank.
class Interrupted : public Error {
 public:
  using Error::Error;
};

}  // namespace annulus
