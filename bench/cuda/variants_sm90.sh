#!/usr/bin/env bash
# Builds the Hopper forward kernels once per set of switches, checks a few cases of each, times them
# in one process beside cuDNN, and looks at the base variant with ncu. With PROTOTYPE=folder of the
# prototype, that too. ONLY="base early" for some; NCU=0 without ncu; STEPS="build run ncu".
set -u
cd "$(dirname "$0")/../.."
export PATH="$PATH:/usr/local/cuda/bin"
export PYTHONUNBUFFERED=1
out=build/variants_sm90
mkdir -p $out
declare -A switches=(
  [base]=""
  [late]="-DANNULUS_SM90_WAIT_LATE=1"
  [early]="-DANNULUS_SM90_EARLY=128"
  [prefetch]="-DANNULUS_SM90_PREFETCH=1"
  [wide]="-DANNULUS_SM90_WIDE=1"
  [state_direct]="-DANNULUS_SM90_STATE_TILES=0 -DANNULUS_SM90_PREFETCH=1"
)
only=${ONLY:-"base late early prefetch wide state_direct"}
steps=${STEPS:-"build run ncu"}
flags="-std=c++20 -O3 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a -Xptxas -v --expt-relaxed-constexpr
  -lineinfo -Xcompiler -fPIC -diag-suppress 554 -Isrc -Iinclude"
flags=$(echo $flags)

if [[ $steps == *build* ]]; then
  began=$(date +%s)
  {
    if [[ -n ${PROTOTYPE:-} && -d ${PROTOTYPE:-} ]]; then
      for d in 128 64; do
        v=5; [[ $d == 64 ]] && v=4
        mkdir -p $out/prototype_d$d
        cp "$PROTOTYPE"/* $out/prototype_d$d/
        chmod -R u+w $out/prototype_d$d
        # one variant of three
        keep='s/X(2,128,[^)]*) X(4,128,[^)]*) //'
        [[ $v == 4 ]] && keep='s/X(2,128,[^)]*) \(X(4,128,[^)]*)\) X(5,128,[^)]*)/\1/'
        sed -i -e "/define VARIANTS/$keep" $out/prototype_d$d/lnfwd.cu
        echo "cd $out/prototype_d$d && nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -Xcompiler -fPIC -shared -DDD=$d -o liblnfwd_d$d.so lnfwd.cu > build.log 2>&1 || echo FAILED prototype $d"
      done
    fi
    for dim in 128 64; do for causal in 1 0; do for v in $only; do
      echo "nvcc $flags ${switches[$v]} -DPART_DIM=$dim -DPART_CAUSAL=$causal -c -o $out/$v.$dim$causal.o bench/cuda/variants_sm90.cu > $out/$v.$dim$causal.log 2>&1 || echo FAILED $v $dim $causal"
    done; done; done
    for v in $only; do
      echo "nvcc $flags ${switches[$v]} -c -o $out/$v.choose.o bench/cuda/variants_sm90.cu > $out/$v.choose.log 2>&1 || echo FAILED $v"
      echo "nvcc $flags ${switches[$v]} -c -o $out/$v.attend.o src/kernels/cuda/attend_forward_sm90.cu > $out/$v.attend.log 2>&1 || echo FAILED $v"
    done
    echo "nvcc $flags -c -o $out/traits.o src/kernels/cuda/launch_traits.cpp > $out/traits.log 2>&1 || echo FAILED traits"
    echo "nvcc $flags -c -o $out/calls.o bench/cuda/forward_sm90.cu > $out/calls.log 2>&1 || echo FAILED calls"
  } | xargs -d '\n' -P "${JOBS:-$(nproc)}" -I{} sh -c '{}'
  for v in $only; do
    nvcc -shared -o $out/$v.so $out/$v.*.o $out/traits.o $out/calls.o || echo FAILED $v
    echo "$v: $(grep -hoE '[0-9]+ bytes spill stores' $out/$v.*.log | sort -n | uniq -c | tr '\n' ';') $(grep -hE 'error|C75' $out/$v.*.log | sort | uniq -c | head -3)"
  done
  echo "built in $(($(date +%s) - began)) s"
fi
if [[ $steps == *run* ]]; then timeout 140 python3 bench/cuda/variants_sm90.py run $only; fi
if [[ $steps == *ncu* && ${NCU:-1} != 0 ]]; then
  if ! command -v ncu > /dev/null; then
    PATH="$PATH:$(dirname "$(ls -d /usr/local/cuda*/bin/ncu /opt/nvidia/nsight-compute/*/ncu 2> /dev/null | tail -1)")"
  fi
  want="gpu__time_duration.sum sm__cycles_elapsed.max sm__inst_executed.sum
    sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active
    sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active
    sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active
    sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active
    smsp__issue_active.avg.pct_of_peak_sustained_active smsp__inst_executed_pipe_xu.sum
    lts__t_bytes.sum dram__bytes_read.sum dram__bytes_write.sum l1tex__m_xbar2l1tex_read_bytes.sum
    l1tex__data_bank_conflicts_pipe_lsu.sum"
  for reason in barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle \
    membar mio_throttle misc no_instruction not_selected selected short_scoreboard sleeping tex_throttle wait; do
    want="$want smsp__average_warps_issue_stalled_${reason}_per_issue_active.ratio"
  done
  ncu --query-metrics --chip gh100 2> /dev/null | awk '{print $1}' > $out/metrics.txt
  metrics=""
  for m in $want; do
    if grep -qx "${m%%.*}" $out/metrics.txt; then metrics="$metrics,$m"; else echo "no metric ${m%%.*}"; fi
  done
  timeout 100 ncu --clock-control none --cache-control none --kernel-name regex:'attend_forward|lnfwd' \
    --metrics "${metrics#,}" --csv --page raw --log-file $out/ncu.csv python3 bench/cuda/variants_sm90.py ncu base > $out/ncu.log 2>&1
  tail -3 $out/ncu.log
  [[ -n ${OUT:-} ]] && cp $out/ncu.csv "$OUT/"
  python3 bench/cuda/variants_sm90.py table $out/ncu.csv
fi
