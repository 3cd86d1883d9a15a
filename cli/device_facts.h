#pragma once

#include <string>

#include "annulus/device.h"
#include "annulus/ring_attention.h"
#include "cli/console.h"

namespace annulus::cli {

// Where a command computes, as text and for --json.
struct DeviceFacts {
  Device device;
  std::string name;     // of the processor
  std::string kernels;  // the best of the device; an executor may use others
  std::string driver;   // empty: the CPU

  [[nodiscard]] bool on_cpu() const { return device.kind == Device::Kind::cpu; }
  [[nodiscard]] std::string text() const;  // "cuda:0 (NVIDIA H200)", "cpu (AMD EPYC ...)"
};

// Throws before any work is done, as an executor would: DeviceError if the device cannot be used;
// ConfigError if it does not exist or does not have the kernels that the environment asks for.
[[nodiscard]] DeviceFacts device_facts(const Device& device);
// "device", "device_name", "driver" (null: the CPU).
void add_device(Json& json, const DeviceFacts& facts);

// The family of kernels that ANNULUS_CUDA_KERNELS asks for, or empty.
[[nodiscard]] std::string forced_cuda_kernels();
// Why the device cannot compute this with those kernels, or empty.
[[nodiscard]] std::string device_complaint(const RingOptions& options);

}  // namespace annulus::cli
