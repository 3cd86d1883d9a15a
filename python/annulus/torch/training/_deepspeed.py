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
_MADE_BY = "annulus.json"  # which DeepSpeed's own files do not say in words
_OURS = "annulus"  # of what DeepSpeed keeps for others, beside its own names


def check_installed() -> None:
    """Raises where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "use_deepspeed=True needs DeepSpeed: pip install deepspeed", name="deepspeed"
        )


def check(services: Services, model: nn.Module) -> None:
    """Raises where DeepSpeed cannot do it in this process, before others wait for it."""
    check_installed()
    if not dist.is_initialized():
        raise ConfigError(
            "use_deepspeed: torch.distributed is not initialised: start with torchrun, and call init_process_group"
        )
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    if len(dtypes) > 1:
        raise ConfigError(
            f"use_deepspeed: the model's parameters are {' and '.join(dtypes)}: DeepSpeed would make one dtype of them "
            "without a word, so that layers get what they do not expect. Make the model in one"
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
    """Why DeepSpeed could not do it here."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        return (
            "DeepSpeed cannot build its async_io here, which needs libaio: install libaio-dev (or libaio-devel), or set "
            "CFLAGS and LDFLAGS to where it is"
        )
    # Found in DeepSpeed 0.19: its swapper of parameters takes them for bfloat16 there.
    accelerator = get_accelerator()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if services.cpu_offload or accelerator.is_fp16_supported() or dtypes == {torch.bfloat16}:
        return None
    return (
        f"on a {accelerator._name} DeepSpeed keeps parameters on disk in bfloat16 only, and these are "
        f"{', '.join(sorted(map(str, dtypes)))}: make the model in bfloat16, or leave parameters in host memory with "
        "cpu_offload=True"
    )


def _by_first(what: str, find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank: folders come late over networks. What fails there fails everywhere: the others
    would wait for it."""
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

    They are in DeepSpeed's format, and for the number of ranks that wrote them. DeepSpeed names the newest one in a file
    once all of it is written, so that a job that is killed before goes on from the one before.
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
        """The step after which training goes on."""
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
        """By whom the newest one was made, as far as it says; None: there is none."""
        try:
            tag = (self._folder / "latest").read_text().strip()
        except FileNotFoundError:
            return None
        try:
            return json.loads((self._folder / tag / _MADE_BY).read_text())
        except (OSError, ValueError):  # DeepSpeed will say what is wrong with the rest
            return {}

    def step(self, step: int, state: Mapping[str, object]) -> None:
        if step % self._interval != 0:
            return
        folder = self._folder / f"step-{step:08d}"

        def begin() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _MADE_BY).write_text(json.dumps(self._made_by))

        _by_first("writing a checkpoint", begin)  # once DeepSpeed is done it is the newest one
        kept = {"step": step, "state": {name: thing.state_dict() for name, thing in state.items()}}
        self._engine.save_checkpoint(
            str(self._folder), tag=folder.name, client_state={_OURS: kept}
        )
        if dist.get_rank() == 0:
            # Checkpoints of later steps are unfinished ones of killed jobs: they do not count among those to keep.
            written = sorted(f for f in self._folder.glob("step-*") if f.name <= folder.name)
            for old in written[:-_KEEP]:
                try:
                    shutil.rmtree(old)
                except OSError as error:  # the others train on
                    _log.warning("%s is not removed: %s", old, error)

    def close(self) -> None:
        """What was saved is on disk already."""
