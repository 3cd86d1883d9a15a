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

// Bytes; -1: not known.
struct Shortage {
  std::int64_t asked = -1;   // what could not be had, at once
  std::int64_t needed = -1;  // everything that was to be allocated, at the least
  std::int64_t free = -1;    // of the device, as it said then
};

// Memory ran out on this rank or another one of the ring, and what could be done about it
// (RingOptions::recover) has been done.
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
