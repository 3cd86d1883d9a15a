"""Starts programs of tests as processes: workers under torchrun, single processes, or ranks that are started one by
one."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from support import HANG, ROOT

# So that children find this package, too.
_PATH = [str(ROOT / "tests" / "python"), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = os.environ | {
    "ANNULUS_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, _PATH)),
}


def need_gloo() -> None:
    """Skips a test module if PyTorch or Gloo is missing."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo", allow_module_level=True)


def run_program(program: pathlib.Path, *arguments: str, ranks: int = 0) -> str:
    """Runs a program, which must succeed, and returns its output. `ranks`: processes under torchrun; 0: one process
    without."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 0 else []), str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=ENVIRONMENT,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(
            f"{program.name} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-12000:]}\n"
            f"{done.stderr[-6000:]}"
        )
    return done.stdout


class Ranks:
    """Ranks that are started one by one. torchrun would end all ranks when one is killed."""

    def __init__(self, count: int, program: pathlib.Path, *arguments: str, **environment: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=ENVIRONMENT | common | environment | {"RANK": str(rank)},
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def output_of(self, rank: int) -> str:
        """Everything that a rank prints until it ends."""
        return self.processes[rank].communicate(timeout=HANG)[0]
