"""make chaos works, and finds nothing in one round of what no other test does."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from support import HANG

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no Gloo", allow_module_level=True)


def test_one_round() -> None:
    program = str(pathlib.Path(__file__).with_name("chaos.py"))
    faults = ["slow", "stranger", "junk", "full_disk", "kill_writing"]
    command = [sys.executable, program, "--rounds", "1", "--only", *faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 1 + len(faults)
