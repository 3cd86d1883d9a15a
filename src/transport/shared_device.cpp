#include "transport/shared_device.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/message_check.h"
#include "transport/shared_device_ring.h"

namespace annulus {
namespace {

using shared_device::Clock;
using shared_device::Ring;
using shared_device::Transfer;

class SharedTicket final : public Ticket {
 public:
  explicit SharedTicket(std::shared_ptr<Ring> ring) : ring_(std::move(ring)) {}
  ~SharedTicket() override {
    host_.reset();
    for (const auto& transfer : transfers_) ring_->call_off(*transfer);
  }
  SharedTicket(const SharedTicket&) = delete;
  SharedTicket& operator=(const SharedTicket&) = delete;

  Transfer& add() { return *transfers_.emplace_back(std::make_unique<Transfer>()); }
  void add(std::unique_ptr<Ticket> host) { host_ = std::move(host); }

  void wait() override {
    meet();
    for (const auto& transfer : transfers_) ring_->arrive(*transfer);
    if (host_ != nullptr) host_->wait();
  }
  void wait(Queue& queue) override {
    meet();
    for (const auto& transfer : transfers_) ring_->arrive(*transfer, queue);
    if (host_ != nullptr) host_->wait(queue);
  }

 private:
  // Receives first: other ranks wait for their copies.
  void meet() {
    for (const bool sends : {false, true}) {
      for (const auto& transfer : transfers_) {
        if (transfer->sends == sends) ring_->meet(*transfer);
      }
    }
  }

  std::shared_ptr<Ring> ring_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
  std::unique_ptr<Ticket> host_;
};

class SharedDeviceTransport final : public SharedDevice {
 public:
  explicit SharedDeviceTransport(std::shared_ptr<Ring> ring) : ring_(std::move(ring)) {}

  [[nodiscard]] int rank() const override { return control().rank(); }
  [[nodiscard]] int size() const override { return control().size(); }
  [[nodiscard]] std::string name() const override {
    return control().name() + " and shared device memory";
  }
  [[nodiscard]] bool reaches(const Device&) const override { return true; }

  [[nodiscard]] Region expose(std::span<std::byte> memory, const Device& device,
                              std::shared_ptr<Queue> copies) override {
    if (copies == nullptr) return control().expose(memory, device, nullptr);
    Region region = Transport::expose(memory, device, std::move(copies));
    region.registration = std::make_shared<const SharedHandle>(
        memory.empty() ? SharedHandle{} : ring_->sharing().share(memory.data()));
    return region;
  }

  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    const auto on_device = [](const Message& message) {
      return message.region != nullptr && message.region->copies != nullptr;
    };
    if (std::none_of(messages.begin(), messages.end(), on_device))
      return control().post(messages, after);
    auto ticket = std::make_unique<SharedTicket>(ring_);
    std::vector<Message> on_host;
    for (const Message& message : messages) {
      if (on_device(message)) {
        check_message(message, rank(), size());
      } else {
        on_host.push_back(message);
      }
    }
    // Sends first: other ranks may wait for them, and receives that find their notes do not wait.
    for (const Way way : {Way::send, Way::receive}) {
      for (const Message& message : messages) {
        if (message.way == way && on_device(message)) start(ticket->add(), message, after);
      }
    }
    if (!on_host.empty()) ticket->add(control().post(on_host, after));
    return ticket;
  }

  void check() override { ring_->check(); }
  void abort(const std::string& reason) noexcept override { ring_->abort(reason); }
  [[nodiscard]] Health health() const override { return ring_->health(); }
  void set_deadline(std::chrono::milliseconds deadline) override {
    control().set_deadline(deadline);
  }
  [[nodiscard]] std::chrono::milliseconds deadline() const override { return control().deadline(); }
  [[nodiscard]] TransportCounters counters() const override { return control().counters(); }
  void count(const TransportCounters& moved) override { control().count(moved); }

 private:
  [[nodiscard]] Transport& control() const { return ring_->control(); }

  void start(Transfer& transfer, const Message& message, const Event& after) {
    transfer.sends = message.way == Way::send;
    transfer.peer = message.peer;
    transfer.tag = message.tag;
    transfer.bytes = message.bytes;
    transfer.deadline_length = std::min(control().deadline(), kLongestDeadline);
    transfer.deadline = Clock::now() + transfer.deadline_length;
    if (transfer.sends) {
      SharedHandle handle = *static_cast<const SharedHandle*>(message.region->registration.get());
      handle.offset += message.offset;
      ring_->send(transfer, handle, message.data(), after);
    } else {
      transfer.data = message.data();
      transfer.copies = message.region->copies;
      transfer.after = after;
      ring_->receive(transfer);
    }
  }

  std::shared_ptr<Ring> ring_;  // tickets may outlive the transport
};

}  // namespace

std::unique_ptr<SharedDevice> share_device_memory(Transport& control,
                                                  std::shared_ptr<DeviceSharing> sharing,
                                                  std::string& why) {
  auto ring = std::make_shared<Ring>(control, std::move(sharing));
  why = ring->connect();
  if (!why.empty()) return nullptr;
  return std::make_unique<SharedDeviceTransport>(std::move(ring));
}

}  // namespace annulus
