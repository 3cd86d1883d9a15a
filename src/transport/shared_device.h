#pragma once

#include <memory>
#include <string>

#include "annulus/transport.h"
#include "core/device_sharing.h"

namespace annulus {

// A transport that passes device memory between processes of one host: the receiver copies from the
// sender's memory, which it has mapped, by the queue of its own. Messages in host memory are those
// of `control`, which outlives it, and so are its errors: this ends with `control`, and `control`
// with this.
class SharedDevice : public Transport {
 public:
  // TransportError where queues that waited for another process were let go, because it had failed:
  // nobody on the host may have waited for it.
  virtual void check() = 0;
};

// Collective over `control`. Null on all ranks where a rank cannot; `why` then says which and why.
[[nodiscard]] std::unique_ptr<SharedDevice> share_device_memory(
    Transport& control, std::shared_ptr<DeviceSharing> sharing, std::string& why);

}  // namespace annulus
