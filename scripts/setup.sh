#!/bin/sh
# Installs what building and testing needs, by package name, on Debian 12 or newer and its relatives. Does nothing when
# everything is there, and asks for root (sudo) only when something is missing.
#
#   scripts/setup.sh          compiler, build tools, libraries
#   scripts/setup.sh --test   also a browser, in which the tests open the tool's report
#   scripts/setup.sh --lint   also clang-format and clang-tidy
#
# ANNULUS_SKIP_SETUP=1 skips it all: for other systems, once the list below is installed there.
set -eu

packages="build-essential ccache cmake ninja-build libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libgtest-dev
  libbenchmark-dev libopenmpi-dev openmpi-bin python3 python3-dev python3-venv"
for argument in "$@"; do
  case "$argument" in
    --test) packages="$packages chromium" ;;
    --lint) packages="$packages clang-format clang-tidy" ;;
    *) echo "setup: unknown option '$argument' (known: --test, --lint)" >&2; exit 2 ;;
  esac
done

if [ "${ANNULUS_SKIP_SETUP:-0}" = 1 ]; then
  exit 0
fi

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  cat >&2 <<'TEXT'
setup: this is not a Debian-like system (no apt-get). Install these yourself, then run make with ANNULUS_SKIP_SETUP=1:
  a C++20 compiler (GCC 12 or Clang 15 and newer), CMake 3.25 or newer, Ninja, ccache (optional), Python 3.10 or newer with its headers
  libraries with their headers: Highway 1.0, fmt 9
  for the tool CLI11 2 and nlohmann-json 3, for the tests GoogleTest, for the benchmarks Google Benchmark
  for rings of processes an MPI with its headers and mpirun (Open MPI or MPICH)
  for the tests of the tool's report Chromium, for 'make lint' clang-format and clang-tidy 14
TEXT
  exit 1
fi

missing=""
for package in $packages; do
  if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
    missing="$missing $package"
  fi
done
if [ -z "$missing" ]; then
  exit 0
fi

root=""
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "setup: missing packages, and no sudo to install them. As root, run:" >&2
    echo "  apt-get update && apt-get install --yes --no-install-recommends$missing" >&2
    exit 1
  fi
  root="sudo"
fi

echo "setup: installing$missing"
# Another apt (unattended upgrades on a fresh machine) may hold the lock for a while.
options="-q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3"
# sudo drops the environment, so the variable goes through env.
$root env DEBIAN_FRONTEND=noninteractive apt-get $options update
$root env DEBIAN_FRONTEND=noninteractive apt-get $options install --yes --no-install-recommends $missing
