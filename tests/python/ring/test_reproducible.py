"""`reproducible` gives the same bits with every transport: threads, MPI and torch.distributed."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from support import HANG, ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no Gloo", allow_module_level=True)

from reproducible import digest_of

RINGS = {1: "contiguous", 2: "zigzag", 3: "striped", 4: "hilbert", 8: "contiguous"}
TOKENS = 203  # that no number of ranks divides


def run(*arguments: str) -> str:
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=HANG,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.slow)])
def test_threads_mpi_and_torch_distributed_give_the_same_bits(
    dtype: type,
    command: str,
    tmp_path: pathlib.Path,
) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian, Ubuntu: apt-get install openmpi-bin)")
    if "mpi built" not in run(command, "doctor"):
        pytest.skip("this build has no MPI")
    mpirun = str(ROOT / "tests/support/mpirun.sh")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    random = np.random.default_rng(7)
    for name, heads in (("q", 4), ("k", 2), ("v", 2), ("do", 4)):
        np.save(inputs / f"{name}.npy", random.standard_normal((2, TOKENS, heads, 16)).astype(dtype))
    attention = ["--segments", "40,120", "--dilations", "1,3", "--causal", "--reproducible"]

    def with_tool(name: str, tool: list[str], how: list[str]) -> str:
        out = tmp_path / name
        run(*tool, "run", *attention, *how, "--input", str(inputs), "--output", str(out))
        return digest_of(np.load(out / f"{x}.npy") for x in ("o", "dq", "dk", "dv"))

    found = {}
    for ranks, placement in RINGS.items():
        how = ["--placement", placement, "--ranks", str(ranks)]
        found["threads", ranks] = with_tool(f"threads{ranks}", [command], how)
        found["mpi", ranks] = with_tool(f"mpi{ranks}", [mpirun, str(ranks), command], how)
    pattern = {"segment_lengths": [40, 120], "dilation_rates": [1, 3], "is_causal": True}
    rings = [str(word) for ring in RINGS.items() for word in ring]
    program = str(pathlib.Path(__file__).with_name("reproducible.py"))
    lines = run(sys.executable, program, str(inputs), json.dumps(pattern), *rings).splitlines()
    assert len(lines) == sum(RINGS)
    for number, line in enumerate(lines):
        ranks, digest = line.split(" ", 1)
        found["torch.distributed", int(ranks), number] = digest
    assert len(set(found.values())) == 1, found
