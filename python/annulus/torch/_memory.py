"""Memory of CUDA devices from PyTorch's allocator: it then counts our workspaces, and uses their memory again."""

from __future__ import annotations

import threading

import torch

import annulus
from annulus._core import use_cuda_allocator


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


def install() -> None:
    """Touches no device: a process that has only imported this may still be forked."""
    if annulus.cuda_built() and torch.version.cuda is not None:
        use_cuda_allocator(_allocate, _free)
