"""Several processes on one GPU: their rows stay on it. What they do is in cuda_worker.py."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import annulus
import pytest
from support import HANG

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if annulus.cuda_complaint():
    pytest.skip(annulus.cuda_complaint(), allow_module_level=True)
if not torch.cuda.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no CUDA or no Gloo", allow_module_level=True)

HERE = pathlib.Path(__file__).parent


def run(processes: int, *cases: str, lost: int | None = None, **environment: str) -> list[str]:
    """What each rank printed; all end well, but for the one that is to be lost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "cuda_worker.py"), *cases],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | common | environment | {"RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        out = [process.communicate(timeout=HANG)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, process in enumerate(ranks):
        assert rank == lost or process.returncode == 0, f"rank {rank}:\n{out[rank]}"
    return out


CASES = ["equals_one_process", "reproducible_is_one_process_bits", "passes_follow_at_once", "wrong_input_on_one_rank"]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_share_device_memory(processes: int) -> None:
    for out in run(processes, *CASES, "workspaces_come_and_go", ANNULUS_DEVICE_MESSAGES="shared"):
        assert out.count(" done in ") == len(CASES) + 1, out


@pytest.mark.parametrize(("processes", "way"), [(2, "shared"), (3, "staged")])
def test_primitives_take_cuda_tensors(processes: int, way: str) -> None:
    for out in run(processes, "primitives", ANNULUS_DEVICE_MESSAGES=way):
        assert " done in " in out, out


def test_rows_can_go_through_host_memory() -> None:
    for out in run(2, *CASES, ANNULUS_DEVICE_MESSAGES="staged"):
        assert out.count(" done in ") == len(CASES), out


@pytest.mark.parametrize("processes", [2, 3])
def test_a_group_may_carry_device_memory(processes: int) -> None:
    for out in run(processes, "groups_may_carry_device_memory"):
        assert " done in " in out, out


def test_expandable_segments_are_no_obstacle() -> None:
    for out in run(2, "equals_one_process", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"):
        assert " done in " in out, out


def test_a_killed_process_is_a_transport_error() -> None:
    out = run(3, "killed", lost=1)
    for rank in (0, 2):
        assert f"rank {rank} lost rank 1" in out[rank], out[rank]


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(AssertionError, match="ANNULUS_DEVICE_MESSAGES is 'pigeons', expected shared, staged or group"):
        run(2, "equals_one_process", ANNULUS_DEVICE_MESSAGES="pigeons")
