#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "annulus/transport.h"
#include "prepared_messages.h"

namespace annulus::python {

namespace nb = nanobind;

// A deadline as Python gives it; ConfigError.
std::chrono::milliseconds milliseconds_of(double seconds);

struct Counters {
  std::atomic<std::uint64_t> bytes_sent = 0;
  std::atomic<std::uint64_t> messages_sent = 0;
  std::atomic<std::uint64_t> bytes_received = 0;
  std::atomic<std::uint64_t> messages_received = 0;
};

// A transport written in Python: a subclass of annulus.Transport with send and receive, or post, or
// prepare, and abort. The executor calls it on the thread that called the executor, without the
// GIL; every call here takes it. Rank, size, name, deadline and counters live in C++, so that
// asking for them does not.
class PyTransport final : public Transport {
 public:
  PyTransport(int rank, int size, std::string name);

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] bool reaches(const Device& device) const override;
  [[nodiscard]] bool in_order() const override;
  [[nodiscard]] std::unique_ptr<Ticket> post(std::span<const Message> messages,
                                             const Event& after) override;
  void abort(const std::string& reason) noexcept override;
  [[nodiscard]] Health health() const override;
  void set_deadline(std::chrono::milliseconds deadline) override;
  [[nodiscard]] std::chrono::milliseconds deadline() const override;
  [[nodiscard]] TransportCounters counters() const override;
  void count(const TransportCounters& moved) override;

  // Without going through Python's overrides.
  void store_deadline(double seconds);
  [[nodiscard]] double stored_deadline() const { return deadline_; }
  void store_health(Health health);
  [[nodiscard]] Health stored_health() const;

  // Throws what an error of Python's is in the library. Needs the GIL.
  [[noreturn]] void fail(const std::string& where, const nb::python_error& error);
  // Of a message: asks explain() what it means.
  [[noreturn]] void fail(const std::string& where, int peer, Way way,
                         const nb::python_error& error);
  void forget_prepared() { prepared_.clear(); }  // needs the GIL
  int traverse(visitproc visit, void* arg) const { return prepared_.traverse(visit, arg); }
  [[nodiscard]] nb::object waiting() const;  // needs the GIL

  // While it lives, waiting() says for whom.
  class Waiting {
   public:
    explicit Waiting(PyTransport& transport);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    void is_for(int peer) const;

   private:
    PyTransport& transport_;
  };

 private:
  // `messages` lie in memory of devices.
  [[nodiscard]] std::unique_ptr<Ticket> post_device(std::span<const Message> messages,
                                                    const Event& after);
  [[nodiscard]] std::unique_ptr<Ticket> post_prepared(std::span<const Message> messages,
                                                      const nb::object& prepare);

  int rank_;
  int size_;
  std::string name_;
  double deadline_ = 60.0;  // seconds
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  mutable std::mutex health_mutex_;
  Health health_;
  PreparedMessages prepared_;
  std::atomic<std::uint64_t> wait_number_ = 0;
  std::atomic<std::chrono::steady_clock::rep> wait_begin_ = 0;  // 0: nothing is waited for
  std::atomic<int> wait_peer_ = -1;
};

}  // namespace annulus::python
