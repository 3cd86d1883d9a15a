#!/bin/sh
# Compiles every CUDA source without optimisation and throws the results away: under a minute on two cores, where a
# full build takes minutes. For machines without a GPU, where the kernels would not be used. Ends with 77 where there is no CUDA toolkit.
#
#   scripts/check_cuda.sh [jobs]
set -eu
cd "$(dirname "$0")/.."

nvcc=$(command -v nvcc || true)
if [ -z "$nvcc" ]; then
  echo "check_cuda: skipped: there is no nvcc in PATH"
  exit 77
fi
jobs=${1:-$(nproc)}

includes=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ INCLUDES=//p' | tr -d '"')
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# One command for each source, as cmake/annulus_cuda.cmake compiles it.
flags="-std=c++20 -Iinclude -Isrc"
device="$flags --expt-relaxed-constexpr -diag-suppress=554 -w -cubin -Xcicc -O0 -Xptxas -O0"
find src/kernels/cuda -name '*.cu' -o -name '*.cpp' ! -name absent.cpp | sort | while read -r source; do
  result="$results/$(echo "$source" | tr / _).o"
  case "$source" in
    *.cpp) echo "c++ $flags $includes -O0 -c -o $result $source" ;;
    */sm90/*) echo "$nvcc $device -arch=sm_90a -o $result $source" ;;
    *) echo "$nvcc $device -arch=sm_80 -o $result $source" ;;
  esac
done | xargs -P "$jobs" -I{} sh -c '
  said=$({} 2>&1) || { echo "$said"; echo "check_cuda: failed: {}"; exit 255; }'
echo "check_cuda: every CUDA source compiles"
