#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/band.h"
#include "annulus/tensor.h"
#include "kernels/dropout.h"
#include "kernels/head_dim.h"
#include "kernels/row_index.h"
#include "pattern/shared_pairs.h"

// The contract between the CPU engine and its kernels. A task is one head, one segment, a block of
// query rows and all available key rows. A kernel adds it to the running state of the rows. It
// knows neither ranks nor tensors.
namespace annulus::cpu {

// A stretch of rows of one head. Channel c of row i is at base[c] + i * step[c] bytes. `index`
// numbers the selected rows of a segment from 0; bands are in terms of it.
inline constexpr int kChannels = 5;
struct RowRun {
  std::array<std::byte*, kChannels> base{};
  std::array<std::int64_t, kChannels> step{};
  std::int32_t index = 0;
  std::int32_t index_stride = 1;
  std::int32_t count = 0;
};

// Channels of key rows.
inline constexpr int kKey = 0;
inline constexpr int kValue = 1;
inline constexpr int kKeyGrad = 2;    // fp32, backward only
inline constexpr int kValueGrad = 3;  // fp32, backward only
// Channels of query rows.
inline constexpr int kQuery = 0;
inline constexpr int kLse = 1;        // one float, natural log
inline constexpr int kState = 2;      // forward: fp32 O so far, normalised
inline constexpr int kOut = 3;        // forward: where O is written (kState or the caller's tensor)
inline constexpr int kOutGrad = 2;    // backward: dO
inline constexpr int kDelta = 3;      // backward: one float, rowsum(dO * O)
inline constexpr int kQueryGrad = 4;  // backward: fp32 dQ

// Rows per task and per block. The queries of a block share the packing of a key block: 1,024 are 1
// to 2 % faster than 512 on long rows, although their Q^T and O^T stream through a 1 MiB L2. 128
// rows of 32 scores are half of L1.
inline constexpr int kQueryBlock = 1024;
inline constexpr int kKeyBlock = 128;
inline constexpr int kPackBlock = 256;  // key rows that are packed together (PackTask)
inline constexpr int kGradBlock = 128;  // queries and keys of a backward block
// Key rows that backward has in scratch at a time: K, V, dK, dV of a chunk stream from L2/L3 for
// each query block. About 2 MiB of fp32. `general`: by the kernels for any head dim, whose rows are
// longer.
[[nodiscard]] constexpr int max_key_chunk(int head_dim, bool general) {
  if (!general && head_dim == 64) return 2048;
  if (!general && head_dim == 128) return 1024;
  return head_dim <= 256 ? 512 : 256;
}

struct Problem {
  DType dtype = DType::f32;
  int head_dim = 0;  // 1 to kMaxHeadDim
  float scale = 1;   // of q.k
  float softcap = 0;
  DropoutRate dropout;

