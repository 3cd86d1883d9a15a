"""Rings of processes that lose a rank. They run kill_ranks.py, which as a program runs hundreds of rings."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import need_gloo, run_program

need_gloo()

PROGRAM = pathlib.Path(__file__).with_name("kill_ranks.py")


@pytest.mark.parametrize("size", ["short", "long"])
def test_survivors_of_a_kill_name_it_and_go_on(size: str) -> None:
    run_program(PROGRAM, "--kill", "4", "--sizes", size, "--deadline", "20")


def test_survivors_of_a_stop_name_it_at_the_deadline_and_go_on_without_it() -> None:
    run_program(PROGRAM, "--stop", "2", "--deadline", "10")


def test_a_rank_that_is_cut_off_is_named_and_may_come_back() -> None:
    run_program(PROGRAM, "--cut", "4", "--deadline", "20")


def test_steps_and_lost_rings_leave_no_memory_descriptors_and_threads() -> None:
    soak = PROGRAM.with_name("soak.py")
    run_program(soak, "--steps", "400", "--ranks", "3", "--cycles", "8")
