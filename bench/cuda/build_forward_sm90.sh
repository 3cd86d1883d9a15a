#!/usr/bin/env bash
# Builds build/forward_sm90/libforward_sm90.so for forward_sm90.py. Every line with C75 in the logs
# means that the compiler took products apart; only loading threads may spill.
set -u
cd "$(dirname "$0")/../.."
export PATH="$PATH:/usr/local/cuda/bin"
out=build/forward_sm90
mkdir -p $out
flags="-std=c++20 -O3 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a -Xptxas -v --expt-relaxed-constexpr
  -lineinfo -Xcompiler -fPIC -diag-suppress 554 -Isrc -Iinclude"
sources="src/kernels/cuda/attend_forward_sm90.cu src/kernels/cuda/forward_sm90_bf16_d128.cu
  src/kernels/cuda/forward_sm90_bf16_d64.cu src/kernels/cuda/forward_sm90_f16_d128.cu
  src/kernels/cuda/forward_sm90_f16_d64.cu src/kernels/cuda/launch_traits.cpp src/kernels/cuda/tensor_maps.cpp
  src/kernels/parcel_layout.cpp src/placement/row_set.cpp bench/cuda/forward_sm90.cu"
echo $sources | tr ' ' '\n' | xargs -P "${JOBS:-$(nproc)}" -I{} sh -c \
  "nvcc $(echo $flags) -c -o $out/\$(basename {}).o {} > $out/\$(basename {}).log 2>&1 || echo FAILED {}"
grep -hE "error|C75" $out/*.log | sort | uniq -c | head -20
grep -hE "spill" $out/*.log | sort | uniq -c
nvcc -shared -Xlinker -z,defs -o $out/libforward_sm90.so $out/*.o && echo built $out/libforward_sm90.so
