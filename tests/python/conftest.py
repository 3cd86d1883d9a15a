from __future__ import annotations

import os
import pathlib
import sysconfig
import types
from collections.abc import Iterator

import pytest

# PyTorch looks up the name of every address it connects to or hears from: where the name server's reply is lost, processes wait
# for 5 s each time, unless told otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def torch() -> types.ModuleType:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def cuda(torch: types.ModuleType) -> Iterator[types.ModuleType]:
    """PyTorch, with a CUDA device that both can use."""
    import annulus

    if annulus.cuda_complaint():
        pytest.skip(annulus.cuda_complaint())
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    import annulus.torch

    torch.manual_seed(7)
    yield torch
    torch.cuda.synchronize()
    annulus.torch.clear_cache()
    annulus.clear_cache()


@pytest.fixture
def monitoring_off_afterwards() -> Iterator[None]:
    """With room for as many events as unless told."""
    from annulus import monitor

    monitor.clear()
    yield
    monitor.set_log_level("off")
    monitor.stop()
    monitor.start(65536)
    monitor.stop()
    monitor.clear()


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
