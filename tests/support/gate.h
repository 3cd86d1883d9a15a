#pragma once

#include <condition_variable>
#include <mutex>

#include "annulus/device.h"

namespace annulus::test {

// An event that happens when the test triggers it.
class Gate final : public Event::State {
 public:
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

}  // namespace annulus::test
