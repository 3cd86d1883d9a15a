#!/usr/bin/env bash
# Runs a small matrix of configurations under compute-sanitizer: all four tools, the kernels that are chosen and the
# portable ones.
#   scripts/gpu_sanitize.sh PROGRAM [JOBS]      PROGRAM: build/release/annulus; JOBS at once (default 4)
# Each line is "clean" or the tool's report; the exit status is the number of reports.
set -euo pipefail

program=$1
jobs=${2:-4}
sanitizer=$(command -v compute-sanitizer || true)
if [ -z "$sanitizer" ]; then
  echo "gpu-sanitize: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit" >&2
  exit 127
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Ragged lengths, shared pairs, parcels of other ranks, grouped heads; small, since racecheck is a thousand times slower.
cases=(
  "--pattern dense --tokens 333 --heads 2 --ranks 1 --head-dim 128 --causal"
  "--pattern dense --tokens 300 --heads 2 --kv-heads 1 --ranks 2 --head-dim 64 --placement zigzag --causal"
  "--pattern longnet --segments 128,256 --dilations 1,2 --tokens 520 --heads 2 --ranks 1 --head-dim 128"
  "--pattern longnet --segments 128,256 --dilations 1,2 --tokens 520 --heads 2 --ranks 2 --head-dim 64 --placement striped"
  "--pattern longnet --segments 128,256 --dilations 1,2 --tokens 390 --heads 2 --ranks 1 --head-dim 64 --mix-gradient detached"
  "--pattern dense --tokens 300 --heads 2 --ranks 1 --head-dim 128 --deterministic"
  "--pattern dense --tokens 520 --heads 2 --ranks 1 --head-dim 128 --causal --window 200,0 --deterministic"
  "--pattern dense --tokens 520 --heads 2 --kv-heads 1 --ranks 2 --head-dim 64 --window 90,150"
  "--pattern longnet --segments 700 --dilations 4 --offsets all --window 252,0 --tokens 700 --heads 4 --ranks 1 --head-dim 128 --causal"
  "--pattern dense --tokens 200 --heads 2 --kv-heads 1 --ranks 1 --head-dim 320 --causal --window 40,0"
  # more items than an H200 has blocks: what is shared is used again
  "--pattern dense --tokens 1100 --heads 32 --ranks 1 --head-dim 128 --causal"
)

check() { # TOOL FAMILY DTYPE CASE
  local log="$logs/$BASHPID"
  local what="$1, ${2:-chosen} kernels, $3: $4"
  # shellcheck disable=SC2086
  if ANNULUS_CUDA_KERNELS=$2 timeout -s KILL 300 "$sanitizer" --tool "$1" --error-exitcode 9 "$program" run --device cuda \
      --dtype "$3" $4 > "$log" 2>&1; then
    echo "clean  $what"
  else
    echo "REPORT $what"
    grep -m 12 '^=========' "$log" || tail -n 12 "$log"
    return 1
  fi
}
export -f check
export logs sanitizer program

{
  for tool in memcheck racecheck synccheck initcheck; do
    for case in "${cases[@]}"; do
      printf '%s\0%s\0%s\0%s\0' "$tool" "" bf16 "$case" "$tool" portable bf16 "$case" "$tool" portable fp32 "$case"
    done
  done
} | xargs -0 -n 4 -P "$jobs" bash -c 'check "$@"' check > "$logs/all" || true
cat "$logs/all"
reports=$(grep -c '^REPORT' "$logs/all" || true)
echo "gpu-sanitize: $(grep -c '^clean' "$logs/all" || true) clean, $reports with a report"
exit "$((reports > 99 ? 99 : reports))"
