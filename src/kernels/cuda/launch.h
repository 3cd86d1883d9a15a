#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/work/tables.h"

// The contract between the CUDA engine and the kernels of all families: tables in device memory,
// addresses of rows, and parameters.
namespace annulus::cuda {

// A received parcel: [batch][unit][section][row].
struct Source {
  std::byte* base = nullptr;
  std::int64_t rows = 0;  // per unit
  std::int64_t units = 0;
};

// The rows of one channel (q, k, dout, dk, ...): in the shard and in parcels.
struct Channel {
  TensorRows local;
  const Source* sources = nullptr;  // device memory, by Run::source; null: never received
  std::int64_t row_bytes = 0;       // in a parcel
  std::int64_t bytes_before = 0;    // bytes of the preceding sections of a unit, per row
  std::int64_t bytes_all = 0;       // bytes of all sections, per row
  std::int64_t row_offset = 0;      // offset of the channel in a row of its section
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
  bool aligned = false;  // rows of all channels begin at multiples of 16 bytes, and their length is
                         // a multiple, too
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
  TensorRows out;    // where O is written: state, or the caller's o if for_good
  DType out_dtype = DType::f32;
  bool for_good = false;  // the rows are complete: empty rows become zeros
  float out_factor = 1;   // 1 unless for_good
  // None unless for_good. Every family merges sinks into the rows that it completes
  // (rows/sink.cuh).
  HeadNumbers sinks;
  bool load_state = true;  // false: no row has attended to anything
  // Device memory, by item: bit i % 32 says whether a later launch has row i of the item, too. O of
  // such rows goes to the state, O of the others to `out`. Null: all rows are alike. Only for
  // families that support it (ForwardFamily).
  const std::uint32_t* later = nullptr;
};

// How sums of dK and dV begin and end. Only for families that support it (BackwardFamily); others
// always use these defaults.
struct KeySums {
  // Device memory, by item: bit i % 32 says whether row i of the item already has a sum, to which
  // the kernel adds; otherwise the kernel overwrites the memory. Null: all have.
  const std::uint32_t* earlier = nullptr;
  // Not null: this is the last launch. It writes the sums, multiplied by a factor and rounded, here
  // instead of to dk and dv. Rows have the same layout as those of dk and dv, with half the
  // strides.
  std::byte* dk = nullptr;
  std::byte* dv = nullptr;
  float factor = 1;
};

// The place of a column of dQ in its row if columns are "dealt": a thread of a product has columns
// 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16 columns, and stores them next to each other,
// alternating with those of the next 16.
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
  Channel q, dout, lse, delta;  // lse and delta: one float per row
  Channel k, v;
  Channel dq, dk, dv;  // fp32
  KeySums key_sums;
  bool dealt_dq = false;  // columns of dq: see dealt_column. Only for families that support it
};

}  // namespace annulus::cuda
