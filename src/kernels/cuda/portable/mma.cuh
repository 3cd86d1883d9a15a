#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Tensor core instructions of all GPUs from sm_80 on, and tiles of 16-bit rows in shared memory for
// them.
namespace annulus::cuda {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or zeros if not `present`.
__device__ inline void copy_async(void* to, const void* from, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Prevents the compiler from keeping values in registers that one instruction derives from x.
__device__ inline std::uint32_t make_again(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Rows of kDim 16-bit elements. Chunks of 16 bytes are permuted within groups of eight, depending
// on the row, so that the same chunk of eight rows is in different banks.
template <typename T, int kRows, int kDim>
struct __align__(128) SharedTile {
  static constexpr int kChunks = kDim / 8;
  T data[kRows * kDim];

  __device__ T* chunk(int row, int chunk) { return data + row * kDim + ((chunk ^ (row & 7)) * 8); }

  // Called by all threads of the block. Loads `head_dim` elements of each row, and zeros beyond or
  // if `at` is null. `somewhere` is any readable address.
  __device__ void load(std::byte* const* at, int head_dim, bool aligned, const void* somewhere) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / kChunks;
      const int c = i % kChunks;
      const std::byte* from = at[row];
      const bool present = from != nullptr && c * 8 < head_dim;
      load_chunk(row, c, present ? from + c * 16 : static_cast<const std::byte*>(somewhere),
                 present, head_dim, aligned);
    }
  }
  // Loads chunk c of a row; zeros past head_dim and if the row is not `present`. Aligned rows have
  // whole chunks.
  __device__ void load_chunk(int row, int c, const std::byte* from, bool present, int head_dim,
                             bool aligned) {
    T* to = chunk(row, c);
    if (aligned) {
      copy_async(to, from, present);
    } else {
      const T* elements = reinterpret_cast<const T*>(from);
      for (int e = 0; e < 8; ++e) to[e] = present && c * 8 + e < head_dim ? elements[e] : T(0.0F);
    }
  }

  // Calls found(row, column) for every infinity and NaN in this thread's share of the tile, and
  // replaces them by 0.
  template <typename Found>
  __device__ void take_poison(const Found& found) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kDim;
         i += static_cast<int>(blockDim.x)) {
      if (!is_poison(i)) continue;
      const int row = i / kDim;
      found(row, (i % kDim / 8 ^ (row & 7)) * 8 + i % 8);
      data[i] = T(0.0F);
    }
  }
  __device__ bool has_poison() const {
    // Exponents of all ones carry into the sign when one is added to them: two elements at a time.
    constexpr std::uint32_t kExponents =
        std::is_same_v<T, __nv_bfloat16> ? 0x7f807f80U : 0x7c007c00U;
    constexpr std::uint32_t kOne = std::is_same_v<T, __nv_bfloat16> ? 0x00800080U : 0x04000400U;
    std::uint32_t carries = 0;
    const auto* words = reinterpret_cast<const uint4*>(data);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks;
         i += static_cast<int>(blockDim.x)) {
      const uint4 word = words[i];
      for (const std::uint32_t pair : {word.x, word.y, word.z, word.w})
        carries |= (pair & kExponents) + kOne;
    }
    return (carries & 0x80008000U) != 0;
  }

  // Fragments of mma.m16n8k16, four 8 x 8 matrices at once. A lane computes its address once; the
  // offsets from there are the same for all lanes: see at_column. A: rows [row, row + 16), columns
  // [16 k, 16 k + 16).
  __device__ std::uint32_t a_address(int row = 0) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return shared_address(chunk(row + lane % 16, lane / 16));
  }
  // B for two blocks of eight rows, which are its columns: rows [row, row + 16), columns as above.
  __device__ std::uint32_t b_address() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return shared_address(chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2));
  }
  // Loads A or B from its address.
  __device__ static void load_rows(std::uint32_t(&m)[4], std::uint32_t address, int row, int k) {
    load_matrices(m, at_column(address, k) + row * kDim * 2);
  }
  // B for columns [16 n, 16 n + 16), summed over rows [row, row + 16), from a_address.
  __device__ static void load_transposed(std::uint32_t(&m)[4], std::uint32_t address, int row,
                                         int n) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at_column(address, n) + row * kDim * 2)
                 : "memory");
  }

  __device__ void load_a(std::uint32_t(&a)[4], int row, int k) {
    load_rows(a, a_address(row), 0, k);
  }
  __device__ void load_b(std::uint32_t(&b)[4], int row, int k) {
    load_rows(b, b_address(), row, k);
  }
  __device__ void load_b_transposed(std::uint32_t(&b)[4], int row, int n) {
    load_transposed(b, a_address(), row, n);
  }

 private:
  __device__ bool is_poison(int i) const {
    constexpr unsigned kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80U : 0x7c00U;
    return (reinterpret_cast<const std::uint16_t*>(data)[i] & kExponent) == kExponent;
  }
  // The address of the fragment 16 k columns further. Tiles begin at multiples of 128 bytes, so
  // with permuted chunks this is an exclusive or of the address and k.
  __device__ static std::uint32_t at_column(std::uint32_t address, int k) {
    return (address ^ (k % 4 * 32)) + k / 4 * 128;
  }
  __device__ static void load_matrices(std::uint32_t(&m)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
  }
};

// Records results that see an infinity or a NaN. 0 * NaN is NaN, so in a tile with hidden pairs a
// row with Inf or NaN would reach rows that do not see it. Such values are removed from the tile
// and recorded here.
template <int kRows, int kDim>
struct Poison {
  unsigned any;
  unsigned bits[kRows][kDim / 32];

  __device__ void clear() {
    if (threadIdx.x == 0) any = 0;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kDim / 32;
         i += static_cast<int>(blockDim.x))
      (&bits[0][0])[i] = 0;
  }
  // Called by all threads, after the tile has arrived. sees(result's row, tile's row). `first` is
  // the tile's first column.
  template <typename Tile, typename Sees>
  __device__ void take_from(Tile& tile, const Sees& sees, int first = 0) {
    if (__syncthreads_or(tile.has_poison()) == 0) return;
    tile.take_poison([&](int row, int column) {
      any = 1;
      column += first;
      for (int own = 0; own < kRows; ++own) {
        if (sees(own, row)) atomicOr(&bits[own][column / 32], 1U << (column % 32));
      }
    });
    __syncthreads();
  }
  __device__ float apply(int row, int column, float value) const {
    return (bits[row][column / 32] >> (column % 32) & 1U) != 0 ? NAN : value;
  }
};

// c += a * b for 16 x 8 results.
template <typename T>
__device__ inline void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <typename T>
__device__ inline std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

// Two neighbouring 16 x 8 results as the A of the next product, summed over their 16 columns.
template <typename T>
__device__ inline void as_a(std::uint32_t (&a)[4], const float (&left)[4],
                            const float (&right)[4]) {
  a[0] = pack<T>(left[0], left[1]);
  a[1] = pack<T>(left[2], left[3]);
  a[2] = pack<T>(right[0], right[1]);
  a[3] = pack<T>(right[2], right[3]);
}

// Sum and maximum over the four threads that have a row of results.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}

}  // namespace annulus::cuda
