"""Memory of CUDA devices from PyTorch's allocator: it then counts our workspaces, and uses their memory again. And
what to do when there is none left for results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

import annulus
from annulus._core import drop_caches, use_cuda_allocator

T = TypeVar("T")
LOG = logging.getLogger("annulus")


def _is_shortage(error: Exception) -> bool:
    # Of the CPU's allocator there is nothing but the text.
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or "can't allocate memory" in str(error)
        or "not enough memory" in str(error)
    )


def with_room(make: Callable[..., T], *args: object) -> T:
    """make(*args), and once more without our caches if memory runs out."""
    try:
        return make(*args)
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
    LOG.info("memory ran out for tensors: %d bytes of workspaces were dropped", drop_caches())
    return make(*args)


def _allocate(device: int, size: int) -> int:
    """Only executors that are being made get here."""
    found: list[int] = []
    errors: list[Exception] = []

    def allocate() -> None:
        try:
            found.append(torch.cuda.caching_allocator_alloc(size, device))
            # What had this memory before may still be at work with it on that stream, and executors use others.
            torch.cuda.current_stream(device).synchronize()
        except Exception as error:  # noqa: BLE001: raised below
            errors.append(error)

    # On a thread of its own, with the default stream: while compiled code is warmed up for CUDA graphs, what its
    # thread allocates comes from their pool, and must not stay.
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    if errors and not isinstance(errors[0], torch.cuda.OutOfMemoryError):
        raise errors[0]
    return found[0] if found else 0


def _free(device: int, address: int) -> None:
    torch.cuda.caching_allocator_delete(address)


def _spare(device: int) -> int:
    """Bytes that PyTorch has reserved on the device and does not use: memory has not run out while there are some."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def install() -> None:
    """Touches no device: a process that has only imported this may still be forked."""
    if annulus.cuda_built() and torch.version.cuda is not None:
        use_cuda_allocator(_allocate, _free, _spare)
