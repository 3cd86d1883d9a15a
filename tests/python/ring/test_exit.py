"""The end of processes with rings that nobody has closed (exit_worker.py)."""

from __future__ import annotations

import pathlib

from support.launch import Ranks, need_gloo

need_gloo()

WORKER = pathlib.Path(__file__).with_name("exit_worker.py")


def test_a_ring_that_nobody_closed_ends_with_its_process(tmp_path: pathlib.Path) -> None:
    with Ranks(2, WORKER, str(tmp_path / "lock")) as ranks:
        for rank in range(2):
            assert f"rank {rank} exits" in ranks.output_of(rank)
        assert [process.returncode for process in ranks.processes] == [0, 0]
