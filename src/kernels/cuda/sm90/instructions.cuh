#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Hopper instructions without an equivalent in CUDA C++: barriers in shared memory, bulk tensor
// copies and warp-group matrix products. Addresses in shared memory have 32 bits throughout.
namespace annulus::cuda::sm90 {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers in shared memory (8 bytes each) ---------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Called once by the thread that initialised the barriers, before other threads use them.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that bulk copies will bring.
__device__ __forceinline__ void barrier_arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is complete. A fresh barrier is in phase 0: waiting for
// parity 1 returns at once.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- named barriers (1..15; 0 is __syncthreads) -------------------------------------------------

__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- registers ----------------------------------------------------------------------------------

// Called by all four warps of a warp group. The sum over a block may not exceed its initial
// registers: 3 groups start with 168 each, so 232 + 232 + 40.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Keeps values in their registers across asynchronous products, of which the compiler does not
// know: it may neither move nor rematerialise them past this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

template <int kRows, int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&values)[kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) pin(values[i]);
}

// threadIdx.x, read again instead of from a register in which the compiler keeps it.
__device__ __forceinline__ std::uint32_t thread_anew() {
  std::uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- order between kinds of access --------------------------------------------------------------

// Orders ordinary writes to shared memory before products or bulk copies that read them. Called in
// every writing thread, before the barrier.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for global memory.
__device__ __forceinline__ void fence_global_for_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Programmatic dependent launch: lets the next kernel of the stream start on free SMs; and waits
// until data of earlier kernels may be read.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_previous_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- bulk tensor copies -------------------------------------------------------------------------

// L2 cache hints.
__device__ __forceinline__ std::uint64_t policy_keep() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t policy_stream() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(std::uint32_t target, const CUtensorMap* map,
                                         std::uint32_t barrier, int x0, int x1, int x2, int x3,
                                         int x4, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void load_box(std::uint32_t target, const CUtensorMap* map,
                                         std::uint32_t barrier, int x0, int x1, int x2, int x3,
                                         std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void load_bytes(std::uint32_t target, const void* source, int bytes,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds a box in shared memory to global memory.
__device__ __forceinline__ void add_box(const CUtensorMap* map, std::uint32_t source, int x0,
                                        int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
__device__ __forceinline__ void add_box(const CUtensorMap* map, std::uint32_t source, int x0,
                                        int x1, int x2, int x3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
// The same for one row without a map.
__device__ __forceinline__ void add_floats(float* target, std::uint32_t source, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
      "r"(source), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups have read their shared memory; or are complete.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void prefetch_to_l2(const void* source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// ---- copies of 16 bytes by threads --------------------------------------------------------------

// Copies zeros if not `present`; the source is not read then.
__device__ __forceinline__ void copy16(std::uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(present ? 16 : 0)
               : "memory");
}
// Waits until this thread's copies have arrived.
__device__ __forceinline__ void copy16_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void load_pair(std::uint32_t address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

// To global memory, past the L1 cache.
__device__ __forceinline__ void store_if(bool store, void* to, float x, float y) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.cg.v2.f32 [%1], {%2, %3};\n}\n" ::"r"(
          static_cast<int>(store)),
      "l"(to), "f"(x), "f"(y)
      : "memory");
}
__device__ __forceinline__ void store_if(bool store, void* to, const std::uint32_t (&x)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.cg.v4.b32 [%1], {%2, %3, %4, "
      "%5};\n}\n" ::"r"(static_cast<int>(store)),
      "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// ---- matrix fragments in shared memory ----------------------------------------------------------

__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t& a,
                                              std::uint32_t& b, std::uint32_t& c,
                                              std::uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a,
                                               std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- arithmetic ---------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// ---- matrix products by warp groups -------------------------------------------------------------

__device__ __forceinline__ void products_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The layout of a 16-bit operand in shared memory: rows of 128 bytes, swizzled as by bulk copies
// (SWIZZLE_128B), in consecutive blocks of 64 columns.
enum class Major : int {
  k = 0,  // a row holds elements along the summed dimension
  mn = 1  // a row holds elements along the other one
};

// Descriptors of such operands. The next 16 elements of the summed dimension are at +2 within a
// block (k-major), or at +128 (mn-major).
__device__ __forceinline__ std::uint64_t k_major(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) | (1ULL << 16) | (64ULL << 32) |
         (1ULL << 62);
}
// `block_bytes`: from one block of 64 columns to the next.
__device__ __forceinline__ std::uint64_t mn_major(std::uint32_t address,
                                                  std::uint32_t block_bytes) {
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) |
         (static_cast<std::uint64_t>(block_bytes >> 4) << 16) | (64ULL << 32) | (1ULL << 62);
}
// The offset in bytes, within a block, of the 16-byte chunk `chunk` of row `row`.
__device__ __forceinline__ std::uint32_t swizzled(int row, int chunk) {
  return static_cast<std::uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}

// Operand lists of 16, 32 and 64 accumulators, which C++ cannot generate.
#define ANNULUS_WGMMA_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ANNULUS_WGMMA_NAMES_32                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ANNULUS_WGMMA_NAMES_64                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ANNULUS_WGMMA_4(how, d, i) \
  how((d)[i]), how((d)[(i) + 1]), how((d)[(i) + 2]), how((d)[(i) + 3])
#define ANNULUS_WGMMA_16(how, d, i)                                                               \
  ANNULUS_WGMMA_4(how, d, i), ANNULUS_WGMMA_4(how, d, (i) + 4), ANNULUS_WGMMA_4(how, d, (i) + 8), \
      ANNULUS_WGMMA_4(how, d, (i) + 12)
#define ANNULUS_WGMMA_32(how, d, i) ANNULUS_WGMMA_16(how, d, i), ANNULUS_WGMMA_16(how, d, (i) + 16)
#define ANNULUS_WGMMA_64(how, d, i) ANNULUS_WGMMA_32(how, d, i), ANNULUS_WGMMA_32(how, d, (i) + 32)

// One instruction of shape m64 x `n` x k16; `type`: bf16 or f16; `regs`: n / 2; `how`: "+f", or
// "=f" if old sums are ignored; then the numbers of the operands after the sums.
#define ANNULUS_WGMMA_SS(n, type, regs, how, a_at, b_at, sum_at, ta_at, tb_at)                  \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" #sum_at                                 \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type          \
               " {" ANNULUS_WGMMA_NAMES_##regs "}, %" #a_at ", %" #b_at ", sum, 1, 1, %" #ta_at \
                                               ", %" #tb_at ";\n}\n"                            \
               : ANNULUS_WGMMA_##regs(how, d, 0)                                                \
               : "l"(a), "l"(b), "n"(kAdd ? 1 : 0), "n"(static_cast<int>(kA)),                  \
                 "n"(static_cast<int>(kB)))
#define ANNULUS_WGMMA_RS(n, type, regs, how, a0, a1, a2, a3, b_at, sum_at, tb_at)            \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" #sum_at                              \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type       \
               " {" ANNULUS_WGMMA_NAMES_##regs "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3     \
                                               "}, %" #b_at ", sum, 1, 1, %" #tb_at ";\n}\n" \
               : ANNULUS_WGMMA_##regs(how, d, 0)                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0),      \
                 "n"(static_cast<int>(kB)))

// `product` for both types, with and without the previous sums.
#define ANNULUS_WGMMA_CASES(product, n, regs, ...)                                          \
  if constexpr (kSums == regs && kAdd && kBf16) product(n, bf16, regs, "+f", __VA_ARGS__);  \
  if constexpr (kSums == regs && kAdd && !kBf16) product(n, f16, regs, "+f", __VA_ARGS__);  \
  if constexpr (kSums == regs && !kAdd && kBf16) product(n, bf16, regs, "=f", __VA_ARGS__); \
  if constexpr (kSums == regs && !kAdd && !kBf16) product(n, f16, regs, "=f", __VA_ARGS__)

// d (64 x N of the warp group) = A * B, or += where kAdd; A and B by descriptor.
template <typename T, Major kA, Major kB, bool kAdd, int kSums>
__device__ __forceinline__ void multiply(float (&d)[kSums], std::uint64_t a, std::uint64_t b) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>);
  static_assert(kSums == 16 || kSums == 32 || kSums == 64);
  ANNULUS_WGMMA_CASES(ANNULUS_WGMMA_SS, 32, 16, 16, 17, 18, 19, 20);
  ANNULUS_WGMMA_CASES(ANNULUS_WGMMA_SS, 64, 32, 32, 33, 34, 35, 36);
  ANNULUS_WGMMA_CASES(ANNULUS_WGMMA_SS, 128, 64, 64, 65, 66, 67, 68);
}
// The same with A (64 x 16) in registers: packed results of a product.
template <typename T, Major kB, bool kAdd, int kSums>
__device__ __forceinline__ void multiply(float (&d)[kSums], const std::uint32_t (&a)[4],
                                         std::uint64_t b) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>);
  static_assert(kSums == 16 || kSums == 32 || kSums == 64);
  ANNULUS_WGMMA_CASES(ANNULUS_WGMMA_RS, 32, 16, 16, 17, 18, 19, 20, 21, 22);
  ANNULUS_WGMMA_CASES(ANNULUS_WGMMA_RS, 64, 32, 32, 33, 34, 35, 36, 37, 38);
  ANNULUS_WGMMA_CASES(ANNULUS_WGMMA_RS, 128, 64, 64, 65, 66, 67, 68, 69, 70);
}

#undef ANNULUS_WGMMA_CASES
#undef ANNULUS_WGMMA_SS
#undef ANNULUS_WGMMA_RS
#undef ANNULUS_WGMMA_4
#undef ANNULUS_WGMMA_16
#undef ANNULUS_WGMMA_32
#undef ANNULUS_WGMMA_64
#undef ANNULUS_WGMMA_NAMES_16
#undef ANNULUS_WGMMA_NAMES_32
#undef ANNULUS_WGMMA_NAMES_64

}  // namespace annulus::cuda::sm90
