"""Checkpoints of several processes, which run checkpoint_worker.py."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import need_gloo, run_program

need_gloo()
pytest.importorskip("safetensors", reason="safetensors is not installed")


def run(ranks: int, folder: pathlib.Path, *cases: str) -> None:
    run_program(pathlib.Path(__file__).with_name("checkpoint_worker.py"), str(folder), str(ranks), *cases)


def test_checkpoints_of_three_processes_and_loading_by_other_numbers(tmp_path: pathlib.Path) -> None:
    run(
        *(3, tmp_path),
        "save_shards",
        "load_shards",
        "a_full_disk_of_one_rank_is_an_error_on_all",
        "a_bad_state_of_one_rank_is_an_error_on_all",
        "bad_arguments_of_one_rank_are_errors_on_all",
        "different_steps_are_errors_on_all",
        "folders_that_are_not_shared",
        "random_numbers_go_on",
        "damage_of_any_shard",
        "some_of_the_ranks",
    )
    for ranks in (1, 2, 4):
        run(ranks, tmp_path, "load_shards", "random_numbers_of_others")


def test_an_error_does_not_wait_for_a_rank_that_hangs(tmp_path: pathlib.Path) -> None:
    run(2, tmp_path, "stopped_while_writing")


def test_no_rank_waits_for_a_rank_that_the_ring_has_lost(tmp_path: pathlib.Path) -> None:
    run(2, tmp_path, "stopped_and_lost_by_the_ring")


def test_a_rank_killed_while_writing(tmp_path: pathlib.Path) -> None:
    run(3, tmp_path, "killed_while_writing")
