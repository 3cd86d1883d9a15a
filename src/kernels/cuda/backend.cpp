#include "kernels/cuda/backend.h"

#include <algorithm>
#include <fstream>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "kernels/cuda/cached/cached_rows.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/device/sharing.h"
#include "kernels/cuda/device/uploads.h"
#include "kernels/cuda/engine.h"
#include "kernels/cuda/families.h"
#include "kernels/cuda/portable/tiles.h"
#include "kernels/cuda/work/most_indices.h"

namespace annulus::cuda {
namespace {

std::string version_text(int number) {  // from CUDA's encoding
  return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

// "580.65.06, CUDA 13.0". The driver's own version is left out if the kernel module does not report
// it.
std::string driver_text() {
  int knows = 0;
  static_cast<void>(cudaDriverGetVersion(&knows));
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  if (std::getline(file, version) && !version.empty()) version += ", ";
  return version + "CUDA " + version_text(knows);
}

class CudaCopies final : public CopyProgram {
 public:
  CudaCopies(const ParcelLayout& layout, const std::vector<ParcelCopy>& copies, int device,
             Uploads& uploads, Queue& queue) {
    std::vector<CopyItem> items;
    for (const ParcelCopy& copy : copies) {
      const std::vector<int>& units = layout.units(copy.parcel);
      std::int64_t rows = 0;
      for (const CopyRun& run : *copy.runs) rows += run.count;
      const std::int64_t first_entry = layout.first_entry(copy.parcel);
      for (std::int64_t b = first_entry; b < first_entry + layout.entries(copy.parcel); ++b) {
        for (std::size_t u = 0; u < units.size(); ++u) {
          for (const CopyRun& run : *copy.runs) {
            for (std::int64_t first = 0; first < run.count; first += kCopyRows) {
              CopyItem item;
              item.unit_offset =
                  copy.offset + layout.offset(copy.parcel, b, static_cast<int>(u), 0);
              item.unit_rows = rows;
              item.parcel_first = run.parcel_first + first * run.parcel_stride;
              item.parcel_stride = run.parcel_stride;
              item.local_first = run.local_first + first * run.local_stride;
              item.local_stride = run.local_stride;
              item.count =
                  static_cast<std::int32_t>(std::min<std::int64_t>(kCopyRows, run.count - first));
              item.head = units[u];
              item.batch = static_cast<std::int32_t>(b);
              items.push_back(item);
            }
          }
        }
      }
    }
    params_.count = static_cast<std::int64_t>(items.size());
    params_.sections = layout.sections();
    for (int s = 0; s < params_.sections; ++s) {
      params_.section_bytes[s] = layout.section_bytes(s);
      params_.content_bytes[s] = layout.content_bytes(s);
    }
    const auto bytes = static_cast<std::int64_t>(items.size() * sizeof(CopyItem));
    memory_ = allocate_reusable(device, bytes, "the table of copies");
    uploads.copy(memory_.data(), std::as_bytes(std::span(items)), "the table of copies", queue);
    params_.items = reinterpret_cast<const CopyItem*>(memory_.data());
  }

  [[nodiscard]] std::int64_t bytes() const override { return memory_.bytes(); }
  [[nodiscard]] CopyParams with(std::span<const TensorRows> sections, std::byte* buffer) const {
    CopyParams out = params_;
    for (std::size_t s = 0; s < sections.size(); ++s) out.rows[s] = sections[s];
    out.buffer = buffer;
    return out;
  }

 private:
  CopyParams params_;
  Memory memory_;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device)
      : device_(device), best_(best_family(device)), uploads_(device) {}

  [[nodiscard]] Device device() const override { return {Device::Kind::cuda, device_}; }
  [[nodiscard]] std::string kernels() const override { return best_; }
  [[nodiscard]] std::int64_t scratch_bytes() const override { return 0; }

  [[nodiscard]] std::string complaint(const Computation& computation) const override {
    static_cast<void>(allowed_shared_bytes());  // reports an invalid environment variable now
    return forced_complaint(computation, device_);
  }

  [[nodiscard]] Memory allocate(std::int64_t bytes, const char* what) override {
    return allocate_reusable(device_, bytes, what);
  }
  [[nodiscard]] Memory allocate_staging(std::int64_t bytes, const char* what) override {
    return allocate_reusable_pinned(device_, bytes, what);
  }
  [[nodiscard]] std::shared_ptr<Queue> make_queue() override { return make_stream(device_); }
  [[nodiscard]] bool immediate() const override { return false; }
  [[nodiscard]] bool replaces_in_order() const override { return true; }
  [[nodiscard]] std::shared_ptr<DeviceSharing> sharing() override { return make_sharing(device_); }

  [[nodiscard]] std::unique_ptr<Engine> compile(const Computation& computation,
                                                std::span<const Stage> forward,
                                                std::span<const Stage> backward) override {
    const Plan& plan = *forward.front().plan;
    const std::int64_t tokens =
        std::max(plan.query_placement().tokens(), plan.key_placement().tokens());
    const Families families =
        choose_families(computation, most_indices(*computation.pattern, tokens), device_);
    return std::make_unique<CudaEngine>(computation, forward, backward, families, device_,
                                        uploads_);
  }
  [[nodiscard]] std::unique_ptr<CopyProgram> compile(const ParcelLayout& layout,
                                                     std::vector<ParcelCopy> copies,
                                                     Queue& queue) override {
    return std::make_unique<CudaCopies>(layout, copies, device_, uploads_, queue);
  }

  void pack(const CopyProgram& program, std::span<const TensorRows> sections, std::byte* buffer,
            Queue& queue) override {
    const DeviceScope scope(device_);
    const cudaStream_t stream = stream_of(queue);
    check_launch(pack_rows(static_cast<const CudaCopies&>(program).with(sections, buffer), stream),
                 "pack_rows", stream);
  }
  void add(const CopyProgram& program, const std::byte* buffer,
           std::span<const TensorRows> sections, Queue& queue) override {
    const DeviceScope scope(device_);
    const cudaStream_t stream = stream_of(queue);
    check_launch(add_rows(static_cast<const CudaCopies&>(program).with(
                              sections, const_cast<std::byte*>(buffer)),
                          stream),
                 "add_rows", stream);
  }
  void clear(std::byte* memory, std::int64_t bytes, Queue& queue) override {
    if (bytes == 0) return;
    const DeviceScope scope(device_);
    check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), stream_of(queue)),
          "clearing memory");
  }

  [[nodiscard]] std::unique_ptr<CacheKernels> cache_kernels(const CacheShape& shape) override {
    return make_cache_kernels(shape, device_);
  }

 private:
  int device_;
  std::string best_;
  Uploads uploads_;
};

}  // namespace

