#pragma once

#include "kernels/cuda/sm90/backward/rows.cuh"

// The end of a tile of the Hopper backward kernel: its dK and dV, from registers to global memory.
namespace annulus::cuda::sm90 {

// The two rows of a thread: 16 * warp + g and g + 8 of a tile, columns 8 m + 2 c and the next; four
// lanes have 32 bytes of a row, a sector. Null: absent.
struct RowPair {
  float* row[2];
};
__device__ __forceinline__ void load_pair(const RowPair& from, const bool (&earlier)[2], int m,
                                          float2 (&old)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    old[i] = make_float2(0, 0);
    if (earlier[i]) old[i] = __ldcs(reinterpret_cast<const float2*>(from.row[i] + 8 * m));
  }
}
__device__ __forceinline__ void store_pair(const RowPair& to, int m, const float2 (&old)[2],
                                           const float* sums, float factor) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (to.row[i] != nullptr)
      __stcs(reinterpret_cast<float2*>(to.row[i] + 8 * m),
             make_float2(fmaf(sums[4 * m + 2 * i], factor, old[i].x),
                         fmaf(sums[4 * m + 2 * i + 1], factor, old[i].y)));
}
// Stores columns 8 m ... 8 m + 31 of the rows, rounded. Four lanes exchange values, so that lane c
// has eight consecutive columns, 8 (m + c) ... `row` is null for absent rows.
template <typename T>
__device__ __forceinline__ void store_rounded(std::byte* const (&row)[2], int m,
                                              const float2 (&old)[4][2], const float* sums,
                                              float factor, float out_factor) {
  const bool odd = (threadIdx.x & 1) != 0;
  const bool high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* sum = sums + 4 * (m + j) + 2 * i;
      word[j] = pack<T>(fmaf(sum[0], factor, old[j][i].x) * out_factor,
                        fmaf(sum[1], factor, old[j][i].y) * out_factor);
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const std::uint32_t other = __shfl_xor_sync(~0U, odd ? word[j] : word[j + 1], 1);
      word[j] = odd ? other : word[j];
      word[j + 1] = odd ? word[j + 1] : other;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t other = __shfl_xor_sync(~0U, high ? word[j] : word[j + 2], 2);
      word[j] = high ? other : word[j];
      word[j + 2] = high ? word[j + 2] : other;
    }
    if (row[i] != nullptr)
      __stcs(reinterpret_cast<uint4*>(row[i] + 16 * m),
             make_uint4(word[0], word[1], word[2], word[3]));
  }
}

// Adds the sums of a tile, in the layout of products, to its rows of dV and dK or, in the last
// launch, writes the caller's. No other block of the launch writes these rows. Loads run a quarter
// ahead of stores, because registers are scarce (S, dP, P and dS are free here, but more loads at
// once caused spills in the main loop).
template <typename T, int kDim>
__device__ __forceinline__ void add_key_gradients(const BackwardArguments& a, std::uint32_t note,
                                                  const float (&dv)[kDim / 2],
                                                  const float (&dk)[kDim / 2], float factor) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first = (static_cast<int>(threadIdx.x) >> 5) * 16 + (lane >> 2);
  const int4 tile = load_words4(note + 32);  // item, rows, earlier
  RowPair to_dv;
  RowPair to_dk;
  bool earlier[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + 8 * i;
    std::byte* of_dk = nullptr;
    std::byte* of_dv = nullptr;
    earlier[i] = row < tile.y && (tile.z >> (row & 31) & 1) != 0;
    if (row < tile.y) {
      if (tile.x < 0) {
        of_dk = reinterpret_cast<std::byte*>(load_long(note) + row * load_long(note + 16));
        of_dv = reinterpret_cast<std::byte*>(load_long(note + 8) + row * load_long(note + 24));
      } else {
        const DeviceTables& tables = a.params.tables;
        const Item& item = tables.items[tile.x];
        const Member& member = tables.members[item.member];
        const RowOwner owner{item.batch, member.kv_head, member.unit};
        const int in_list = item.begin + row;
        const Run& run = tables.runs[run_of(tables.runs, tables.groups[item.group].keys, in_list)];
        of_dk = row_address(a.params.dk, run, in_list, owner);
        of_dv = row_address(a.params.dv, run, in_list, owner);
      }
      of_dk += (lane & 3) * 8;
      of_dv += (lane & 3) * 8;
    }
    to_dk.row[i] = reinterpret_cast<float*>(of_dk);
    to_dv.row[i] = reinterpret_cast<float*>(of_dv);
  }
  // Quarters: dV's two halves, then dK's.
  constexpr int kQuarter = kDim / 16;
  float2 old[kQuarter][2];
#pragma unroll
  for (int m = 0; m < kQuarter; ++m) load_pair(to_dv, earlier, m, old[m]);
  if (a.params.key_sums.dk != nullptr) {
    // The same offset from the start of the tensor as the sums, in half as many bytes. Lane c has 8
    // bytes of each sector of the sums, and 16 of every 64 bytes here.
    const auto out = [&](const RowPair& sums, const Channel& channel, std::byte* base, int i) {
      const auto* at = reinterpret_cast<const std::byte*>(sums.row[i]);
      return at == nullptr ? nullptr : base + ((at - channel.local.base) / 2 + (lane & 3) * 12);
    };
    std::byte* out_dv[2];
    std::byte* out_dk[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out_dv[i] = out(to_dv, a.params.dv, a.params.key_sums.dv, i);
      out_dk[i] = out(to_dk, a.params.dk, a.params.key_sums.dk, i);
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int part = 0; part < kQuarter; part += 4) {
        const float2(&sums)[4][2] = *reinterpret_cast<const float2(*)[4][2]>(old[part]);
        const int at = quarter % 2 * kQuarter + part;
        if (quarter < 2) {
          store_rounded<T>(out_dv, at, sums, dv, 1, a.params.key_sums.factor);
        } else {
          store_rounded<T>(out_dk, at, sums, dk, factor, a.params.key_sums.factor);
        }
        if (quarter < 3) {
#pragma unroll
          for (int m = part; m < part + 4; ++m)
            load_pair(quarter < 1 ? to_dv : to_dk, earlier, (quarter + 1) % 2 * kQuarter + m,
                      old[m]);
        }
      }
    }
    return;
  }
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
    for (int m = 0; m < kQuarter; ++m) {
      const int at = quarter % 2 * kQuarter + m;
      if (quarter < 2) {
        store_pair(to_dv, at, old[m], dv, 1);
      } else {
        store_pair(to_dk, at, old[m], dk, factor);
      }
      if (quarter < 3) {
        load_pair(quarter < 1 ? to_dv : to_dk, earlier, (quarter + 1) % 2 * kQuarter + m, old[m]);
      }
    }
  }
}

}  // namespace annulus::cuda::sm90
