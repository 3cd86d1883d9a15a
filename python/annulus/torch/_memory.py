"""Device memory from PyTorch's allocator, which then counts and reuses it; and a retry when memory runs out."""

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
    # The CPU allocator raises a RuntimeError, which only its text tells from others.
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or "can't allocate memory" in str(error)
        or "not enough memory" in str(error)
    )


def with_room(make: Callable[..., T], *args: object) -> T:
    """Returns make(*args). If memory runs out, drops the caches of this library and tries once more."""
    try:
        return make(*args)
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
    LOG.info("memory ran out for tensors: %d bytes of workspaces were dropped", drop_caches())
    return make(*args)


def _allocate(device: int, size: int) -> int:
    """Allocates device memory for an executor that is being made; 0: there is not enough."""
    found: list[int] = []
    errors: list[Exception] = []

    def allocate() -> None:
        try:
            found.append(torch.cuda.caching_allocator_alloc(size, device))
            # Earlier work on this stream may still use the memory, and executors use other streams.
            torch.cuda.current_stream(device).synchronize()
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    # On a new thread, with the default stream: while PyTorch warms up compiled code for CUDA graphs, allocations of its
    # thread come from the pool of the graphs, which must not contain executors.
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    if errors and not isinstance(errors[0], torch.cuda.OutOfMemoryError):
        raise errors[0]
    return found[0] if found else 0


def _free(device: int, address: int) -> None:
    torch.cuda.caching_allocator_delete(address)


def _spare(device: int) -> int:
    """Bytes that PyTorch has reserved on the device and does not use. They are available to executors."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def install() -> None:
    """Makes executors use PyTorch's allocator. Uses no device, so that a process may be forked after the import."""
    if annulus.cuda_built() and torch.version.cuda is not None:
        use_cuda_allocator(_allocate, _free, _spare)
