// A set of kernels with bf16 on tiles. Included once per instruction set, after Highway.
// ANNULUS_TILE_TARGET names the required instructions, ANNULUS_AMX_TILES says whether tiles are
// real or emulated.

HWY_PUSH_ATTRIBUTES(ANNULUS_TILE_TARGET)
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/tiles-inl.h"
#include "kernels/cpu/tile_pack-inl.h"
#include "kernels/cpu/tile_products-inl.h"
#include "kernels/cpu/tile_pipeline-inl.h"
#include "kernels/cpu/tile_forward-inl.h"
#include "kernels/cpu/tile_gradient_pack-inl.h"
#include "kernels/cpu/tile_backward-inl.h"
HWY_POP_ATTRIBUTES

// From here on code for any CPU: the table exists, and has a name, also on CPUs that cannot run it.
namespace annulus::cpu::ANNULUS_ISA {

inline const Kernels* other_dtypes = nullptr;

inline void forward_by_dtype(const Problem& problem, const ForwardTask& task,
                             std::span<std::byte> scratch) {
  return problem.dtype == DType::bf16 ? tile_forward(problem, task, scratch)
                                      : other_dtypes->forward(problem, task, scratch);
}

inline void backward_by_dtype(const Problem& problem, const BackwardTask& task,
                              std::span<std::byte> scratch) {
  return problem.dtype == DType::bf16 ? tile_backward(problem, task, scratch)
                                      : other_dtypes->backward(problem, task, scratch);
}

inline std::int64_t packed_bytes_by_dtype(const Problem& problem, std::int64_t rows) {
  return problem.dtype == DType::bf16 ? PackedBlocks::bytes(rows, problem.head_dim) : 0;
}

// `others`, with bf16 on tiles.
inline Kernels tile_kernels(const char* name, const Kernels& others) {
  other_dtypes = &others;
  Kernels kernels = others;
  kernels.name = name;
  kernels.native_bf16 = true;
  kernels.forward = &forward_by_dtype;
  kernels.backward = &backward_by_dtype;
  kernels.packed_bytes = &packed_bytes_by_dtype;
  kernels.pack_keys = &pack_tiles;
  kernels.with_softcap_or_dropout = &others;
  return kernels;
}

}  // namespace annulus::cpu::ANNULUS_ISA
