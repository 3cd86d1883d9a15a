"""What becomes of a ring of processes when one is lost. What they do is in faults.py; as a program it runs hundreds."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from support import HANG

distributed = pytest.importorskip("test_torch_distributed", reason="PyTorch has no Gloo")

PROGRAM = pathlib.Path(__file__).parent / "faults.py"


def inflict(*arguments: str, program: pathlib.Path = PROGRAM) -> None:
    # In a process of its own: ranks are forked from one that has no threads yet.
    run = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=distributed.ENVIRONMENT,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"


@pytest.mark.parametrize("size", ["short", "long"])
def test_survivors_of_a_kill_name_it_and_go_on(size: str) -> None:
    inflict("--kill", "4", "--sizes", size, "--deadline", "20")


def test_survivors_of_a_stop_name_it_at_the_deadline_and_go_on_without_it() -> None:
    inflict("--stop", "2", "--deadline", "10")


def test_a_rank_that_is_cut_off_is_named_and_may_come_back() -> None:
    inflict("--cut", "4", "--deadline", "20")


def test_nothing_is_left_of_steps_and_of_rings_that_were_lost() -> None:
    inflict("--steps", "400", "--ranks", "3", "--cycles", "8", program=PROGRAM.with_name("soak.py"))
