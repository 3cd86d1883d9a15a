"""Checkpoints of several processes. What they do is in checkpoint_worker.py."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no Gloo", allow_module_level=True)

HERE = pathlib.Path(__file__).parent


def start(ranks: int, folder: pathlib.Path, *cases: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "checkpoint_worker.py"), str(folder), *cases],
            stdout=open(folder / f"rank{rank}.log", "w"),
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"ANNULUS_THREADS": "1", "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]


def run(ranks: int, folder: pathlib.Path, *cases: str, lost: int | None = None) -> None:
    processes = start(ranks, folder, *cases)
    try:
        for process in processes:
            process.wait(timeout=150)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(ranks):
        out = (folder / f"rank{rank}.log").read_text()
        if rank != lost and (processes[rank].returncode != 0 or out.count("done") != len(cases)):
            pytest.fail(f"rank {rank} of {ranks} ended with {processes[rank].returncode}:\n{out}")


def test_three_processes_and_what_others_make_of_theirs(tmp_path: pathlib.Path) -> None:
    run(
        *(3, tmp_path),
        "save_shards",
        "load_shards",
        "one_full_disk_is_everybodys",
        "one_bad_state_is_everybodys",
        "arguments_are_everybodys",
        "folders_that_are_not_shared",
        "random_numbers_go_on",
        "damage_of_any_shard",
        "some_of_the_ranks",
    )
    for ranks in (1, 2, 4):
        run(ranks, tmp_path, "load_shards", "random_numbers_of_others")


def test_a_rank_killed_while_writing(tmp_path: pathlib.Path) -> None:
    run(3, tmp_path, "killed_while_writing", lost=1)
