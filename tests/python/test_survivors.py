"""Those that are left of a ring become a group again, whatever happens meanwhile. What they do is in reunions.py."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

distributed = pytest.importorskip("test_torch_distributed", reason="PyTorch has no Gloo")
pytest.importorskip("safetensors", reason="safetensors is not installed")

PROGRAM = pathlib.Path(__file__).with_name("reunions.py")


def test_reunions() -> None:
    # In a process of its own: ranks are forked from one that has no threads yet.
    run = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=600,
        env=distributed.ENVIRONMENT,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
