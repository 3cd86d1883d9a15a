#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "annulus/transport.h"

namespace annulus::test {

// Forwards everything to another transport, which it may own. Wrappers override what they change.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(Transport& inner) : inner_(inner) {}
  explicit ForwardingTransport(std::unique_ptr<Transport> inner)
      : owned_(std::move(inner)), inner_(*owned_) {}

  [[nodiscard]] int rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] std::string name() const override { return inner_.name(); }
  [[nodiscard]] bool reaches(const Device& device) const override { return inner_.reaches(device); }
  [[nodiscard]] bool in_order() const override { return inner_.in_order(); }
  [[nodiscard]] Region expose(std::span<std::byte> memory, const Device& device,
                              std::shared_ptr<Queue> copies) override {
    return inner_.expose(memory, device, std::move(copies));
  }
  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    return inner_.post(messages, after);
  }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }
  [[nodiscard]] Health health() const override { return inner_.health(); }
  void set_deadline(std::chrono::milliseconds deadline) override { inner_.set_deadline(deadline); }
  [[nodiscard]] std::chrono::milliseconds deadline() const override { return inner_.deadline(); }
  [[nodiscard]] TransportCounters counters() const override { return inner_.counters(); }
  void count(const TransportCounters& moved) override { inner_.count(moved); }

 protected:
  [[nodiscard]] Transport& inner() const { return inner_; }

 private:
  const std::unique_ptr<Transport> owned_;
  Transport& inner_;
};

// Carries host memory only and ignores queues: callers wait for them first. It claims to reach a
// device only if that device's memory is host memory.
class HostOnlyTransport final : public ForwardingTransport {
 public:
  HostOnlyTransport(Transport& inner, bool reaches)
      : ForwardingTransport(inner), reaches_(reaches) {}
  HostOnlyTransport(std::unique_ptr<Transport> inner, bool reaches)
      : ForwardingTransport(std::move(inner)), reaches_(reaches) {}

  [[nodiscard]] std::string name() const override { return "host only"; }
  [[nodiscard]] bool reaches(const Device&) const override { return reaches_; }
  [[nodiscard]] Region expose(std::span<std::byte> memory, const Device& device,
                              std::shared_ptr<Queue>) override {
    return inner().expose(memory, device, nullptr);
  }

 private:
  bool reaches_;
};

// Executes one batch after the other, immediately. A message waits forever if its other side is in
// a batch that is posted later.
class InOrderTransport final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  [[nodiscard]] bool in_order() const override { return true; }
  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override {
    auto ticket = inner().post(messages, after);
    ticket->wait();
    return ticket;
  }
};

}  // namespace annulus::test
