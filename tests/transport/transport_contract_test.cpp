#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/in_process.h"
#include "support/chaos_transport.h"
#include "support/forwarding_transport.h"
#include "support/transport_contract_errors.h"
#include "support/transport_contract_messages.h"
#include "transport/shared_device.h"

namespace annulus::test {
namespace {

Ring in_process(int ranks, milliseconds deadline) {
  return make_in_process_ring(ranks, {.deadline = deadline});
}

// As a transport without queues of its own: whoever posts waits for the device.
Ring host_only(int ranks, milliseconds deadline) {
  Ring ring = in_process(ranks, deadline);
  for (auto& transport : ring)
    transport = std::make_unique<HostOnlyTransport>(std::move(transport), true);
  return ring;
}

// Device memory between processes, over a transport that knows of host memory alone.
class SharedDevice final : public ForwardingTransport {
 public:
  SharedDevice(std::unique_ptr<Transport> control, std::unique_ptr<Transport> shared, bool all)
      : ForwardingTransport(*shared),
        control_(std::move(control)),
        shared_(std::move(shared)),
        copies_(all ? make_late_queue() : nullptr),
        before_(inner().counters()) {}

  // `all`: host memory counts as a device's, too.
  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    if (copies_ == nullptr) return inner().post(messages, after);
    std::vector<Message> queued(messages.begin(), messages.end());
    std::deque<Region> regions;
    for (Message& message : queued) {
      if (message.region == nullptr || message.region->copies != nullptr) continue;
      const auto bytes = static_cast<std::size_t>(message.region->bytes);
      regions.push_back(inner().expose({message.region->data, bytes}, Device{}, copies_));
      message.region = &regions.back();
    }
    return inner().post(queued, after);
  }
  // Without the messages by which ranks found each other.
  [[nodiscard]] TransportCounters counters() const override {
    const TransportCounters all = inner().counters();
    return {.bytes_sent = all.bytes_sent - before_.bytes_sent,
            .messages_sent = all.messages_sent - before_.messages_sent,
            .bytes_received = all.bytes_received - before_.bytes_received,
            .messages_received = all.messages_received - before_.messages_received};
  }

 private:
  std::unique_ptr<Transport> control_;
  std::unique_ptr<Transport> shared_;
  std::shared_ptr<Queue> copies_;
  TransportCounters before_;
};

Ring shared_device(int ranks, milliseconds deadline, bool all) {
  Ring ring = in_process(ranks, milliseconds(60'000));
  std::vector<std::thread> threads;
  for (auto& transport : ring) {
    threads.emplace_back([&] {
      auto control = std::make_unique<HostOnlyTransport>(std::move(transport), false);
      std::string why;
      auto shared = share_device_memory(*control, make_late_sharing(), why);
      EXPECT_EQ(why, "");
      if (shared == nullptr) return;
      shared->set_deadline(deadline);
      transport = std::make_unique<SharedDevice>(std::move(control), std::move(shared), all);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ring;
}

INSTANTIATE_TEST_SUITE_P(
    , TransportContract,
    testing::Values(TransportMaker{"in_process", in_process, true},
                    TransportMaker{"shared_device",
                                   [](int ranks, milliseconds deadline) {
                                     return shared_device(ranks, deadline, false);
                                   },
                                   true},
                    TransportMaker{"all_shared_device",
                                   [](int ranks, milliseconds deadline) {
                                     return shared_device(ranks, deadline, true);
                                   },
                                   true},
                    TransportMaker{"host_only", host_only, false},
                    TransportMaker{"chaos",
                                   [](int ranks, milliseconds deadline) {
                                     return make_chaos_ring(in_process(ranks, deadline),
                                                            {.seed = 2});
                                   },
                                   true},
                    TransportMaker{"chaos_host_only",
                                   [](int ranks, milliseconds deadline) {
                                     return make_chaos_ring(host_only(ranks, deadline),
                                                            {.seed = 3});
                                   },
                                   false}),
    name_of_maker);

}  // namespace
}  // namespace annulus::test
