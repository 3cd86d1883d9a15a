#!/bin/sh
# Builds variants of the Hopper backward kernel, checks a few cases of each, times them, and profiles
# the first, the last and the prototype (folder $PROTOTYPE, if set):
#   sh bench/cuda/variants_backward_sm90.sh [build] [time] [profile]
# Everything goes to $OUT, or to build/variants_backward_sm90.
cd "$(dirname "$0")/../.."
built=$PWD/build/variants_backward_sm90
out=${OUT:-$built}
mkdir -p "$built" "$out"
flags="-std=c++20 -O3 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a -Xptxas -v --expt-relaxed-constexpr -lineinfo
       -Xcompiler -fPIC -Isrc -Iinclude"
# name and switches; what is not named is as in attend_backward_sm90_shared.h
variants='base
hold ANNOUNCE=2
token EARLY_TOKEN=1
announce WAITS=0 KEEP=0
old ANNOUNCE=0 WAITS=0 KEEP=0'
for step in ${*:-build time profile}; do
  case $step in
  build)
    rm -f "$built"/*.o "$built"/*.so "$built"/*.txt
    cat > "$built/no_fp16.cu" <<'END'
#include "kernels/cuda/attend_backward_sm90_shared.h"
namespace annulus::cuda::sm90 {
void start_backward_fp16(const BackwardArguments&, int, cudaStream_t) {}
}  // namespace annulus::cuda::sm90
END
    nvcc $flags -c bench/cuda/backward_sm90_api.cu -o "$built/api.o" > "$built/api.txt" 2>&1 &
    nvcc $flags -c src/kernels/cuda/attend_backward_sm90.cu -o "$built/host.o" > "$built/host.txt" 2>&1 &
    nvcc $flags -c "$built/no_fp16.cu" -o "$built/no_fp16.o" > "$built/no_fp16.txt" 2>&1 &
    if [ -n "$PROTOTYPE" ] && [ -f "$PROTOTYPE/bwd.cu" ]; then
      nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -lineinfo -Xptxas -v -Xcompiler -fPIC -shared -DQUICK \
        -o "$built/prototype.so" "$PROTOTYPE/bwd.cu" > "$built/prototype.txt" 2>&1 &
    fi
    echo "$variants" > "$built/names"
    while read -r name switches; do
      macros=
      for s in $switches; do macros="$macros -DANNULUS_BWD_$s"; done
      (nvcc $flags $macros -c src/kernels/cuda/attend_backward_sm90_bf16.cu -o "$built/$name.kernel.o" > "$built/$name.txt" 2>&1) &
    done < "$built/names"
    wait
    while read -r name switches; do
      nvcc -shared -o "$built/$name.so" "$built/$name.kernel.o" "$built/host.o" "$built/api.o" "$built/no_fp16.o" &
    done < "$built/names"
    wait
    grep -H -E "error|C7[0-9][0-9][0-9]" "$built"/*.txt | sed 's|.*/||'
    ;;
  time)
    # Each by itself, and not for long: a variant that hangs or errs is not timed.
    while read -r name switches; do
      (mkdir -p "$out/check_$name"
       OUT="$out/check_$name" BUILT="$built" timeout 60 python3 bench/cuda/variants_backward_sm90.py check "$name" > "$built/$name.check" 2>&1 ||
         mv "$built/$name.so" "$built/$name.bad"
       echo "$name $(tail -1 "$built/$name.check" | cut -c1-90)") &
    done < "$built/names"
    wait
    OUT="$out" BUILT="$built" timeout 120 python3 bench/cuda/variants_backward_sm90.py time
    ;;
  profile)
    for name in base prototype; do
      [ -f "$built/$name.so" ] || continue
      BUILT="$built" timeout 60 ncu --clock-control none -k "regex:attend_backward|bwd" -c 1 --section SpeedOfLight \
        --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables --section WarpStateStats \
        --section InstructionStats --section SourceCounters --section SchedulerStats -f -o "$out/ncu_$name" \
        python3 bench/cuda/variants_backward_sm90.py once "$name" > "$out/ncu_$name.log" 2>&1 || tail -5 "$out/ncu_$name.log"
      ncu -i "$out/ncu_$name.ncu-rep" --page raw --csv > "$out/ncu_$name.raw.csv" 2> /dev/null
      ncu -i "$out/ncu_$name.ncu-rep" --page source --csv > "$out/ncu_$name.source.csv" 2> /dev/null
      rm -f "$out/ncu_$name.ncu-rep"
      python3 bench/cuda/variants_backward_sm90.py profile "$out/ncu_$name" || true
    done
    ;;
  esac
done
