"""The rings of this process: one per process group, made on first use, and the executors of calls without a group."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

import annulus
from annulus import ConfigError, RingAttention, TransportError
from annulus.torch import _fast_path
from annulus.torch._config import Call, config_of
from annulus.torch.ring._executors import LocalExecutors, forget_captured
from annulus.torch.ring._group_ring import GroupRing, reason_of
from annulus.torch.ring._process_groups import group_name, rank_in

T = TypeVar("T")

_BRIEF_WAIT = 0.2  # seconds; the other ranks are not told of shorter waits

_local = LocalExecutors()
_groups: dict[str, GroupRing] = {}  # by the group's name
_inherited: list[dict[str, GroupRing]] = []  # rings of the processes that this one was forked from
# The error that broke a group's last ring, until there is a new ring.
_losses: dict[str, TransportError] = {}


class CallLock:
    """Allows one call at a time on a group's ring. It never waits: two threads of another rank might make their two
    calls in the other order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the two flags
        self._taken = False
        self.disturbed = False

    def take(self) -> bool:
        """Returns whether the caller has the lock now. If not, sets `disturbed`, which its holder reads."""
        with self._lock:
            self.disturbed = self._taken
            if self._taken:
                return False
            self._taken = True
            return True

    def give_back(self) -> None:
        with self._lock:
            self._taken = False


_call_locks: dict[str, CallLock] = {}
_SURVIVORS_GO_ON = "it continues with the remaining ranks"
_TWO_THREADS = (
    "two threads of rank {} call on one process group at the same time: give each a group of its own, or "
    "let one wait for the other"
)


@contextlib.contextmanager
def ring_of_group(
    name: str, timeout: float | None, call: str = "ring_attention"
) -> Iterator[GroupRing]:
    """The ring over a group, made on first use, for one call at a time.

    A second caller gets a ConfigError. Then the ring is aborted, so that no rank gets rows of the wrong call.
    """
    lock = _call_locks.setdefault(name, CallLock())
    if not lock.take():
        rank = rank_in(name)
        ring = _groups.get(name)
        if ring is not None:
            ring.transport.abort(_TWO_THREADS.format(rank))
        raise ConfigError(f"{call}: {_TWO_THREADS.format(rank)}")
    try:
        ring = _working_ring(name, timeout)
        if lock.disturbed:  # by a second call that found no ring to abort
            ring.transport.abort(_TWO_THREADS.format(ring.transport.rank()))
        yield ring
    except annulus.Error:
        raise  # it has been raised on the other ranks, too
    except BaseException as error:  # for example Ctrl-C: without an abort the other ranks would wait for this one
        ring = _groups.get(name)
        if ring is not None:
            ring.transport.abort(reason_of(error))
        raise
    finally:
        lock.give_back()


def _working_ring(name: str, timeout: float | None) -> GroupRing:
    """The group's ring, or a new one if it has broken."""
    ring = _groups.get(name)
    group = dist.distributed_c10d._resolve_process_group(name)
    # PyTorch reuses the names of groups after all groups have been destroyed. Then this is another group.
    if ring is not None and ring.process_group is not group:
        _losses.pop(name, None)
    elif ring is not None and not ring.transport.failed:
        return ring
    if ring is not None:
        if ring.process_group is group and ring.transport.loss is not None:
            _losses[name] = ring.transport.loss
        _groups.pop(name, None)  # another thread may be in cleanup()
        ring.transport.close()
    ring = _groups[name] = GroupRing(group, timeout, _losses.get(name))
    _losses.pop(name, None)
    return ring


def existing_ring(name: str) -> GroupRing | None:
    """The group's ring, working or broken, if it has been made."""
    return _groups.get(name)


def run(
    what: str,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    body: Callable[[RingAttention], T],
) -> T | None:
    """Returns body(executor), with the executor for this call; None if there is nothing to compute."""
    config = call.config
    if config.group is None:
        return _local.run(call, q, k, body)
    with ring_of_group(config.group, config.timeout) as ring:
        return ring.run(what, call, q, k, body)


