#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace annulus {

// Every exception that leaves the library is one of the four kinds below. The library never
// prints, exits or aborts; a message says where, what was found, what was expected and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller made an error: shapes, options, files. Nothing has been changed.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// The ring has failed. `rank()` is the rank at fault, or -1 if unknown. The transport is dead: make
// a new one.
class TransportError : public Error {
 public:
  explicit TransportError(const std::string& message, int rank = -1)
      : Error(message), rank_(rank) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

// The device cannot do it: out of memory, a missing instruction set, a CUDA error.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// Bytes; -1: not known.
struct Shortage {
  std::int64_t asked = -1;   // the allocation that failed
  std::int64_t needed = -1;  // lower bound of everything that was to be allocated
  std::int64_t free = -1;    // free memory of the device at that time
};

// Memory ran out on this rank or on another rank of the ring, and recovery (RingOptions::recover)
// did not help or was off.
class OutOfMemory : public DeviceError {
 public:
  explicit OutOfMemory(const std::string& message, const Shortage& shortage = {})
      : DeviceError(message), shortage_(shortage) {}
  [[nodiscard]] const Shortage& shortage() const noexcept { return shortage_; }

 private:
  Shortage shortage_;
};

// RingAttention::interrupt() ended a pass on this rank.
class Interrupted : public Error {
 public:
  using Error::Error;
};

}  // namespace annulus
