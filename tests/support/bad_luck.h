#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "kernels/backend.h"
#include "support/ring_fixture.h"
#include "support/transport_checks.h"

namespace annulus::test {

enum class Luck : std::uint8_t { good, no_memory, no_device };

// While one exists, a thread with bad luck gets no backend.
class FeignedLuck {
 public:
  static inline thread_local Luck of_this_thread = Luck::good;

  FeignedLuck() : before_(wrap_backends(&fail)) {}
  ~FeignedLuck() { wrap_backends(before_); }
  FeignedLuck(const FeignedLuck&) = delete;
  FeignedLuck& operator=(const FeignedLuck&) = delete;

 private:
  static std::shared_ptr<Backend> fail(std::shared_ptr<Backend> backend) {
    if (of_this_thread == Luck::no_memory) throw std::bad_alloc();
    if (of_this_thread == Luck::no_device) throw DeviceError("the device is on fire");
    return backend;
  }
  WrapBackend before_;
};

// Runs on every rank; rank 1 alone cannot make an executor. `Own` is the type of its error. The
// others get a ConfigError (OutOfMemory is raised on all ranks). A rank that waited until its
// deadline would have a TransportError.
template <typename Own>
void expect_refusal(const RingOptions& options, Transport& transport, const std::string& text) {
  try {
    const RingAttention ring(options, transport);
    ADD_FAILURE() << "rank " << transport.rank() << " has noticed nothing";
  } catch (const Error& error) {
    const bool own = transport.rank() == 1 || std::is_same_v<Own, OutOfMemory>;
    const bool expected = own ? dynamic_cast<const Own*>(&error) != nullptr
                              : dynamic_cast<const ConfigError*>(&error) != nullptr;
    EXPECT_TRUE(expected) << "rank " << transport.rank() << ": " << error.what();
    expect_mentions(error.what(), {text});
    if (transport.rank() != 1) expect_mentions(error.what(), {"rank 1 refused"});
  }
}

}  // namespace annulus::test
