#include "kernels/cuda/families.h"

#include <cstdlib>

#include <fmt/format.h>

#include "annulus/error.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/sm90/backward/launch.h"
#include "kernels/cuda/sm90/forward/launch.h"

namespace annulus::cuda {
namespace {

// The largest indices that the kernels can represent: see most_indices. Forward adds two indices.
// Masks of backward compare 16 times an index and reserve two words for absent rows; with a lower
// limit they compare the sum of an index and a limit.
constexpr std::int64_t kForwardSm90Indices = std::int64_t{1} << 30;
std::int64_t backward_sm90_indices(const Computation& computation) {
  const bool lower = computation.pattern->band().least != -Band::kUnlimited;
  return (std::int64_t{1} << (lower ? 26 : 27)) - 1;
}

bool anything_fits(const KernelShape&) { return true; }

ForwardFamily portable_forward_family(const KernelShape& shape) {
  return {"portable", portable_forward_tile(shape), ItemOrder::longest_first, anything_fits,
          [](const ForwardParams& params, const LaunchTraits&, cudaStream_t stream) {
            return portable_forward(params, stream);
          }};
}

// At head dim 64, rows that end in different launches cost more than reading the state of the
// finest branch (full mask: 0.85 of cuDNN's time instead of 0.82).
ForwardFamily sm90_forward_family(const Computation& computation) {
  return {"sm90",
          sm90::kForwardTile,
          ItemOrder::in_turn,
          sm90::forward_fits,
          sm90::launch_forward,
          computation.head_dim == 128};
}

BackwardFamily sm90_backward_family(const Computation& computation) {
  return {"sm90",
          sm90::kBackwardTile,
          0,
          true,
          true,
          computation.deterministic ? ItemOrder::in_chains : ItemOrder::as_made,
          sm90::backward_fits,
          [](const BackwardParams& params, const LaunchTraits& traits, const LaunchTurns& turns,
             cudaStream_t stream) {
            return sm90::launch_backward(params, stream,
                                         {traits, turns.next_item, turns.turns, turns.progress});
          },
          nullptr,
          sm90::backward_step(computation.head_dim)};
}

// "", "portable" or "sm90".
std::string forced_family() {
  const char* text = std::getenv("ANNULUS_CUDA_KERNELS");
  std::string name = text == nullptr ? "" : text;
  if (name.empty() || name == "portable" || name == "sm90") return name;
  throw ConfigError(
      fmt::format("ANNULUS_CUDA_KERNELS is '{}', expected portable, sm90 or nothing", name));
}

bool is_hopper(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "asking for the compute capability");
  return major == 9;
}

KernelShape shape_of(const Computation& computation) {
  KernelShape shape;
  shape.dtype = computation.dtype;
  shape.head_dim = computation.head_dim;
  shape.scale = static_cast<float>(computation.scale);
  shape.aligned = true;  // the layout is checked in every call
  shape.query_tokens = computation.query_tokens;
  shape.key_tokens = computation.key_tokens;
  return shape;
}

// Why the sm90 kernels cannot compute this; empty: they can.
std::string sm90_complaint(const Computation& computation, int device) {
  if (!is_hopper(device)) return "the device is not of compute capability 9.0";
  // Only portable kernels make canonical sums.
  if (computation.reproducible) return "reproducible results come from the portable kernels";
  const KernelShape shape = shape_of(computation);
  if (sm90::forward_fits(shape)) return "";
  return fmt::format("they take bf16 and fp16 with head_dim 64 or 128, not {} with {}",
                     name_of(computation.dtype), computation.head_dim);
}

}  // namespace

BackwardFamily portable_backward_family() {
  return {"portable",
          kPortableGradientTile,
          kPortableGradientTile,
          false,
          false,
          ItemOrder::longest_first,
          anything_fits,
          [](const BackwardParams& params, const LaunchTraits&, const LaunchTurns&,
             cudaStream_t stream) { return portable_key_gradient(params, stream); },
          portable_query_gradient};
}

Families choose_families(const Computation& computation, std::int64_t indices, int device) {
  const KernelShape shape = shape_of(computation);
  Families out{portable_forward_family(shape), portable_backward_family()};
  const std::string forced = forced_family();
  if (forced == "portable") return out;
  const bool can = sm90_complaint(computation, device).empty();
  const bool forward = can && indices <= kForwardSm90Indices;
  const bool backward = can && indices <= backward_sm90_indices(computation);
  if (forward) out.forward = sm90_forward_family(computation);
  if (backward) out.backward = sm90_backward_family(computation);
  if (forced != "sm90" || (forward && (backward || !computation.backward))) return out;
  if (!can) throw ConfigError(forced_complaint(computation, device));
  throw ConfigError(fmt::format(
      "ANNULUS_CUDA_KERNELS is sm90: a segment has up to {} rows of a branch, expected "
      "at most {}",
      indices, computation.backward ? backward_sm90_indices(computation) : kForwardSm90Indices));
}

std::string forced_complaint(const Computation& computation, int device) {
  if (forced_family() != "sm90") return "";
  const std::string complaint = sm90_complaint(computation, device);
  return complaint.empty() ? "" : "ANNULUS_CUDA_KERNELS is sm90: " + complaint;
}

std::string best_family(int device) {
  std::string forced = forced_family();
  if (!forced.empty()) return forced;
  return is_hopper(device) ? "sm90" : "portable";
}

}  // namespace annulus::cuda
