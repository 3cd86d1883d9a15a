#pragma once

#include <string>

#include "kernels/backend.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/chains.h"
#include "kernels/cuda/work/launch_traits.h"

// Which kernels compute what. A family covers some shapes on some devices; "portable" covers all.
namespace annulus::cuda {

// The order of the items of a launch.
enum class ItemOrder : std::uint8_t {
  longest_first,  // a free block takes the next item
  in_turn,        // block b of n takes items b, b + n, ...: see arrange_items
  as_made,        // a free block takes the next item; neighbours share rows in cache
  in_chains,      // a free block takes the next item, which waits for an earlier one: see chains.h
};

// Device memory of a launch, for kernels whose blocks draw their items.
struct LaunchTurns {
  std::int32_t* next_item = nullptr;  // 0
  // For items in chains: their turns, as put_in_chains returns them, and two counters per item, 0.
  const ItemTurn* turns = nullptr;
  std::int32_t* progress = nullptr;
};

struct ForwardFamily {
  const char* name = "";
  int tile = 0;  // most rows of an item
  ItemOrder order = ItemOrder::longest_first;
  // Required layout of the caller's rows. Other layouts go to the portable kernels.
  bool (*fits)(const KernelShape&) = nullptr;
  cudaError_t (*run)(const ForwardParams&, const LaunchTraits&, cudaStream_t) = nullptr;
  bool later = false;  // supports ForwardParams::later
};

struct BackwardFamily {
  const char* name = "";
  int key_tile = 0;
  int query_tile = 0;                          // 0: the kernel for keys computes dQ as well
  bool key_sums = false;                       // supports KeySums
  bool dealt_dq = false;                       // supports BackwardParams::dealt_dq
  ItemOrder order = ItemOrder::longest_first;  // of items that own keys
  bool (*fits)(const KernelShape&) = nullptr;
  cudaError_t (*keys)(const BackwardParams&, const LaunchTraits&, const LaunchTurns&,
                      cudaStream_t) = nullptr;
  cudaError_t (*queries)(const BackwardParams&, cudaStream_t) = nullptr;
  int step = 0;  // in_chains: query rows that a block takes at a time
};

struct Families {
  ForwardFamily forward;
  BackwardFamily backward;
};

// The family for a device and a computation; `indices`: see most_indices. The environment variable
// ANNULUS_CUDA_KERNELS (portable or sm90) forces a family: ConfigError if that one cannot compute
// this.
[[nodiscard]] Families choose_families(const Computation& computation, std::int64_t indices,
                                       int device);
// Why the forced family cannot compute this; empty: it can, or none is forced.
[[nodiscard]] std::string forced_complaint(const Computation& computation, int device);
[[nodiscard]] BackwardFamily portable_backward_family();
// The best family of a device, for messages and tests: "sm90" or "portable".
[[nodiscard]] std::string best_family(int device);

}  // namespace annulus::cuda
