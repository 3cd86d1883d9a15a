from __future__ import annotations

import os
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def torch() -> types.ModuleType:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def tool() -> str:
    """The annulus program: $ANNULUS_TOOL, or where 'make build' puts it."""
    path = os.environ.get("ANNULUS_TOOL", str(ROOT / "build" / "release" / "annulus"))
    if not os.path.exists(path):
        pytest.skip(f"the annulus tool is not built: there is no {path}")
    return path