std::shared_ptr<Backend> make_backend(int device) {
  const std::string complaint = cuda_complaint();
  if (!complaint.empty())
    throw DeviceError(fmt::format("device is cuda:{}: {}", device, complaint));
  const int count = cuda_device_count();
  if (device < 0 || device >= count)
    throw ConfigError(fmt::format("device is cuda:{}, expected 0 to {}", device, count - 1));
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "asking for a device's properties");
  if (properties.major < 8) {
    throw DeviceError(
        fmt::format("cuda:{} ({}) has compute capability {}.{}, expected 8.0 or newer", device,
                    properties.name, properties.major, properties.minor));
  }
  static std::once_flag once;
  std::call_once(once, [] { set_memory_probe(Device::Kind::cuda, &device_memory_state); });
  return std::make_shared<CudaBackend>(device);
}

}  // namespace annulus::cuda

namespace annulus {

bool cuda_built() { return true; }

std::string cuda_complaint() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return "";
  static_cast<void>(cudaGetLastError());
  int driver = 0;
  int runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  if (driver == 0) return "there is no CUDA driver on this machine";
  if (error == cudaErrorInsufficientDriver) {
    return fmt::format("the driver knows CUDA {}, this build needs {}: update the driver",
                       cuda::version_text(driver), cuda::version_text(runtime));
  }
  return error == cudaSuccess ? "there is no CUDA device" : cudaGetErrorString(error);
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

CudaDevice cuda_device(int index) {
  const std::shared_ptr<Backend> backend = cuda::make_backend(index);
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, index), "asking for a device's properties");
  const cuda::DeviceScope scope(index);
  std::size_t free = 0;
  std::size_t total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), "asking for free memory");
  CudaDevice out;
  out.name = properties.name;
  out.major = properties.major;
  out.minor = properties.minor;
  out.multiprocessors = properties.multiProcessorCount;
  out.memory_bytes = static_cast<std::int64_t>(total);
  out.free_bytes = static_cast<std::int64_t>(free);
  out.driver = cuda::driver_text();
  out.kernels = backend->kernels();
  return out;
}

}  // namespace annulus
