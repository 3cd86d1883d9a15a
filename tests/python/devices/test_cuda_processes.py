"""Several processes on one GPU: their rows stay on the GPU. They run cuda_worker.py."""

from __future__ import annotations

import pathlib

import annulus
import pytest
from support.launch import Ranks, need_gloo

need_gloo()

import torch  # noqa: E402

if annulus.cuda_complaint():
    pytest.skip(annulus.cuda_complaint(), allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("this PyTorch has no CUDA", allow_module_level=True)


def run(processes: int, *cases: str, lost: int | None = None, **environment: str) -> list[str]:
    """Returns the output of each rank. All ranks have to succeed, except the one that is to be lost."""
    environment = {"GLOO_SOCKET_IFNAME": "lo"} | environment
    with Ranks(processes, pathlib.Path(__file__).with_name("cuda_worker.py"), *cases, **environment) as ranks:
        out = [ranks.output_of(rank) for rank in range(processes)]
        for rank, process in enumerate(ranks.processes):
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
