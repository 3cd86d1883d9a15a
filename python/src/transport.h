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

// A deadline as Python gives it. Throws ConfigError.
std::chrono::milliseconds milliseconds_of(double seconds);

struct Counters {
  std::atomic<std::uint64_t> bytes_sent = 0;
  std::atomic<std::uint64_t> messages_sent = 0;
  std::atomic<std::uint64_t> bytes_received = 0;
  std::atomic<std::uint64_t> messages_received = 0;
};

// A transport written in Python: a subclass of annulus.Transport with abort and either send and
// receive, post, or prepare. The executor calls it without the GIL on the thread that called the
// executor; every call here takes the GIL. Rank, size, name, deadline and counters are stored in
// C++, so reading them does not need it.
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

  // These do not call Python overrides.
  void store_deadline(double seconds);
  [[nodiscard]] double stored_deadline() const { return deadline_; }
  void store_health(Health health);
  [[nodiscard]] Health stored_health() const;

  // Throws the library's counterpart of a Python error. Needs the GIL.
  [[noreturn]] void fail(const std::string& where, const nb::python_error& error);
  // For an error of one message: asks the transport's explain() for its cause.
  [[noreturn]] void fail(const std::string& where, int peer, Way way,
                         const nb::python_error& error);
  void finish_sends();                           // needs the GIL
  void forget_prepared() { prepared_.clear(); }  // needs the GIL
  int traverse(visitproc visit, void* arg) const { return prepared_.traverse(visit, arg); }
  [[nodiscard]] nb::object waiting() const;  // needs the GIL

  // While it lives, waiting() reports which rank the transport waits for.
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
  // For messages in device memory.
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
  std::atomic<std::chrono::steady_clock::rep> wait_begin_ = 0;  // 0: not waiting
  std::atomic<int> wait_peer_ = -1;
};

}  // namespace annulus::python
