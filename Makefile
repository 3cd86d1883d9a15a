# One command for each thing people do here. On a bare Debian 12 machine: apt-get install make git, then 'make demo'.

JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# CUDA kernels take minutes to compile: 'auto' builds them where there are nvcc and a GPU, 'yes' always, 'no' never.
CUDA ?= auto
# 'make test TORCH=no' leaves PyTorch out: annulus.torch is then not tested, and pytest says so.
TORCH ?= yes
# 'make lint BASE=main' checks only what differs from that revision.
BASE ?=

PYTHON = .venv/bin/python
# Of ctest and pytest: one more than cores, since tests of lost ranks mostly wait.
WORKERS = $$(( $(JOBS) + 1 ))
CUDA_OPTION = -DANNULUS_CUDA=$(or $(patsubst no,OFF,$(patsubst yes,ON,$(patsubst auto,AUTO,$(CUDA)))),AUTO)
CONFIGURE = cmake --preset
BUILD = cmake --build --parallel $(JOBS) --preset
CTEST = ctest --parallel $(WORKERS) --preset
# GCC's ThreadSanitizer cannot work with the address space layout of recent kernels; containers may forbid changing it.
NO_ASLR = $$(setarch -R true 2>/dev/null && echo setarch -R)

.DEFAULT_GOAL := help
.PHONY: help setup venv build python demo test test-all unit gpu gpu-test gpu-sanitize gpu-bench asan asan-python tsan tsan-python perf bench pytorch-bench chaos soak docs lint format clean

help: ## List these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-14s %s\n' "$$name" "$$text"; done

setup: ## Install the needed packages (Debian and relatives; does nothing if they are there)
	@scripts/setup.sh

# What the Python package is built and tested with. PyTorch first: others would bring its CUDA build, which is several GB.
# Lists of modules and of the packages that have them.
VENV_MODULES = nanobind, scikit_build_core, numpy, pytest, xdist, ml_dtypes, array_api_strict, playwright, prometheus_client
VENV_PACKAGES = 'nanobind>=3.0' 'scikit-build-core>=0.10' 'numpy>=1.23' 'pytest>=7' pytest-xdist ml-dtypes array-api-strict \
  playwright prometheus-client

venv: setup
	@test -x $(PYTHON) || { echo "venv: creating .venv"; python3 -m venv .venv; }
	@test "$(TORCH)" = no || $(PYTHON) -c 'import torch, safetensors' 2>/dev/null || { \
	  echo "venv: installing PyTorch and safetensors into .venv for the tests of annulus.torch (TORCH=no leaves them out)"; \
	  .venv/bin/pip install --quiet torch==2.13.0 'safetensors>=0.4'; }
	@$(PYTHON) -c 'import $(VENV_MODULES)' 2>/dev/null || { \
	  echo "venv: installing $(VENV_PACKAGES) into .venv"; .venv/bin/pip install --quiet $(VENV_PACKAGES); }

# One build directory, build/release, has the library, the tool, the tests, the benchmarks and the Python module.
WITH_PYTHON = -DANNULUS_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(PYTHON)

build: venv ## Build everything, optimised, into build/release (CUDA=yes: with CUDA kernels)
	@$(CONFIGURE) release $(CUDA_OPTION) $(WITH_PYTHON)
	@$(BUILD) release

# The CPU library and the tool. What was configured before stays as it is.
demo: setup ## Build the tool and run LongNet attention over 131,072 tokens on a ring of 4 ranks
	@test -e build/release/CMakeCache.txt || $(CONFIGURE) release -DANNULUS_CUDA=OFF
	@$(BUILD) release --target annulus_tool
	build/release/annulus run --ranks 4 --tokens 131072 --heads 8 --head-dim 64 --pattern longnet \
	  --segments 2048,8192,32768,131072 --dilations 1,4,16,64

# pip packs what is built in build/release already. Options that pyproject.toml sets for users are set back.
INSTALL_PYTHON = .venv/bin/pip install --quiet --no-build-isolation --no-deps --config-settings=build-dir=build/release \
  --config-settings=cmake.define.ANNULUS_BUILD_TESTS=ON --config-settings=cmake.define.ANNULUS_BUILD_BENCH=ON \
  '--config-settings=build.targets=annulus_python;annulus_python_stub;annulus_tool' .

python: venv ## Build the Python package and the tool, and install both into .venv
	@$(CONFIGURE) release $(CUDA_OPTION) $(WITH_PYTHON)
	@$(BUILD) release --target annulus_python annulus_python_stub annulus_tool
	@$(INSTALL_PYTHON)

test: build ## Build everything and run the test suite, C++ (ctest) and Python (pytest)
	@scripts/setup.sh --test
	@$(INSTALL_PYTHON)
	@$(CTEST) test
	@$(PYTHON) -m pytest -q -rs -n $(WORKERS) tests/python

