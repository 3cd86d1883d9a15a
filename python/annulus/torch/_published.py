"""Arguments with the names of the published ring-dilated-attention modules.

Code written for these modules runs unchanged. Each of their arguments is translated, checked, or reported as having no
effect. None is dropped silently.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from annulus import ConfigError
from annulus.torch._options import whole_complaint
from annulus.torch.ring._process_groups import group_size_and_rank

F = TypeVar("F", bound=Callable)

_RENAMED = {
    "activation_checkpointing": "use_gradient_checkpointing",
    "attention_dropout": "dropout",
    "dropout": "dropout_p",
    "min_seq_for_distributed": "min_tokens_for_ring",
    "overlap_communication": "overlap_comm",
    "use_checkpointing": "use_gradient_checkpointing",
}
# Arguments of which one value is supported, and what to do instead of passing another one.
_FIXED: dict[str, tuple[object, str]] = {
    "compile_model": (False, "call torch.compile on the model"),
    "data_parallel": (True, "train each process on its own, without Training"),
    "model_parallel": (False, "shard the projections with torch.distributed.tensor.parallel"),
    "sequence_parallel": (True, "pass group=None"),
    "use_8bit_optimizer": (False, "pass the optimizer of your choice to prepare()"),
    "use_flash_attention": (True, "no kernel stores the matrix of scores"),
    "use_gradient_checkpointing": (False, "call torch.utils.checkpoint.checkpoint on the module"),
    "use_gradient_compression": (False, "register a communication hook on Training.model"),
}
# Arguments that tune the published implementations. They change no result.
_WITHOUT_EFFECT = {
    "block_size": "kernels choose their block sizes",
    "chunk_size_kv": "kernels choose their block sizes",
    "device": "a module without parameters computes on the device of its inputs",
    "dtype": "a module without parameters computes in the dtype of its inputs",
    "enable_memory_pool": "workspaces of the latest shapes are always kept",
    "enable_profiling": "annulus.monitor.start() records what a call does",
    "flash_chunk_size": "kernels choose their block sizes",
    "lightweight_pool": "workspaces of the latest shapes are always kept",
    "memory_pool_threshold_mb": "workspaces of the latest shapes are always kept",
    "use_pattern_cache": "plans of the latest shapes are always kept",
    "use_tf32": "float32 is computed in full precision",
}
_CHECKED = ("communication_backend", "ring_size")
_NAMES = {*_RENAMED, *_FIXED, *_WITHOUT_EFFECT, *_CHECKED}


def takes_published_names(init: F) -> F:
    """Decorates the constructor of a module to take the published arguments, too. Its own arguments are unchanged."""
    own = inspect.signature(init).parameters

    @functools.wraps(init)
    def call(self: object, *args: object, **given: object) -> None:
        if not _NAMES.isdisjoint(given):
            given = _translated(type(self).__name__, given, own)
        init(self, *args, **given)

    return call


def _translated(where: str, given: dict[str, object], own: Collection[str]) -> dict[str, object]:
    ours: dict[str, object] = {}
    for name, value in given.items():
        new = name
        while new not in own and new in _RENAMED:
            new = _RENAMED[new]
        if new in ours or (new != name and new in given):
            raise ConfigError(f"{where}: {name} is another name of {new}: pass one of them")
        ours[new] = value
    for name in [name for name in ours if name in _NAMES and name not in own]:
        complaint = _complaint(name, ours.pop(name), given.get("group"))
        if complaint is not None:
            raise ConfigError(f"{where}: {complaint}")
        if name in _WITHOUT_EFFECT and given[name] is not None:
            warnings.warn(
                f"{where}: {name} has no effect: {_WITHOUT_EFFECT[name]}",
                UserWarning,
                stacklevel=_level_of_caller(),
            )
    return ours


def _level_of_caller() -> int:
    """The stacklevel for a warning of the caller that points to the code that uses this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("annulus."):
        frame, level = frame.f_back, level + 1
    return level


def _complaint(name: str, value: object, group: dist.ProcessGroup | None) -> str | None:
    if name in _FIXED:
        expected, instead = _FIXED[name]
        plain = value.item() if isinstance(value, np.generic) else value
        if value is None or (isinstance(plain, (bool, int, float)) and plain == expected):
            return None
        return f"{name} is {value!r}: only {expected!r} is supported; {instead}"
    if name == "ring_size" and value is not None:
        size, _ = group_size_and_rank(group)
        found = whole_complaint(name, value, least=1)
        if found is None and value != size:
            found = f"ring_size is {value}, but " + (
                "there is no group: pass group=torch.distributed.group.WORLD"
                if group is None
                else f"the group has {size} ranks"
            )
        return found
    if name == "communication_backend" and group is not None:
        group_size_and_rank(group)  # checks the group
        backend = dist.get_backend(group)
        if value is not None and value != backend:
            return f"communication_backend is {value!r}, but the group's backend is {backend!r}"
    return None
