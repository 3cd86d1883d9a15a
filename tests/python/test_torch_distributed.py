"""Real processes under torchrun, over Gloo. What they do is in torch_worker.py."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest
from support import HANG

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no Gloo", allow_module_level=True)

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = os.environ | {"ANNULUS_THREADS": "1", "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, *arguments: str, worker: str = "torch_worker.py") -> str:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            str(HERE / worker),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=ENVIRONMENT,
        check=False,
    )
    if run.returncode != 0:
        pytest.fail(f"torchrun ended with {run.returncode}:\n{run.stdout}\n{run.stderr[-6000:]}")
    return run.stdout


# Starting processes that import PyTorch is most of the time, so that cases share a start.
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, ["alone", "equals_one_process"]),
        (
            2,
            [
                "bad_luck_is_everybodys",  # first: an instruction set is chosen once
                "equals_one_process",
                "memory_is_everybodys",
                "compiled_equals_eager",
                "arguments_are_everybodys",
                "two_threads",
                "fully_sharded",
                "ranks_agree_on_who_carries_device_memory",
                "forked_children_end",
                "rings_are_made_anew",
                "group_made_again",
            ],
        ),
        (
            3,
            [
                "bad_luck_is_everybodys",
                "equals_one_process",
                "compiled_equals_eager",
                "lengths_of_your_own",
                "lengths_that_change",
                "nothing_gives_nothing",
                "errors_are_everybodys",
                "memory_is_everybodys",
                "arguments_are_everybodys",
                "what_nobody_thought_of_ends_the_ring",
                "messages_are_few",
                "two_threads",
                "unshard_and_its_gradient",
                "resharding_moves_the_fewest_bytes",
                "groups_that_not_everybody_is_in",
                "rings_are_made_anew",
            ],
        ),
        (
            4,
            [
                "equals_one_process",
                "lengths_of_your_own",
                "resharding_moves_the_fewest_bytes",
                "groups_beside_data_parallelism",
            ],
        ),
    ],
)
def test_processes(processes: int, cases: list[str]) -> None:
    out = torchrun(processes, *cases)
    assert out.count("done") == processes * len(cases), out


@pytest.mark.parametrize("how", ["killed", "gave_up", "silent"])
def test_a_lost_rank_is_a_transport_error(how: str) -> None:
    # Started one by one: torchrun would end the others as soon as it sees that one was killed.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "torch_worker.py"), f"death_{how}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT
            | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": "3",
            },
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            out, _ = ranks[rank].communicate(timeout=HANG)
            assert f"rank {rank} lost rank 1" in out, out
            assert out.count(f"rank {rank} misses rank 1") == 2, out
    finally:
        for process in ranks:
            process.kill()
            process.wait()
