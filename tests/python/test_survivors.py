"""Those that are left of a ring become a group again, whatever happens meanwhile. What they do is in reunions.py."""

from __future__ import annotations

import pathlib

import pytest

faults = pytest.importorskip("test_torch_faults", reason="PyTorch has no Gloo")
pytest.importorskip("safetensors", reason="safetensors is not installed")


def test_reunions() -> None:
    faults.inflict(program=pathlib.Path(__file__).with_name("reunions.py"))
