# One command for each thing people do here. On a bare Debian 12 machine: apt-get install make git, then 'make demo'.

JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# 'make test TORCH=no' leaves PyTorch out: annulus.torch is then not tested, and pytest says so.
TORCH ?= yes
# 'make lint BASE=main' checks only what differs from that revision.
BASE ?=

CONFIGURE = cmake --preset
BUILD = cmake --build --parallel $(JOBS) --preset
CTEST = ctest --parallel $(JOBS) --preset
# GCC's ThreadSanitizer cannot work with the address space layout of recent kernels; containers may forbid changing it.
NO_ASLR = $$(setarch -R true 2>/dev/null && echo setarch -R)

.DEFAULT_GOAL := help
.PHONY: help setup build python demo test unit gpu gpu-test gpu-sanitize gpu-bench asan asan-python tsan tsan-python bench pytorch-bench chaos soak lint format clean

help: ## List these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-14s %s\n' "$$name" "$$text"; done

setup: ## Install the needed packages (Debian and relatives; does nothing if they are there)
	@scripts/setup.sh

build: setup ## Build everything, optimised, into build/release
	@$(CONFIGURE) release
	@$(BUILD) release

demo: setup ## Build the tool and run LongNet attention over 131,072 tokens on a ring of 4 ranks
	@$(CONFIGURE) release
	@$(BUILD) release --target annulus_tool
	build/release/annulus run --ranks 4 --tokens 131072 --heads 8 --head-dim 64 --pattern longnet \
	  --segments 2048,8192,32768,131072 --dilations 1,4,16,64

# Without build isolation, so that build/python remembers where nanobind is and later builds are incremental.
python: setup ## Build the Python package (build/python) and install it into .venv
	@test -x .venv/bin/python || { echo "python: creating .venv"; python3 -m venv .venv; }
	@.venv/bin/python -c 'import nanobind, scikit_build_core, numpy, pytest, ml_dtypes, array_api_strict' 2>/dev/null || { \
	  echo "python: installing nanobind, scikit-build-core, numpy, pytest, ml-dtypes and array-api-strict into .venv"; \
	  .venv/bin/pip install --quiet 'nanobind>=3.0' 'scikit-build-core>=0.10' 'numpy>=1.23' 'pytest>=7' ml-dtypes array-api-strict; }
	@test "$(TORCH)" = no || .venv/bin/python -c 'import torch, safetensors' 2>/dev/null || { \
	  echo "python: installing PyTorch and safetensors into .venv for the tests of annulus.torch (TORCH=no leaves them out)"; \
	  .venv/bin/pip install --quiet torch==2.13.0 'safetensors>=0.4'; }
	@echo "python: building the package annulus and its command, and installing both into .venv"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) .venv/bin/pip install --quiet --no-build-isolation --no-deps \
	  --config-settings=build-dir=build/python .

test: build python ## Build everything and run the whole test suite, C++ (ctest) and Python (pytest)
	@$(CTEST) all
	@.venv/bin/python -m pytest -q -rs tests/python

unit: setup ## Build with assertions and warnings as errors (build/dev), run the quick tests
	@$(CONFIGURE) dev
	@$(BUILD) dev
	@$(CTEST) unit

gpu: setup ## Build everything with CUDA kernels into build/cuda; an error where there is no CUDA toolkit
	@$(CONFIGURE) cuda
	@$(BUILD) cuda

# One after the other: they share the device.
gpu-test: gpu ## Build with CUDA kernels and run the tests of GPUs (without one they are skipped, and say why)
	@ctest --preset gpu

gpu-sanitize: gpu ## Run a few configurations under compute-sanitizer (memcheck, racecheck, synccheck, initcheck)
	@scripts/gpu_sanitize.sh build/cuda/annulus $(JOBS)

# Without the tests of overlap, which measure speed.
asan: setup ## Run the quick tests and those of MPI under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(CONFIGURE) asan
	@$(BUILD) asan
	@$(CTEST) asan

# The sanitizers' libraries have to be there before Python is; libstdc++, so that exceptions are theirs. Leaks are Python's. Tests
# of speed, and of memory by what the process holds, say nothing here.
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
	  -k 'not compile and not resident and not memory and not cost_little and not ctrl_c and not stub and not command'

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
	  -p no:cacheprovider tests/python/test_attention.py tests/python/test_ring.py tests/python/test_runtime.py \
	  tests/python/test_threads.py tests/python/test_transport.py tests/python/test_transport_contract.py \
	  -k 'not memory and not resident and not cost_little and not ctrl_c and not tool and not process and not gloo and not forked' \
	  || { cat build/tsan_python/report.* 2>/dev/null; exit 1; }

bench: setup ## Build and run the benchmarks, JSON into build/release/bench/*.json
	@$(CONFIGURE) release
	@$(BUILD) release --target annulus_benches
	@for program in build/release/bench/*_bench; do \
	  if [ -x "$$program" ]; then \
	    "$$program" --benchmark_out="$$program.json" --benchmark_out_format=json || exit 1; fi; done

chaos: python ## Do to rings of processes and their checkpoints what can happen to them; a table of what came of it
	@.venv/bin/python tests/python/chaos.py

soak: build python ## Let rings of processes (MPI, torch.distributed) run for a long time, and kill and re-form one 200 times
	@ANNULUS_SOAK_STEPS=100000 tests/support/mpirun.sh 3 build/release/tests/mpi_soak_test || test $$? = 77
	@.venv/bin/python tests/python/soak.py --steps 100000 --cycles 200

pytorch-bench: python ## Measure beside PyTorch (installs it into .venv), results and plots into bench/results and docs/images
	@$(CONFIGURE) release
	@$(BUILD) release --target annulus_benches
	@.venv/bin/python -c 'import matplotlib' 2>/dev/null || .venv/bin/pip install --quiet matplotlib
	.venv/bin/python bench/peer/versus_pytorch.py --out bench/results/versus_pytorch.json
	.venv/bin/python bench/peer/annulus_torch.py --out bench/results/annulus_torch.json
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

lint: ## Check formatting, layers and clang-tidy, all files (BASE=<revision>: only files changed since)
	@scripts/setup.sh --lint
	@$(CONFIGURE) dev
	@scripts/lint.sh build/dev $(BASE)

format: ## Reformat the C++ and CUDA files in place
	@scripts/setup.sh --lint
	@find include src cli python tests bench examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | xargs clang-format -i

clean: ## Remove all build directories
	rm -rf build