def lengths_of_all(call: str, group: str, claims: dict, tokens: T) -> tuple[T, ...]:
    """The number of tokens (or of queries and keys) of every rank of a group.

    Raises a ConfigError on all ranks unless all of them make this call with equal claims.
    """
    with ring_of_group(group, None, call) as ring:
        ring.set_timeout(None)
        return ring.agree(call, claims, tokens)


def has_lost() -> bool:
    """Whether a ring of this process has lost a rank, and no new ring has replaced it."""
    return bool(_losses) or any(ring.transport.loss is not None for ring in list(_groups.values()))


@contextlib.contextmanager
def waiting_elsewhere(done: Callable[[float], object]) -> Iterator[None]:
    """A context for waiting for other ranks outside of a ring, for example for the end of a checkpoint.

    If the wait is long (done(seconds) is false), this rank tells the other ranks. Otherwise they would report this rank
    as lost when their deadline expires.
    """
    told = [] if done(_BRIEF_WAIT) else [ring.transport for ring in list(_groups.values())]
    for transport in told:
        transport.say_waiting_elsewhere(True)
    try:
        yield
    finally:
        for transport in told:
            transport.say_waiting_elsewhere(False)


def leave(group: dist.ProcessGroup) -> int:
    """Ends the ring over a group for good. Returns its lost rank, or -1 if that is not known."""
    name = group.group_name
    _call_locks.pop(name, None)
    ring = _groups.pop(name, None)
    loss = _losses.pop(name, None)
    lost = -1 if loss is None else loss.rank
    if ring is not None and ring.process_group is group:
        health = ring.transport.health()  # may report this rank as the lost one
        lost = lost if health["alive"] else health["lost_rank"]
        if _SURVIVORS_GO_ON in health["reason"]:  # the reported rank is not lost: it waits in survivors()
            lost = -1
        ring.transport.abort(_SURVIVORS_GO_ON)
    return lost


def executors() -> list[RingAttention]:
    """All cached executors of this process."""
    return [e for ring in (_local, *_groups.values()) for e in ring.pool.executors()]


def executors_of(group: dist.ProcessGroup | None) -> list[RingAttention]:
    """The cached executors of one group's ring; None: those of calls without a group."""
    ring = _owner_of(group)
    return [] if ring is None else ring.pool.executors()


def _owner_of(group: dist.ProcessGroup | None) -> LocalExecutors | GroupRing | None:
    name = group_name(group)
    return _local if name is None else _groups.get(name)


def clear_cache() -> None:
    """Drops the workspaces of all rings of this process, except those that CUDA graphs use.

    Harmless at any time, on one rank or all.
    """
    for ring in (_local, *_groups.values()):
        ring.pool.clear()


def clear_cache_of(group: dist.ProcessGroup | None) -> None:
    """Does clear_cache for the ring of one group only; None: for calls without a group."""
    ring = _owner_of(group)
    if ring is not None:
        ring.pool.clear()


def cleanup() -> None:
    """Drops all workspaces and closes the connections of all rings. CUDA graphs that were captured before must
    not be replayed any more.

    Call it before ``torch.distributed.destroy_process_group``, on every rank: it waits until the other ranks have
    received what this one has sent, at most for the timeout. Later calls of :func:`ring_attention` make new rings.
    Idempotent.
    """
    clear_cache()
    forget_captured()
    _fast_path.forget()
    config_of.cache_clear()
    for name in list(_groups):
        ring = _groups.pop(name, None)  # None: another thread closes it
        if ring is not None:
            ring.transport.close()


# The threads of connections must end before the interpreter exits.
atexit.register(cleanup)


def _forget_after_fork() -> None:
    """A forked child has no threads of the executors, and must not use the connections of its parent."""
    global _local, _groups
    _local = LocalExecutors()  # the lock of the old one may be held by a thread of the parent
    # Kept, but never used: closing a connection waits for its threads, which the child does not have.
    _inherited.append(_groups)
    _groups = {}
    _losses.clear()
    _call_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
