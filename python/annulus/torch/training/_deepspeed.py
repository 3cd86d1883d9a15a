"""A training under DeepSpeed: its engine, and its own checkpoints, because only DeepSpeed can merge ZeRO's shards."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from annulus import ConfigError
from annulus.torch.checkpoints._ranks import CheckpointError
from annulus.torch.training._services import Services

T = TypeVar("T")
_log = logging.getLogger("annulus.training")
_KEEP = 2
_MADE_BY = "annulus.json"  # the ranks and the stage that wrote a checkpoint
_OURS = "annulus"  # our key in the client state that DeepSpeed stores


def check_installed() -> None:
    """Raises ModuleNotFoundError if DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "use_deepspeed=True needs DeepSpeed: pip install deepspeed", name="deepspeed"
        )


def check(services: Services, model: nn.Module) -> None:
    """Raises if DeepSpeed cannot run in this process, before other ranks wait for it."""
    check_installed()
    if not dist.is_initialized():
        raise ConfigError(
            "use_deepspeed: torch.distributed is not initialised: start with torchrun and call init_process_group"
        )
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    if len(dtypes) > 1:
        raise ConfigError(
            f"use_deepspeed: the model's parameters are {' and '.join(dtypes)}: DeepSpeed would silently cast them to "
            "one dtype. Make the model in one dtype"
        )
    wrong = _nvme_complaint(services, model) if services.nvme_offload else None
    if wrong is not None:
        raise ConfigError(f"nvme_offload: {wrong}")


def start(services: Services, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """DeepSpeed's engine around a model."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=services.deepspeed_config(model)
    )
    return engine


def _nvme_complaint(services: Services, model: nn.Module) -> str | None:
    """Why DeepSpeed cannot offload to a disk here; None if it can."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        return (
            "DeepSpeed cannot build async_io here, because it needs libaio: install libaio-dev (or libaio-devel), or "
            "set CFLAGS and LDFLAGS to its folder"
        )
    # DeepSpeed 0.19: the parameter swapper assumes bfloat16 on such accelerators.
    accelerator = get_accelerator()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if services.cpu_offload or accelerator.is_fp16_supported() or dtypes == {torch.bfloat16}:
        return None
    return (
        f"on a {accelerator._name} DeepSpeed keeps parameters on disk in bfloat16 only, and the model has "
        f"{', '.join(sorted(map(str, dtypes)))}: make the model in bfloat16, or keep parameters in host memory with "
        "cpu_offload=True"
    )


def _by_first(what: str, find: Callable[[], T]) -> T:
    """The result of rank 0, on every rank. Only rank 0 looks, because network file systems show new folders late. An
    error of rank 0 is raised on every rank, because the others would wait."""
    said: list = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = find()
        except OSError as error:
            said[1] = str(error)
    dist.broadcast_object_list(said)
    if said[1] is not None:
        raise CheckpointError(f"{what}: rank 0: {said[1]}")
    return said[0]


class EngineCheckpoints:
    """DeepSpeed's checkpoints, every few steps: the part of :class:`Checkpoints` that a training needs.

    They have DeepSpeed's format and can be loaded only by as many ranks as wrote them. DeepSpeed names the newest
    checkpoint in a file once it is complete, so a job that is killed earlier continues from the one before.
    """

    def __init__(self, services: Services, engine: nn.Module):
        self._folder = services.folder / "deepspeed"
        self._interval, self._resumes, self._engine = services.interval, services.resumes, engine
        self._made_by = {"ranks": dist.get_world_size(), "zero_stage": services.stage}
        latest = self._folder / "latest"
        if _by_first("looking for checkpoints", latest.exists) and not self._resumes:
            raise CheckpointError(
                f"{self._folder} has checkpoints and auto_resume is False: choose another checkpoint_folder"
            )

    def resume(self, state: Mapping[str, object]) -> int:
        """Loads the newest checkpoint. Returns its step, or 0."""
        newest = _by_first("looking for checkpoints", self._newest)
        if not self._resumes or newest is None:
            return 0
        for name, number in self._made_by.items():
            if newest.get(name, number) != number:
                raise CheckpointError(
                    f"{self._folder}: the newest checkpoint was made with {name} = {newest[name]}, and DeepSpeed "
                    f"cannot load it with {number}"
                )
        path, kept = self._engine.load_checkpoint(str(self._folder))
        if path is None:
            raise CheckpointError(f"{self._folder}: DeepSpeed could not load its newest checkpoint")
        for name, thing in state.items():
            thing.load_state_dict(kept[_OURS]["state"][name])
        return kept[_OURS]["step"]

    def _newest(self) -> dict[str, int] | None:
        """The ranks and the stage that wrote the newest checkpoint, as far as known; None: there is no checkpoint."""
        try:
            tag = (self._folder / "latest").read_text().strip()
        except FileNotFoundError:
            return None
        try:
            return json.loads((self._folder / tag / _MADE_BY).read_text())
        except (OSError, ValueError):  # DeepSpeed reports other errors
            return {}

    def step(self, step: int, state: Mapping[str, object]) -> None:
        if step % self._interval != 0:
            return
        folder = self._folder / f"step-{step:08d}"

        def begin() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _MADE_BY).write_text(json.dumps(self._made_by))

        _by_first("writing a checkpoint", begin)  # before DeepSpeed makes it the newest one
        kept = {"step": step, "state": {name: thing.state_dict() for name, thing in state.items()}}
        self._engine.save_checkpoint(
            str(self._folder), tag=folder.name, client_state={_OURS: kept}
        )
        if dist.get_rank() == 0:
            # Checkpoints of later steps are unfinished ones of killed jobs. They do not count.
            written = sorted(f for f in self._folder.glob("step-*") if f.name <= folder.name)
            for old in written[:-_KEEP]:
                try:
                    shutil.rmtree(old)
                except OSError as error:  # no reason to stop the training
                    _log.warning("%s is not removed: %s", old, error)

    def close(self) -> None:
        """Does nothing: what was saved is on disk already."""
