#pragma once

#include <memory>
#include <string>

#include "annulus/transport.h"
#include "core/device_sharing.h"

namespace annulus {

// A transport that passes device memory between processes of one host. The receiver maps the
// sender's memory and copies from it with its own device queue. Messages in host memory go through
// `control`, which outlives this transport. Errors are shared: each of the two fails when the other
// does.
class SharedDevice : public Transport {
 public:
  // Throws TransportError if queues that waited for another process were released because that
  // process failed. The host may not have waited for it, and so may not know yet.
  virtual void check() = 0;
};

// Collective over `control`. Null on all ranks if any rank cannot share memory; `why` then says
// which one and why.
[[nodiscard]] std::unique_ptr<SharedDevice> share_device_memory(
    Transport& control, std::shared_ptr<DeviceSharing> sharing, std::string& why);

}  // namespace annulus