  // Kernels of their own, so that the others do not get slower. They are general ones for every
  // head dim: a kernel takes seconds to compile, for each instruction set.
  [[nodiscard]] bool caps_or_drops() const { return softcap != 0 || dropout.drops(); }
};

// Key rows of one head in the layout that the kernels multiply, packed once for all tasks that use
// them (see Kernels::pack_keys).
struct PackedKeys {
  std::byte* memory = nullptr;
  std::int64_t rows = 0;  // number of places: consecutive rows, or indices from 0 on if canonical
};

struct PackTask {
  std::span<const RowRun> keys;
  bool canonical = false;  // see ForwardTask; rows may be missing
  PackedKeys to;
  std::int64_t begin = 0;  // places [begin, end) of `to`; begin is a multiple of kPackBlock
  std::int64_t end = 0;
};

struct ForwardTask {
  std::span<const RowRun> queries;
  std::int64_t query_begin =
      0;  // rows [query_begin, query_end) of the concatenated runs, at most kQueryBlock
  std::int64_t query_end = 0;
  std::span<const RowRun> keys;
  // Process keys in ascending index over all runs, in blocks that begin at multiples of their
  // length. Rows after `key_gap` move up to fill it. Results then do not depend on how rows are
  // spread over runs.
  bool canonical = false;
  Band band;  // in indices
  IndexGap key_gap;
  // If the kernels pack keys: the packed rows that `keys` is a part of.
  PackedKeys packed;
  IndexFilter key_filter;
  std::span<const Repeat> repeats;  // pairs that count more than once
  bool load_state = false;          // start from (kState, kLse); otherwise from nothing
  float sink = -INFINITY;           // see with_sink; only in the last task of its rows
  dropout::Rows dropout;
  DType out_dtype = DType::f32;
};

struct BackwardTask {
  std::span<const RowRun> queries;
  std::int64_t query_begin = 0;
  std::int64_t query_end = 0;
  std::span<const RowRun> keys;
  std::int64_t key_begin = 0;  // quickest with at most max_key_chunk() rows
  std::int64_t key_end = 0;
  bool canonical_keys = false;  // see ForwardTask; then key_begin is 0
  bool canonical_queries = false;
  Band band;  // in indices
  IndexGap key_gap;
  IndexGap query_gap;
  std::span<const Repeat> repeats;
  bool only_branch = false;  // no other branch has these pairs, and there is no sink
  bool query_grad = true;    // add into kQueryGrad
  bool key_grad = true;      // add into kKeyGrad and kValueGrad
  dropout::Rows dropout;
};

// Few queries and neighbouring rows of a cache (cached_rows.h), all of which every query sees. Rows
// of O are of padded_head_dim() floats, not divided by the sum, and with maximum and sum of their
// weights they go on from where an earlier task has left them: 0, -inf and 0 at first. Maxima are
// of scores in log2 units.
inline constexpr int kFewKeys = 64;
inline constexpr std::int64_t kFewQueryBytes = kMaxHeadDim * 4;  // from one query to the next
struct FewRowsTask {
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  std::int64_t row_step = 0;
  int keys = 0;                       // 1 to kFewKeys
  const std::byte* next_k = nullptr;  // where the next task's keys are, to be asked for early;
  int next_keys = 0;                  // 0: nobody knows
  const std::byte* q = nullptr;       // by load_few_query
  int rows = 0;
  float* o = nullptr;
  float* highest = nullptr;
  float* sum = nullptr;
};

// The kernels of one instruction set. Functions depend on their arguments only; scratch has
// ThreadPool::kScratchBytes.
struct Kernels {
  const char* name;  // "amx_bf16", "avx512_bf16", "avx512", "avx2", "neon", "scalar"
  // True if bf16 is multiplied directly, without conversion to fp32.
  bool native_bf16;
  void (*forward)(const Problem&, const ForwardTask&, std::span<std::byte> scratch);
  void (*backward)(const Problem&, const BackwardTask&, std::span<std::byte> scratch);
  // delta[i] = rowsum(dO * O) for one row of `head_dim` elements each; both of `dtype`.
  float (*dot_rows)(DType dtype, const std::byte* a, const std::byte* b, int head_dim);
  // Writes fp32 row * factor as `dtype`.
  void (*store_row)(DType dtype, const float* row, float factor, std::byte* out, int head_dim);
  // Bytes of `rows` packed rows; 0: forward does not use packed rows for this problem. Null: for no
  // problem.
  std::int64_t (*packed_bytes)(const Problem&, std::int64_t rows) = nullptr;
  void (*pack_keys)(const Problem&, const PackTask&) = nullptr;
  void (*few_rows)(const Problem&, const FewRowsTask&) = nullptr;
  // A row of q as few_rows wants it, at an address that is a multiple of 64.
  void (*load_few_query)(const Problem&, const std::byte* row, std::byte* out) = nullptr;
  const Kernels* with_softcap_or_dropout = nullptr;  // instead of these; null: the same
};

// All sets that are compiled in and usable on this CPU, the default first (preference.h). Includes
// those that run only if forced.
[[nodiscard]] const std::vector<const Kernels*>& available_kernels();
// All sets that are compiled in, usable or not.
[[nodiscard]] std::vector<std::string> compiled_kernel_names();
// The default, or the one that the environment variable ANNULUS_ISA names; ConfigError if that one
// cannot run here.
[[nodiscard]] const Kernels& chosen_kernels();
[[nodiscard]] std::string choice_reason();  // why these; for messages
[[nodiscard]] const Kernels& kernels_by_name(const std::string& name);

// Measured multiply-add rate of one thread in GFLOP/s: the upper bound for kernels.
[[nodiscard]] double measure_fma_peak_gflops(bool bf16);

}  // namespace annulus::cpu
