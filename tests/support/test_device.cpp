#include "support/test_device.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "annulus/cuda.h"
#include "kernels/backend.h"

namespace annulus::test {

const Device& test_device() {
  static const Device device = [] {
    const char* text = std::getenv("ANNULUS_TEST_DEVICE");
    if (text == nullptr || std::string(text) == "cpu") return Device{};
    const std::string complaint = cuda_complaint();
    if (!complaint.empty()) {
      std::printf("skipped: %s\n", complaint.c_str());
      std::fflush(stdout);
      std::_Exit(kSkipped);
    }
    return Device{Device::Kind::cuda, std::stoi(std::string(text).substr(5))};
  }();
  return device;
}

DeviceImage::DeviceImage(std::span<std::byte> host) : host_(host) {
  const std::shared_ptr<Backend> backend = backend_of(test_device(), 0);
  memory_ = backend->allocate(static_cast<std::int64_t>(host.size()), "a test's tensor");
  queue_ = backend->make_queue();
}

void DeviceImage::upload() {
  queue_->copy(memory_.data(), host_.data(), static_cast<std::int64_t>(host_.size()));
  queue_->record().wait();
}

void DeviceImage::download() {
  queue_->copy(host_.data(), memory_.data(), static_cast<std::int64_t>(host_.size()));
  queue_->record().wait();
}

}  // namespace annulus::test
