"""Errors of one rank that become errors of all ranks of its group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from annulus import ConfigError, TransportError
from annulus.torch.ring._group_ring import reason_of
from annulus.torch.ring._process_groups import group_name
from annulus.torch.ring._registry import existing_ring, ring_of_group

F = TypeVar("F", bound=Callable)


@contextlib.contextmanager
def report_errors_to_ranks(group: str, timeout: object) -> Iterator[None]:
    """Reports an exception of the block to the other ranks, unless they know of the call already.

    On them it is a ConfigError. On this rank it is a ConfigError, too, but a NotImplementedError stays what it is.
    """
    ring = existing_ring(group)
    usable = ring is not None and not ring.transport.failed
    messages = ring.messages() if usable else 0
    try:
        yield
    except Exception as error:
        if isinstance(error, TransportError):
            raise
        now = existing_ring(group)
        if now is not None and (usable or now is not ring):
            if now.transport.failed or now.messages() != messages or now.transport.size() == 1:
                raise  # the other ranks know of this call: its own agreement reports the error
        limit = timeout if isinstance(timeout, (int, float)) and 0 < timeout < 1e9 else None
        told: BaseException = error
        with ring_of_group(group, limit) as ring:
            ring.set_timeout(limit)
            try:
                ring.refuse(reason_of(error))
            except ConfigError as refusal:
                told = refusal
        # Outside of the ring's block: a refused call does not break the ring.
        raise (error if isinstance(error, NotImplementedError) else told) from error


def collective(of: Callable[..., tuple[object, object]]) -> Callable[[F], F]:
    """Decorates a function that all ranks of a group call: its errors are reported to all ranks, also a TypeError for
    wrong arguments. `of` gets the arguments and returns the group and the timeout."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            group, timeout = of(*args, **kwargs)
            if group is None or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with report_errors_to_ranks(group_name(group), timeout):
                return function(*args, **kwargs)

        return call

    return decorate