test-all: build ## As test, and the long suites: every variant of the ring's tests, soak tests, DeepSpeed (installs it into .venv)
	@scripts/setup.sh --test
	@$(INSTALL_PYTHON)
	@$(PYTHON) -c 'import deepspeed' 2>/dev/null || { \
	  echo "test-all: installing DeepSpeed into .venv"; .venv/bin/pip install --quiet deepspeed; }
	@$(CTEST) all
	@$(PYTHON) -m pytest -q -rs -n $(WORKERS) -m '' tests/python

unit: setup ## Build with assertions and warnings as errors (build/dev), run the quick tests
	@$(CONFIGURE) dev $(CUDA_OPTION)
	@$(BUILD) dev
	@$(CTEST) unit

gpu: ## Build everything with CUDA kernels (needs the CUDA toolkit)
	@$(MAKE) build CUDA=yes

# One after the other: they share the device.
gpu-test: gpu ## Build with CUDA kernels and run the tests of GPUs (without one they are skipped, and say why)
	@ctest --preset gpu

gpu-sanitize: gpu ## Run a few configurations under compute-sanitizer (memcheck, racecheck, synccheck, initcheck)
	@scripts/gpu_sanitize.sh build/release/annulus $(JOBS)

asan: setup ## Run the quick tests and those of MPI under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(CONFIGURE) asan
	@$(BUILD) asan
	@$(CTEST) asan

# The sanitizers' libraries have to be there before Python is; libstdc++, so that exceptions are theirs. Leaks are Python's. Tests
# of memory by what the process holds say nothing here.
ASAN_LIBRARIES = $(shell for name in asan ubsan stdc++; do gcc -print-file-name=lib$$name.so; done | paste -sd:)

asan-python: python ## Run the tests of the Python module, without processes, under both sanitizers
	@cmake -S . -B build/asan_python -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g" \
	  -DANNULUS_SANITIZE=address,undefined -DANNULUS_BUILD_PYTHON=ON -DANNULUS_BUILD_TESTS=OFF -DANNULUS_BUILD_BENCH=OFF \
	  -DANNULUS_BUILD_CLI=OFF -DANNULUS_CUDA=OFF -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python
	@cmake --build build/asan_python --parallel $(JOBS) --target annulus_python
	@rm -rf build/asan_python/package && cp -r python build/asan_python/package
	@cp build/asan_python/python/annulus/_core*.so build/asan_python/package/annulus
	@ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/asan_python/package LD_PRELOAD=$(ASAN_LIBRARIES) .venv/bin/python -m pytest -q \
	  -p no:cacheprovider tests/python --ignore-glob='*_distributed.py' --ignore-glob='*_faults.py' --ignore-glob='*_docs.py' --ignore-glob='*_examples.py' \
	  -k 'not compile and not resident and not memory and not ctrl_c and not stub and not command'

tsan: setup ## Run the quick tests and those of MPI under ThreadSanitizer
	@$(CONFIGURE) tsan
	@$(BUILD) tsan
	@$(NO_ASLR) $(CTEST) tsan

# As for asan-python. Nothing else is instrumented: races of our own threads, and of Python's with them, are seen; PyTorch's
# processes are left out, whose threads look like races, and forked children, which may not start threads under it. Reports go
# to a file, since pytest keeps what tests print.
TSAN_LIBRARIES = $(shell for name in tsan stdc++; do gcc -print-file-name=lib$$name.so; done | paste -sd:)

tsan-python: python ## Run the tests of the Python module that use threads under ThreadSanitizer
	@cmake -S . -B build/tsan_python -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g" \
	  -DANNULUS_SANITIZE=thread -DANNULUS_BUILD_PYTHON=ON -DANNULUS_BUILD_TESTS=OFF -DANNULUS_BUILD_BENCH=OFF \
	  -DANNULUS_BUILD_CLI=OFF -DANNULUS_CUDA=OFF -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python
	@cmake --build build/tsan_python --parallel $(JOBS) --target annulus_python
	@rm -rf build/tsan_python/package build/tsan_python/report.* && cp -r python build/tsan_python/package
	@cp build/tsan_python/python/annulus/_core*.so build/tsan_python/package/annulus
	@TSAN_OPTIONS="history_size=7 suppressions=$(CURDIR)/tests/python/tsan.txt log_path=$(CURDIR)/build/tsan_python/report" \
	  OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(NO_ASLR) env LD_PRELOAD=$(TSAN_LIBRARIES) PYTHONPATH=build/tsan_python/package \
	  .venv/bin/python -m pytest -q \
	  -p no:cacheprovider tests/python/core/test_attention.py tests/python/core/test_ring.py tests/python/core/test_runtime.py \
	  tests/python/attention/test_threads.py tests/python/core/test_transport.py tests/python/core/test_transport_contract.py \
	  -k 'not memory and not resident and not ctrl_c and not tool and not process and not gloo and not forked' \
	  || { cat build/tsan_python/report.* 2>/dev/null; exit 1; }

