#!/bin/sh
# Builds the Hopper backward kernels with their C interface, tests and times them:
#   sh bench/cuda/backward_sm90.sh [build] [check] [bench] [bench64]
# Everything goes to $OUT, or to build/backward_sm90. Read build.log for C75xx: products serialised.
set -e
status=0
cd "$(dirname "$0")/../.."
out=${OUT:-build/backward_sm90}
mkdir -p "$out"
library=$PWD/build/backward_sm90/libbackward_sm90.so
mkdir -p "$(dirname "$library")"
steps=${*:-build check bench}
for step in $steps; do
  if [ "$step" = build ]; then
    rm -f build/backward_sm90/*.o build/backward_sm90/*.txt "$library"
    for part in src/kernels/cuda/attend_backward_sm90.cu src/kernels/cuda/tensor_maps.cpp \
                src/kernels/cuda/attend_backward_sm90_bf16.cu \
                src/kernels/cuda/attend_backward_sm90_fp16.cu src/kernels/cuda/chains.cpp bench/cuda/backward_sm90_api.cu; do
      nvcc -std=c++20 -O3 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a -Xptxas -v \
        --expt-relaxed-constexpr -lineinfo -Xcompiler -fPIC -Isrc -Iinclude -c $part \
        -o build/backward_sm90/$(basename $part).o > build/backward_sm90/$(basename $part).txt 2>&1 &
    done
    wait
    cat build/backward_sm90/*.txt > "$out/build.log"
    grep -E "error|C7[0-9][0-9][0-9]|spill" "$out/build.log" || true
    nvcc -shared -o "$library" build/backward_sm90/*.o
  else
    OUT="$out" LIBRARY="$library" python3 bench/cuda/backward_sm90.py "$step" || status=1
  fi
done
exit $status
