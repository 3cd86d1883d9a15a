"""Errors of one rank that are raised on all ranks of its group."""

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
    """Reports an exception of the block to the other ranks, unless the call itself reports it.

    The other ranks raise a ConfigError. This rank raises a ConfigError, too, except for a NotImplementedError, which
    is raised as it is.
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
                raise  # this rank has sent messages of the call: the agreement of the call reports the error
        limit = timeout if isinstance(timeout, (int, float)) and 0 < timeout < 1e9 else None
        reported: BaseException = error
        with ring_of_group(group, limit) as ring:
            ring.set_timeout(limit)
            try:
                ring.refuse(reason_of(error))
            except ConfigError as refusal:
                reported = refusal
        # Raised outside of ring_of_group, which aborts the ring after other errors than annulus.Error.
        raise (error if isinstance(error, NotImplementedError) else reported) from error


def collective(group_and_timeout: Callable[..., tuple[object, object]]) -> Callable[[F], F]:
    """Decorates a function that all ranks of a group call. Its errors are raised on all ranks, also a TypeError for
    wrong arguments. `group_and_timeout` gets the arguments and returns the group and the timeout."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            group, timeout = group_and_timeout(*args, **kwargs)
            if group is None or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with report_errors_to_ranks(group_name(group), timeout):
                return function(*args, **kwargs)

        return call

    return decorate
