#!/bin/bash
# ruff, mypy, clang-format, the layer check and clang-tidy, in this order: the quick ones first.
#
#   scripts/lint.sh <build directory> [<git revision>]
#
# With a revision only files that differ from it are checked, otherwise all. The build directory (configured, any preset)
# supplies compile_commands.json.
set -euo pipefail
cd "$(dirname "$0")/.."

build=${1:?usage: scripts/lint.sh <build directory> [<git revision>]}
base=${2:-}
folders=(include src cli python tests bench examples)

if [[ ! -f $build/compile_commands.json ]]; then
  echo "lint: there is no $build/compile_commands.json: configure first (cmake --preset dev)" >&2
  exit 2
fi
if [[ -n $base ]] && ! git rev-parse --quiet --verify "$base^{commit}" >/dev/null; then
  echo "lint: '$base' is not a revision of this repository" >&2
  exit 2
fi

if [[ -n $base ]]; then
  list() { { git diff --name-only --diff-filter=d "$base" -- "${folders[@]}"; git ls-files -o --exclude-standard -- "${folders[@]}"; } | sort -u; }
else
  list() { for folder in "${folders[@]}"; do [[ -d $folder ]] && find "$folder" -type f; done | sort; }
fi
mapfile -t files < <(list | grep -E '\.(h|cpp)$' || true)
mapfile -t formatted < <(list | grep -E '\.(h|cpp|cu|cuh)$' || true)  # clang-tidy has no flags for CUDA
failed=0

echo "lint: ruff"
.venv/bin/ruff check || failed=1
echo "lint: mypy"
.venv/bin/mypy || failed=1

echo "lint: clang-format, ${#formatted[@]} files ('make format' repairs)"
[[ ${#formatted[@]} -eq 0 ]] || clang-format --dry-run --Werror "${formatted[@]}" || failed=1

echo "lint: layers"
python3 scripts/check_layers.py || failed=1

# Only what this build compiles: headers are seen through the sources that include them, and a file of a part that is
# switched off has no flags.
mapfile -t sources < <(python3 - "$build/compile_commands.json" "${files[@]}" <<'PYTHON'
import json, os, sys
built = {os.path.realpath(os.path.join(entry["directory"], entry["file"])) for entry in json.load(open(sys.argv[1]))}
print("\n".join(name for name in sys.argv[2:] if os.path.realpath(name) in built), end="")
PYTHON
)
if [[ ${#sources[@]} -gt 0 ]]; then
  echo "lint: clang-tidy, ${#sources[@]} files"
  printf '%s\0' "${sources[@]}" |
    xargs -0 -n 1 -P "$(nproc)" clang-tidy -p "$build" --quiet \
      2> >(grep -vE '^[0-9]+ warnings? (generated|treated|and)|^Suppressed|^Use -header-filter' >&2) ||
    failed=1
fi

if [[ $failed -ne 0 ]]; then
  echo "lint: FAILED"
  exit 1
fi
echo "lint: passed"
