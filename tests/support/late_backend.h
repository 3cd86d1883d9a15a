#pragma once

#include <cstdint>
#include <memory>

#include "kernels/backend.h"

// Simulates a device: runs another backend's kernels behind queues with threads of their own, late
// and with random delays. Memory starts as NaN, and the target of a copy is NaN until the copy is
// made. Code that forgets an event computes with NaN or causes a race.
namespace annulus::test {

[[nodiscard]] std::shared_ptr<Backend> make_late(std::shared_ptr<Backend> inner);
// A device whose memory processes can share.
[[nodiscard]] std::shared_ptr<Backend> make_late_shared(std::shared_ptr<Backend> inner);
[[nodiscard]] std::shared_ptr<Queue> make_late_queue();

// Treats its memory as memory of a device that processes share.
[[nodiscard]] std::shared_ptr<DeviceSharing> make_late_sharing();
// Removes what a killed process left behind.
void forget_late_memory_of(int process);

// For its lifetime, every new executor computes late.
class LateBackends {
 public:
  explicit LateBackends(bool shared = false)
      : before_(wrap_backends(shared ? &make_late_shared : &make_late)) {}
  ~LateBackends() { wrap_backends(before_); }
  LateBackends(const LateBackends&) = delete;
  LateBackends& operator=(const LateBackends&) = delete;

 private:
  WrapBackend before_;
};

// How often a thread that belongs to no queue has waited for a late queue so far.
[[nodiscard]] std::int64_t host_waits();
// Makes the calling thread count as a queue's thread. Test transports may copy on threads of their
// own.
void forgive_waits_of_this_thread();

}  // namespace annulus::test
