"""The examples run, and show what they say they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support import HANG, ROOT

EXAMPLES = ROOT / "examples" / "python"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(
            f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def test_one_process() -> None:
    out = run(str(EXAMPLES / "one_process.py"))
    assert "ring of four against one rank" in out


def test_encoder_layer() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    out = run(str(EXAMPLES / "encoder_layer.py"))
    assert "dense:" in out and "padded:" in out and "dilated:" in out


@pytest.mark.slow
def test_four_processes_learn_to_copy_as_one_does() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script = str(EXAMPLES / "train_copy_task.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    one, four = (
        [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
        for out in (run(script), run(*torchrun, script))
    )
    assert len(one) == len(four) == 10
    # Sums over ranks round differently, and training amplifies that.
    assert four == pytest.approx(one, rel=1e-3)
    assert one[0] > 2 and one[-1] < 0.05


def test_two_processes_train_with_services_as_one_does() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    small = [str(EXAMPLES / "train_advanced.py"), "--steps", "6"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    one, two = (
        [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
        for out in (run(*small), run(*torchrun, *small, "--gradient-checkpointing"))
    )
    assert len(one) == 6 and one[-1] < one[0]
    assert two == pytest.approx(one, rel=0, abs=1e-5)
