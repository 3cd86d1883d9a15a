#pragma once

#include <cuda_runtime_api.h>

namespace annulus::cuda {

// A function of the installed driver, which is not linked. Null if the driver is too old.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  return reinterpret_cast<Function>(
      error == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr);
}

}  // namespace annulus::cuda
