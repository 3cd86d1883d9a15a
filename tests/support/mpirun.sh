#!/bin/sh
# mpirun.sh <processes> <program> [argument...]: mpirun for tests, which may run on few cores and as root in a container.
# Other MPIs ignore the settings for Open MPI. Exits with 77 (skipped) if there is no mpirun.
if ! command -v mpirun >/dev/null; then
  echo "skipped: there is no mpirun (Debian, Ubuntu: apt-get install openmpi-bin)"
  exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_hwloc_base_binding_policy=none
# Containers often forbid reading another process's memory, and Open MPI then prints long warnings.
export OMPI_MCA_btl_vader_single_copy_mechanism=none
# No network device is used. Searching for them prints warnings on machines with incomplete drivers.
export OMPI_MCA_btl=self,vader,tcp OMPI_MCA_pml=ob1
# Leaks of Open MPI are in plugins that are unloaded when they are reported, so no suppression can name them. ThreadSanitizer
# needs a long history to attribute races in Open MPI's copies. A small quarantine of freed memory does not look like a leak.
export ASAN_OPTIONS="detect_leaks=0:quarantine_size_mb=16${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
export TSAN_OPTIONS="history_size=7:suppressions=$(dirname "$0")/tsan_mpi.txt${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
processes="$1"
shift
exec mpirun -n "$processes" "$@"
