#!/bin/sh
# mpirun.sh <processes> <program> [argument...]: as a test wants it, on a machine with few cores, maybe as root in a
# container. Other MPIs ignore what is meant for Open MPI. 77 (skipped) where there is no mpirun.
if ! command -v mpirun >/dev/null; then
  echo "skipped: there is no mpirun (Debian, Ubuntu: apt-get install openmpi-bin)"
  exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_hwloc_base_binding_policy=none
# Containers often forbid to read another process's memory, which Open MPI then says at length.
export OMPI_MCA_btl_vader_single_copy_mechanism=none
# No device is used, and looking for them prints warnings where drivers are half there.
export OMPI_MCA_btl=self,vader,tcp OMPI_MCA_pml=ob1
# What Open MPI never frees is reported from plugins that are unloaded by then: no suppression can name them. Its copies make
# races that need long memories to be told from ours. Freed memory is kept for a while, but not so much that it looks like a leak.
export ASAN_OPTIONS="detect_leaks=0:quarantine_size_mb=16${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
export TSAN_OPTIONS="history_size=7:suppressions=$(dirname "$0")/tsan_mpi.txt${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
processes="$1"
shift
exec mpirun -n "$processes" "$@"
