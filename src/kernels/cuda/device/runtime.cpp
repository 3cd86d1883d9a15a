#include "kernels/cuda/device/runtime.h"

#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "annulus/cuda.h"
#include "annulus/error.h"

namespace annulus::cuda {
namespace {

struct Allocators {
  std::mutex lock;
  CudaAllocator current;
};
Allocators& allocators() {
  static auto* all = new Allocators;  // never destroyed: memory may be freed while the process ends
  return *all;
}
CudaAllocator current_allocator() {
  const std::lock_guard guard(allocators().lock);
  return allocators().current;
}

// A pool of events, because creating an event costs more than recording one. Events are never
// destroyed, so that nothing depends on the order of destruction at exit.
class EventPool {
 public:
  [[nodiscard]] cudaEvent_t take() {
    {
      const std::lock_guard guard(lock_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
  }
  void give(cudaEvent_t event) {
    const std::lock_guard guard(lock_);
    free_.push_back(event);
  }
  static EventPool& of(int device) {
    static auto* lock = new std::mutex;
    static auto* pools = new std::vector<std::unique_ptr<EventPool>>;
    const std::lock_guard guard(*lock);
    const auto index = static_cast<std::size_t>(device);
    while (pools->size() <= index) pools->push_back(std::make_unique<EventPool>());
    return *(*pools)[index];
  }

 private:
  std::mutex lock_;
  std::vector<cudaEvent_t> free_;
};

// Allows calls in this scope while a graph is being captured, without making them part of the
// graph. Executors may be created and destroyed at any time, for example by garbage collection.
class OutsideOfGraphs {
 public:
  OutsideOfGraphs() : entered_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}
  ~OutsideOfGraphs() {
    if (entered_) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  OutsideOfGraphs(const OutsideOfGraphs&) = delete;
  OutsideOfGraphs& operator=(const OutsideOfGraphs&) = delete;

 private:
  cudaStreamCaptureMode mode_ =
      cudaStreamCaptureModeRelaxed;  // afterwards the thread's previous mode
  bool entered_;
};

// The id of the graph that is being captured from a stream; 0: none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  // The other arguments differ between CUDA versions and are not needed.
  if (cudaStreamGetCaptureInfo(stream, &status, &id) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the legacy stream while another one is captured
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

class StreamEvent final : public Event::State {
 public:
  StreamEvent(int device, cudaStream_t stream)
      : device_(device), captured_(capture_of(stream) != 0), event_(EventPool::of(device).take()) {
    const cudaError_t error = cudaEventRecord(event_, stream);
    if (error != cudaSuccess) EventPool::of(device_).give(event_);
    check(error, "recording an event");
  }
  ~StreamEvent() override { EventPool::of(device_).give(event_); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  void wait() override {
    // An error of CUDA would end the capture.
    if (captured_)
      throw DeviceError("cuda: waiting for the device: a graph is being captured, and not run");
    const DeviceScope scope(device_);
    const OutsideOfGraphs outside;
    check(cudaEventSynchronize(event_), "waiting for the device");
  }
  [[nodiscard]] bool has_happened() const {
    const DeviceScope scope(device_);
    const OutsideOfGraphs outside;
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(error, "asking whether an event has happened");
    return true;
  }
  [[nodiscard]] cudaEvent_t event() const { return event_; }

 private:
  int device_;
  bool captured_;
  cudaEvent_t event_;
};

class StreamQueue final : public Queue {
 public:
  StreamQueue(int device, cudaStream_t stream, bool owned)
      : device_(device), stream_(stream), owned_(owned) {}
  ~StreamQueue() override {
    if (!owned_) return;
    const OutsideOfGraphs outside;
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  [[nodiscard]] Device device() const override { return {Device::Kind::cuda, device_}; }
  [[nodiscard]] Event record() override {
    const DeviceScope scope(device_);
    return Event(std::make_shared<StreamEvent>(device_, stream_));
  }
  void wait(const Event& event) override {
    const DeviceScope scope(device_);
    if (const auto* other = dynamic_cast<const StreamEvent*>(event.state())) {
      check(cudaStreamWaitEvent(stream_, other->event(), 0), "ordering a stream after an event");
    } else {
      event.wait();
    }
  }
  // During capture, a stream cannot wait for work outside the graph. That is not needed: capture
  // begins when the device is idle, and the caller orders the launches of the graph. Captured work
  // was not enqueued, so nothing waits for it after the capture, either.
  void follow(Queue& other) override {
    const DeviceScope scope(device_);
    if (capture_of(stream_) == capture_of(stream_of(other))) Queue::follow(other);
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    const DeviceScope scope(device_);
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_),
          fmt::format("copying {} bytes", bytes));
  }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  int device_;
  cudaStream_t stream_;
  bool owned_;
};

bool blocking() {
  static const bool value = [] {
    const char* text = std::getenv("ANNULUS_CUDA_BLOCKING");
    return text != nullptr && std::string(text) == "1";
  }();
  return value;
}

}  // namespace

void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // reported here, once
  throw DeviceError(
      fmt::format("cuda: {}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

void check_launch(cudaError_t error, const char* kernel, cudaStream_t stream) {
  if (error == cudaSuccess && blocking()) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) check(error, fmt::format("kernel {}", kernel));
}

DeviceScope::DeviceScope(int device) {
  int now = 0;
  check(cudaGetDevice(&now), "asking for the current device");
  if (now == device) return;
  check(cudaSetDevice(device), fmt::format("taking device {}", device));
  before_ = now;
}

DeviceScope::~DeviceScope() {
  if (before_ >= 0) static_cast<void>(cudaSetDevice(before_));
}

std::shared_ptr<Queue> make_stream(int device) {
  const DeviceScope scope(device);
  cudaStream_t stream = nullptr;
  // Non-blocking: no implicit order with the legacy default stream.
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  return std::make_shared<StreamQueue>(device, stream, true);
}

std::shared_ptr<Queue> borrow_stream(int device, cudaStream_t stream) {
  return std::make_shared<StreamQueue>(device, stream, false);
}

cudaStream_t stream_of(Queue& queue) { return dynamic_cast<StreamQueue&>(queue).stream(); }

std::optional<MemoryState> device_memory_state(const Device& device) {
  const DeviceScope scope(device.index);
  const OutsideOfGraphs outside;
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return std::nullopt;
  const CudaAllocator allocator = current_allocator();
  const std::int64_t spare = allocator.spare ? allocator.spare(device.index) : 0;
  return MemoryState{static_cast<std::int64_t>(total), static_cast<std::int64_t>(free) + spare};
}

namespace {

Memory allocate_by(const CudaAllocator& allocator, int device, std::int64_t bytes,
                   const char* what) {
  const Device where{Device::Kind::cuda, device};
  if (bytes == 0) return {nullptr, 0, where, {}};
  admit(bytes, what, where);
  const DeviceScope scope(device);
  void* memory = nullptr;
  cudaError_t error = cudaSuccess;
  if (allocator.allocate) {
    memory = allocator.allocate(device, bytes);
  } else {
    error = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
  }
  if (error == cudaErrorMemoryAllocation || (error == cudaSuccess && memory == nullptr)) {
    static_cast<void>(cudaGetLastError());
    throw out_of_memory(bytes, what, where);
  }
  check(error, fmt::format("allocating {} bytes for {}", bytes, what));
  if (allocator.free) {
    return {static_cast<std::byte*>(memory), bytes, where,
            [device, free = allocator.free](std::byte* data) { free(device, data); }};
  }
  return {static_cast<std::byte*>(memory), bytes, where, [](std::byte* data) {
            const OutsideOfGraphs outside;
            static_cast<void>(cudaFree(data));
          }};
}

}  // namespace

Memory allocate_device(int device, std::int64_t bytes, const char* what) {
  return allocate_by(current_allocator(), device, bytes, what);
}

Memory allocate_reusable(int device, std::int64_t bytes, const char* what) {
  if (bytes == 0) return allocate_device(device, bytes, what);
  return SpareMemory::allocate(bytes, what, {Device::Kind::cuda, device}, [&](std::int64_t size) {
    return allocate_device(device, size, what);
  });
}

Memory allocate_plain(int device, std::int64_t bytes, const char* what) {
  return allocate_by({}, device, bytes, what);
}

Memory allocate_pinned(int device, std::int64_t bytes, const char* what) {
  if (bytes == 0) return {nullptr, 0, {}, {}};
  admit(bytes, what);
  const DeviceScope scope(device);
  void* memory = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw out_of_memory(bytes, what, Device{});
  }
  check(error, fmt::format("allocating {} bytes of pinned host memory for {}", bytes, what));
  return {static_cast<std::byte*>(memory), bytes, {}, [](std::byte* data) {
            const OutsideOfGraphs outside;
            static_cast<void>(cudaFreeHost(data));
          }};
}

Memory allocate_reusable_pinned(int device, std::int64_t bytes, const char* what) {
  return SpareMemory::allocate(
      bytes, what, {}, [&](std::int64_t size) { return allocate_pinned(device, size, what); });
}

bool has_happened(const Event& event) {
  const auto* state = dynamic_cast<const StreamEvent*>(event.state());
  return state == nullptr || state->has_happened();
}

}  // namespace annulus::cuda

namespace annulus {

std::shared_ptr<Queue> cuda_queue(const Device& device, void* stream) {
  if (device.kind != Device::Kind::cuda)
    throw ConfigError(
        fmt::format("cuda_queue: device is {}, expected a CUDA one", name_of(device)));
  return cuda::borrow_stream(device.index, static_cast<cudaStream_t>(stream));
}

bool cuda_capturing(void* stream) {
  return cuda::capture_of(static_cast<cudaStream_t>(stream)) != 0;
}

void* cuda_stream(Queue& queue) { return cuda::stream_of(queue); }

void use_cuda_allocator(CudaAllocator allocator) {
  if (static_cast<bool>(allocator.allocate) != static_cast<bool>(allocator.free))
    throw ConfigError("use_cuda_allocator: one function without the other");
  const std::lock_guard guard(cuda::allocators().lock);
  cuda::allocators().current = std::move(allocator);
}

}  // namespace annulus
