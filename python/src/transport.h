#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "annulus/transport.h"

namespace annulus::python {

namespace nb = nanobind;

struct Counters {
  std::atomic<std::uint64_t> bytes_sent = 0;
  std::atomic<std::uint64_t> messages_sent = 0;
  std::atomic<std::uint64_t> bytes_received = 0;
  std::atomic<std::uint64_t> messages_received = 0;
};

// A transport written in Python: a subclass of annulus.Transport with send, receive and abort. The
// executor calls it on the thread that called the executor, without the GIL; every call here takes
// it. Rank, size, name, deadline and counters live in C++, so that asking for them does not.
class PyTransport final : public Transport {
 public:
  PyTransport(int rank, int size, std::string name);

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::unique_ptr<Transfer> send(int peer, std::uint32_t tag,
                                               std::span<const std::byte> bytes) override;
  [[nodiscard]] std::unique_ptr<Transfer> receive(int peer, std::uint32_t tag,
                                                  std::span<std::byte> bytes) override;
  void abort(const std::string& reason) noexcept override;
  void set_deadline(std::chrono::milliseconds deadline) override;
  [[nodiscard]] TransportCounters counters() const override;

  // Without going through Python's overrides.
  void store_deadline(double seconds);
  [[nodiscard]] double deadline() const { return deadline_; }

 private:
  [[nodiscard]] std::unique_ptr<Transfer> post(const char* method, int peer, std::uint32_t tag,
                                               void* data, std::size_t bytes, bool sending);
  [[nodiscard]] std::string where(const char* method, int peer) const;

  int rank_;
  int size_;
  std::string name_;
  double deadline_ = 60.0;  // seconds
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

}  // namespace annulus::python
