from __future__ import annotations

import os
import pathlib
import sysconfig
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def torch() -> types.ModuleType:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def tool() -> str:
    """The annulus program: $ANNULUS_TOOL, or where 'make build' puts it, or where pip does."""
    built = str(ROOT / "build" / "release" / "annulus")
    path = os.environ.get("ANNULUS_TOOL", built)
    if os.path.exists(path):
        return path
    installed = os.path.join(sysconfig.get_path("scripts"), "annulus")
    if "ANNULUS_TOOL" in os.environ or not os.path.exists(installed):
        pytest.skip(f"the annulus tool is not built: there is no {path}")
    return installed
