from __future__ import annotations

import importlib.metadata
import logging
import os
import pathlib
import sysconfig
import types
from collections.abc import Iterator

import pytest
from support import ROOT

# PyTorch looks up the name of every address it connects to or hears from: where the name server's reply is lost, processes wait
# for 5 s each time, unless told otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# Programs that tests start find the package support.
HERE = str(pathlib.Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))


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


@pytest.fixture(autouse=True)
def log_level_as_before() -> Iterator[None]:
    """set_log_level changes a logger of the process, and other tests read what is logged."""
    log = logging.getLogger("annulus")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def one_rank(torch: types.ModuleType) -> Iterator[None]:
    """A process group of this process alone."""
    import annulus.torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    annulus.torch.cleanup()
    dist.destroy_process_group()


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


@pytest.fixture(scope="module")
def command() -> str:
    """The annulus command, where pip has put it."""
    import annulus

    for file in importlib.metadata.files(annulus.__name__) or []:
        path = pathlib.Path(file.locate())
        if path.stem == "annulus" and path.parent.name in ("bin", "Scripts"):
            return str(path)
    pytest.skip("this wheel was built without the command: CLI11 or nlohmann_json was missing")


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
