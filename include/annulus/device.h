#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace annulus {

// Where memory lies and kernels run. Host memory belongs to the CPU device, index 0.
struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  bool operator==(const Device&) const = default;
};
[[nodiscard]] std::string name_of(const Device& device);  // "cpu", "cuda:1"

// A point in a queue's work. A default event has always happened, because a CPU queue executes work
// when it is enqueued. Copies refer to the same event.
class Event {
 public:
  class State {  // the device's part of it
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
  };

  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Blocks the calling thread. DeviceError if the work before it failed.
  void wait() const {
    if (state_ != nullptr) state_->wait();
  }
  [[nodiscard]] State* state() const { return state_.get(); }

 private:
  std::shared_ptr<State> state_;
};

// Executes work of one device in the order in which it was enqueued. Enqueuing does not wait for
// the work. Any thread may enqueue.
class Queue {
 public:
  virtual ~Queue() = default;

  [[nodiscard]] virtual Device device() const = 0;
  // Happens when everything enqueued so far is done.
  [[nodiscard]] virtual Event record() = 0;
  // Makes work enqueued from now on wait for `event`, which may belong to any queue.
  virtual void wait(const Event& event) = 0;
  // Makes work enqueued from now on wait for everything enqueued on `other` so far.
  virtual void follow(Queue& other) { wait(other.record()); }
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
};

}  // namespace annulus
