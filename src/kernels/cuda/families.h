#pragma once

#include <string>

#include "kernels/backend.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/chains.h"
#include "kernels/cuda/work/launch_traits.h"

// Which kernels compute what. A family covers some shapes on some devices; "portable" covers all.
namespace annulus::cuda {

// In which order the items of a launch are best.
enum class ItemOrder : std::uint8_t {
  longest_first,  // whoever is free takes the next one
  in_turn,        // block b of n takes items b, b + n, ...: see arrange_items
  as_made,        // whoever is free takes the next one, neighbours share rows in cache
  in_chains,      // whoever is free takes the next one, which waits for one before: see chains.h
};

// Device memory of a launch, for kernels whose blocks draw their items.
struct LaunchTurns {
  std::int32_t* next_item = nullptr;  // 0
  // Of the tables' items, if these are in chains: what put_in_chains says, and two of each, 0.
  const ItemTurn* turns = nullptr;
  std::int32_t* progress = nullptr;
};

struct ForwardFamily {
  const char* name = "";
  int tile = 0;  // most rows of an item
  ItemOrder order = ItemOrder::longest_first;
  // What rows must be, for whatever the caller passes: others go to the portable kernels.
  bool (*fits)(const KernelShape&) = nullptr;
  cudaError_t (*run)(const ForwardParams&, const LaunchTraits&, cudaStream_t) = nullptr;
  bool later = false;  // heeds ForwardParams::later
};

struct BackwardFamily {
  const char* name = "";
  int key_tile = 0;
  int query_tile = 0;                          // 0: the kernel of the keys makes dQ as well
  bool key_sums = false;                       // heeds KeySums
  bool dealt_dq = false;                       // heeds BackwardParams::dealt_dq
  ItemOrder order = ItemOrder::longest_first;  // of keys
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

// For what a device is and what is computed; `indices`: see most_indices. The environment variable
// ANNULUS_CUDA_KERNELS, portable or sm90, takes the choice away: ConfigError where that one cannot
// do it.
[[nodiscard]] Families choose_families(const Computation& computation, std::int64_t indices,
                                       int device);
// Why the family that the environment asks for cannot do it; empty: it can, or none is asked for.
[[nodiscard]] std::string forced_complaint(const Computation& computation, int device);
[[nodiscard]] BackwardFamily portable_backward_family();
// Of a device, for people and tests: "sm90" or "portable".
[[nodiscard]] std::string best_family(int device);

}  // namespace annulus::cuda
