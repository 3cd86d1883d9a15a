#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/work/tables.h"

// The contract between the CUDA engine and its kernels, whatever their family: tables in device
// memory, where rows are, and what to do.
namespace annulus::cuda {

// A received parcel: [batch][unit][section][row].
struct Source {
  std::byte* base = nullptr;
  std::int64_t rows = 0;  // per unit
  std::int64_t units = 0;
};

// Rows of one channel (q, k, dout, dk, ...) of either side: those of the shard, and where they are
// in parcels.
struct Channel {
  TensorRows local;
  const Source* sources = nullptr;  // device memory, by Run::source; null: never received
  std::int64_t row_bytes = 0;       // in a parcel
  std::int64_t bytes_before = 0;    // per row: of the sections before this one in a unit
  std::int64_t bytes_all = 0;       // per row: of all sections
  std::int64_t row_offset = 0;      // of the channel within a row of its section
};

// Tables::*, in device memory.
struct DeviceTables {
  const Run* runs = nullptr;
  const Group* groups = nullptr;
  const Member* members = nullptr;
  const Repeat* repeats = nullptr;
  const Item* items = nullptr;
};

struct KernelShape {
  DType dtype = DType::f32;
  int head_dim = 0;
  float scale = 1;       // of q.k
  bool aligned = false;  // rows of all channels begin at multiples of 16 bytes and are whole ones
  std::int64_t batch = 1;
  std::int64_t query_tokens = 0;  // of the shard
  std::int64_t key_tokens = 0;
  int heads = 0;
  int kv_heads = 0;
};

// Adds the pairs of a launch to the running state (O, L) of its query rows. L is the natural log;
// -inf: the row has attended to nothing and its O was never written. O is normalised.
struct ForwardParams {
  KernelShape shape;
  DeviceTables tables;
  std::int32_t first_item = 0;
  std::int32_t items = 0;
  Channel q, k, v;
  TensorRows lse;    // fp32, of the shard
  TensorRows state;  // fp32 O so far
  TensorRows out;    // where O goes: state again, or the caller's o for good
  DType out_dtype = DType::f32;
  bool for_good = false;  // nothing comes after: empty rows become zeros
  float out_factor = 1;   // 1 unless for good
  // None unless for good. Every family merges the rows that it ends with them (rows/sink.cuh).
  HeadNumbers sinks;
  bool load_state = true;  // false: no row has attended to anything
  // Device memory, by number of the item: bit i % 32 says of its row i whether a later launch has
  // it as well, so that its O goes to the state, and not to `out` for good. Null: all are alike.
  // Only families that say so (ForwardFamily) heed it.
  const std::uint32_t* later = nullptr;
};

// How sums of dK and dV begin and end. Only families that say so (BackwardFamily) heed it; for
// others it is as it is here.
struct KeySums {
  // Device memory, by number of the item: bit i % 32 says of its row i whether it has a sum that is
  // to be added to; if not, whatever is there is overwritten. Null: all have.
  const std::uint32_t* earlier = nullptr;
  // Not null: no launch comes after this one. The sums times a factor go here, rounded, and nothing
  // is written to dk and dv. Rows lie as those of dk and dv do, with half as many bytes in between.
  std::byte* dk = nullptr;
  std::byte* dv = nullptr;
  float factor = 1;
};

// Where a column of dQ's sums is in its row if these are dealt: threads of products have columns
// 2c, 2c + 1, 2c + 8 and 2c + 9 of 16, and may leave them side by side, turn by turn with the
// next 16.
constexpr int dealt_column(int column) {
  return column / 32 * 32 + column % 8 / 2 * 8 + column / 16 % 2 * 4 + column / 8 % 2 * 2 +
         column % 2;
}

// dQ (items own query rows) or dK and dV (items own key rows), added to fp32 sums.
// dS = P * (dP - delta), P = exp(S - L).
struct BackwardParams {
  KernelShape shape;
  DeviceTables tables;
  std::int32_t first_item = 0;
  std::int32_t items = 0;
  Channel q, dout, lse, delta;  // lse and delta: one float a row
  Channel k, v;
  Channel dq, dk, dv;  // fp32
  KeySums key_sums;
  bool dealt_dq = false;  // columns of dq: see dealt_column. Only for families that say so
};

}  // namespace annulus::cuda
