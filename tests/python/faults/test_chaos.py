"""One round of those faults of make chaos that no other test injects."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import need_gloo, run_program

need_gloo()
pytest.importorskip("safetensors", reason="safetensors is not installed")


def test_one_round() -> None:
    faults = ["slow", "stranger", "junk", "full_disk", "kill_writing"]
    program = pathlib.Path(__file__).with_name("chaos.py")
    out = run_program(program, "--rounds", "1", "--only", *faults)
    assert len(out.splitlines()) == 1 + len(faults)
