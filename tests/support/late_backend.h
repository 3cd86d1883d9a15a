#pragma once

#include <cstdint>
#include <memory>

#include "kernels/backend.h"

// A device without a device: another backend's kernels behind queues that run on threads of their
// own, late and at random. Its memory starts as NaNs, and whatever a copy will overwrite is NaNs
// until the copy is made. Whoever forgets an event computes on these, or races.
namespace annulus::test {

[[nodiscard]] std::shared_ptr<Backend> make_late(std::shared_ptr<Backend> inner);
// One whose memory processes can share.
[[nodiscard]] std::shared_ptr<Backend> make_late_shared(std::shared_ptr<Backend> inner);
[[nodiscard]] std::shared_ptr<Queue> make_late_queue();

// Its memory as that of a device which processes share.
[[nodiscard]] std::shared_ptr<DeviceSharing> make_late_sharing();
// What is left of it when a process was killed.
void forget_late_memory_of(int process);

// Every executor made from now on computes late; for as long as it lives.
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

// How often a thread that is no queue's has waited for a late queue, so far.
[[nodiscard]] std::int64_t host_waits();
// Whether the calling thread counts as a queue's: transports of tests may copy on threads of their
// own.
void forgive_waits_of_this_thread();

}  // namespace annulus::test
