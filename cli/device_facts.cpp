#include "cli/device_facts.h"

#include <fmt/format.h>

#include <cstdlib>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "core/machine.h"
#include "kernels/backend.h"
#include "kernels/cpu/kernel.h"
#include "ring/option_check.h"

namespace annulus::cli {

std::string DeviceFacts::text() const { return fmt::format("{} ({})", name_of(device), name); }

DeviceFacts device_facts(const Device& device) {
  if (device.kind == Device::Kind::cpu) return {device, cpu_name(), cpu::chosen_kernels().name, ""};
  const CudaDevice gpu = cuda_device(device.index);
  return {device, gpu.name, gpu.kernels, gpu.driver};
}

void add_device(Json& json, const DeviceFacts& facts) {
  json["device"] = name_of(facts.device);
  json["device_name"] = facts.name;
  json["driver"] = facts.driver.empty() ? Json() : Json(facts.driver);
}

std::string forced_cuda_kernels() {
  const char* text = std::getenv("ANNULUS_CUDA_KERNELS");
  return text == nullptr ? "" : text;
}

std::string device_complaint(const RingOptions& options) {
  try {
    (void)ring::computation_of(options, *backend_of(options.device, options.threads),
                               options.placement.local_tokens(0), options.keys().local_tokens(0));
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

}  // namespace annulus::cli
