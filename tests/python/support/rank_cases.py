"""Runs the cases of a test on a rank: worker.py <case>[:<argument>...]..., under torchrun, or alone in one process."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Mapping

import annulus.torch as at
import torch
import torch.distributed as dist


def run_cases(
    worker: dict[str, object], more: Mapping[str, object] | None = None, patience: float = 60
) -> None:
    """Calls the functions that the program's arguments name, from a worker's globals() or from `more`.

    Sets the worker's WORLD to the group of all ranks, or to None if it is alone.
    """
    torch.set_num_threads(1)
    world = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=patience))
        world = dist.group.WORLD
    worker["WORLD"] = world
    functions = {**(more or {}), **worker}
    for case in sys.argv[1:]:
        name, *arguments = case.split(":")
        begin = time.monotonic()
        functions[name](*arguments)
        rank = "" if world is None else f"rank {dist.get_rank()}: "
        print(f"{rank}{case} done in {time.monotonic() - begin:.1f} s", flush=True)
    if world is not None:
        dist.barrier()  # closing would end transfers for which other ranks still wait
        at.cleanup()
        dist.destroy_process_group()
