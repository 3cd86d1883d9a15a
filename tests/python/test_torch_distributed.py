"""Real processes under torchrun, over Gloo. What they do is in torch_worker.py."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no Gloo", allow_module_level=True)

HERE = pathlib.Path(__file__).parent


def torchrun(processes: int, *arguments: str, check: bool = True) -> str:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            str(HERE / "torch_worker.py"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"ANNULUS_THREADS": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if check and run.returncode != 0:
        pytest.fail(f"torchrun ended with {run.returncode}:\n{run.stdout}\n{run.stderr[-6000:]}")
    return run.stdout


# Starting processes that import PyTorch is most of the time, so that cases share a start.
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, ["alone", "equals_one_process"]),
        (2, ["equals_one_process", "fully_sharded", "rings_are_made_anew", "group_made_again"]),
        (
            3,
            [
                "equals_one_process",
                "lengths_of_your_own",
                "errors_are_everybodys",
                "unshard_and_its_gradient",
                "groups_that_not_everybody_is_in",
                "rings_are_made_anew",
            ],
        ),
        (4, ["equals_one_process", "lengths_of_your_own", "groups_beside_data_parallelism"]),
    ],
)
def test_processes(processes: int, cases: list[str]) -> None:
    out = torchrun(processes, *cases)
    assert out.count("done") == processes * len(cases), out


@pytest.mark.parametrize("how", ["killed", "gave_up", "stopped"])
def test_a_lost_rank_is_a_transport_error(how: str) -> None:
    out = torchrun(3, f"death_{how}", check=False)
    lost = re.findall(r"rank (\d) lost rank (-?\d)", out)
    # torchrun ends the others as soon as it sees a killed process: at least one gets to say it.
    assert len(lost) >= (1 if how == "killed" else 2), out
    assert {rank for rank, _ in lost} <= {"0", "2"}
    # A silent rank is found by whoever waits for it; the next in line may only know its neighbour.
    assert "1" in {who for _, who in lost}, out
