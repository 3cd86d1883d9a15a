"""The survivors of a ring become a group again, whatever happens meanwhile. They run reunions.py."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import need_gloo, run_program

need_gloo()
pytest.importorskip("safetensors", reason="safetensors is not installed")


def test_reunions() -> None:
    run_program(pathlib.Path(__file__).with_name("reunions.py"))