# Alone on the machine: the bars are ratios and times. Everything runs, and one bar that is missed makes it fail.
perf: python ## Measure overlap, decoding, planning and small calls beside their bars; fails where one is missed
	@$(BUILD) release --target annulus_perf annulus_tool
	@status=0; \
	for command in build/release/bench/perf/overlap build/release/bench/perf/decode build/release/bench/perf/replanning \
	  "tests/support/mpirun.sh 2 build/release/bench/perf/mpi_overlap" \
	  ".venv/bin/python bench/perf/calls.py" "python3 bench/planning.py --out build/release/bench/planning.json"; do \
	  $$command || test $$? = 77 || status=1; \
	done; exit $$status

bench: setup ## Build and run the benchmarks, JSON into build/release/bench/*.json
	@$(CONFIGURE) release
	@$(BUILD) release --target annulus_benches
	@for program in build/release/bench/*_bench; do \
	  if [ -x "$$program" ]; then \
	    "$$program" --benchmark_out="$$program.json" --benchmark_out_format=json || exit 1; fi; done

chaos: python ## Do to rings of processes and their checkpoints what can happen to them; a table of what came of it
	@PYTHONPATH=tests/python .venv/bin/python tests/python/faults/chaos.py

soak: build python ## Let rings of processes (MPI, torch.distributed) run for a long time, and kill and re-form one 200 times
	@ANNULUS_SOAK_STEPS=100000 tests/support/mpirun.sh 3 build/release/tests/mpi_soak_test || test $$? = 77
	@PYTHONPATH=tests/python .venv/bin/python tests/python/faults/soak.py --steps 100000 --cycles 200

pytorch-bench: python ## Measure beside PyTorch (installs it into .venv), results and plots into bench/results and docs/images
	@$(CONFIGURE) release
	@$(BUILD) release --target annulus_benches
	@.venv/bin/python -c 'import matplotlib' 2>/dev/null || .venv/bin/pip install --quiet matplotlib
	.venv/bin/python bench/peer/versus_pytorch.py --out bench/results/versus_pytorch.json
	.venv/bin/python bench/peer/annulus_torch.py --out bench/results/annulus_torch.json
	.venv/bin/python bench/peer/windows.py --out bench/results/windows.json
	.venv/bin/python bench/plot.py bench/results/versus_pytorch.json
	python3 bench/tables.py

gpu-bench: ## Measure on a GPU beside cuDNN and others, with the python3 that has PyTorch with CUDA; results into bench/results/h200.json
	@cmake -S . -B build/gpu_python -G Ninja -DCMAKE_BUILD_TYPE=Release -DANNULUS_CUDA=ON -DANNULUS_BUILD_PYTHON=ON \
	  -DANNULUS_BUILD_TESTS=OFF -DANNULUS_BUILD_BENCH=OFF -DANNULUS_BUILD_CLI=OFF -DPython_EXECUTABLE="$$(command -v python3)"
	@cmake --build build/gpu_python --parallel $(JOBS) --target annulus_python
	@rm -rf build/gpu_python/package && cp -r python build/gpu_python/package
	@cp build/gpu_python/python/annulus/_core*.so build/gpu_python/package/annulus
	PYTHONPATH=build/gpu_python/package python3 bench/cuda/gpu_bench.py --out bench/results/h200.json
	PYTHONPATH=build/gpu_python/package python3 bench/cuda/processes.py --out bench/results/h200.json
	ANNULUS_CUDA_KERNELS=portable PYTHONPATH=build/gpu_python/package python3 bench/cuda/gpu_bench.py --only portable \
	  --out bench/results/h200.json
	PYTHONPATH=build/gpu_python/package python3 bench/cuda/gpu_facts.py --out bench/results/h200.json
	python3 bench/tables.py
	@python3 -c 'import matplotlib' 2>/dev/null && python3 bench/plot.py bench/results/h200.json || \
	  echo "gpu-bench: this python3 has no matplotlib; elsewhere: .venv/bin/python bench/plot.py bench/results/h200.json"

docs: python ## Build the documentation site into build/site (MkDocs Material from PyPI)
	@.venv/bin/python -c 'import material, mkdocstrings_handlers.python, ruff' 2>/dev/null || { \
	  echo "docs: installing MkDocs Material, mkdocstrings and ruff into .venv"; \
	  .venv/bin/pip install --quiet 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=1.0,<2' ruff; }
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo "docs: open build/site/index.html"

lint: venv ## Check formatting, layers, clang-tidy, ruff and mypy, all files (BASE=<revision>: only C++ files changed since)
	@scripts/setup.sh --lint
	@$(PYTHON) -c 'import mypy, ruff' 2>/dev/null || { echo "lint: installing ruff and mypy into .venv"; .venv/bin/pip install --quiet ruff mypy; }
	@$(CONFIGURE) dev
	@scripts/lint.sh build/dev $(BASE)

format: ## Reformat the C++ and CUDA files in place
	@scripts/setup.sh --lint
	@find include src cli python tests bench examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | xargs clang-format -i

clean: ## Remove all build directories
	rm -rf build
