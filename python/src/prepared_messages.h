#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "annulus/transport.h"

namespace annulus::python {

namespace nb = nanobind;

// A view of a message's bytes, read-only for one that is sent. Needs the GIL.
nb::object view_of(const Message& message);

// transfer.wait(limit), or wait() if `limit` is None. Needs the GIL. Throws python_error.
void wait_for(nb::handle transfer, nb::handle limit);

// Sends of up to this many bytes leave from a copy and are not waited for: a transport may never
// report their outcome when the other side ends.
inline constexpr std::int64_t kShortMessage = 8192;

// How to begin messages, as a Python transport's prepare() has returned it: a callable, its
// arguments, and the argument of wait() of the transfer that it returns. Executors post the same
// messages from the same memory in every pass, so Python is asked once for each. All methods need
// the GIL.
class PreparedMessages {
 public:
  // Begins a message. Returns Python's transfer, or an invalid object if it is not to be waited
  // for. `limit` is the argument of wait(). Throws python_error.
  [[nodiscard]] nb::object begin(const Message& message, const nb::object& prepare,
                                 const nb::object& limit);
  // Waits until the other ranks have taken the short sends. One that fails is passed over: its rank
  // has ended. Throws python_error for Ctrl-C.
  void finish_sends(const nb::object& limit);
  void clear();                                    // including those under way
  int traverse(visitproc visit, void* arg) const;  // for the garbage collector

 private:
  struct Key {
    Way way;
    int peer;
    std::uint32_t tag;
    const std::byte* data;
    std::int64_t bytes;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const;
  };
  // A message in one piece of memory: its own, or that of a copy.
  struct Prepared {
    nb::object call;
    nb::object arguments;
    std::unique_ptr<std::byte[]> copy;
    nb::object under_way;  // the transfer that last used the copy
  };
  // Short sends alternate between two copies, so that the previous one may still be under way.
  struct Entry {
    std::array<Prepared, 2> turns;
    unsigned next = 0;
  };
  static Prepared ask(const Message& message, const nb::object& prepare);
  using Map = std::unordered_map<Key, std::shared_ptr<Entry>, Hash>;
  Map known_;
  Map known_before_;  // short sends of these may still be under way
};

}  // namespace annulus::python
