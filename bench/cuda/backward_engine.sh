#!/bin/sh
# backward_engine.sh LIBANNULUS.a OUT.so [SOURCE]: what backward_engine.py loads, or decode.py with decode.cpp as SOURCE, of one build of
# the library. Nothing else is exported, so that several can be loaded at once.
set -e
cd "$(dirname "$0")/../.."
cuda="${CUDA_HOME:-/usr/local/cuda}"
exports="$(mktemp)"
echo '{ global: engine_*; local: *; };' > "$exports"
c++ -std=c++20 -O2 -fPIC -shared -Iinclude "${3:-bench/cuda/backward_engine.cpp}" -o "$2" -Wl,--version-script="$exports" -Wl,-Bsymbolic "$1" \
  -lhwy -lfmt "$cuda/lib64/libcudart_static.a" -ldl -lrt -lpthread
rm "$exports"
