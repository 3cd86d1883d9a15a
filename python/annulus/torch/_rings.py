"""Executors behind the operators: who runs a configuration, and where executors are kept."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

import annulus
from annulus import ConfigError, Pattern, Placement, RingAttention, TransportError
from annulus._core import ExecutorPool
from annulus.torch._config import Config, pattern_of, placement_of_lengths
from annulus.torch._records import CALL, claims_of, compare
from annulus.torch._memory import LOG
from annulus.torch._transport import ProcessGroupTransport, sendable, timeout_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable)

_NO_LIMIT = 2**62
# Executors whose memory is part of CUDA graphs, which may be replayed whenever their owner likes.
_captured: dict[int, RingAttention] = {}
_MOST_CALLS = 1000  # whose lengths are remembered
_SOON = 0.2  # seconds that are not worth a word


def _make_executor(
    config: Config,
    pattern: Pattern,
    placement: Placement,
    transport: annulus.Transport,
    q: torch.Tensor,
    k: torch.Tensor,
) -> RingAttention:
    executor = RingAttention(
        pattern,
        placement,
        transport=transport,
        batch=q.shape[0],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        device=str(q.device),
        max_qkv_elements=_NO_LIMIT,
        **config.options,
    )
    if executor.recovery:
        here = f"[rank {transport.rank()}/{transport.size()}] " if transport.size() > 1 else ""
        LOG.warning("%sring_attention: memory ran out: %s", here, executor.recovery)
    return executor


class _LocalRings:
    """Rings of one rank. Threads may call at once: each takes an executor of its own."""

    def __init__(self) -> None:
        self.pool = ExecutorPool()
        self._keys: dict[tuple, str] = {}
        self._next_key = itertools.count()

    def run(
        self,
        what: str,
        config: Config,
        q: torch.Tensor,
        k: torch.Tensor,
        body: Callable[[RingAttention], T],
    ) -> T | None:
        shape = q.shape
        if shape[0] == 0 or shape[1] == 0:
            return None
        looks = (config.executors, shape, k.shape[2], q.dtype, q.device)
        key = self._keys.get(looks)
        if key is None:
            if len(self._keys) >= _MOST_CALLS:
                self._keys.clear()
            key = self._keys[looks] = str(next(self._next_key))
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        executor = self.pool.take(key)
        if executor is None:
            if capturing:
                raise ConfigError(
                    "ring_attention: a CUDA graph is being captured and this call has not been made before, so "
                    "that its workspace would have to be allocated: make it once before capturing"
                )
            if config.n_global not in (None, q.shape[1]):
                raise ConfigError(
                    f"n_global is {config.n_global}, but q has {q.shape[1]} tokens and there is no group"
                )
            transport = annulus.make_in_process_ring(1)[0]
            placement = Placement.named(config.placement, q.shape[1], 1)
            pattern = pattern_of(config, q.shape[2])
            self.pool.make_room()
            executor = _make_executor(config, pattern, placement, transport, q, k)
        if capturing:
            _captured[id(executor)] = executor
        result = body(executor)
        self.pool.give_back(key, executor)  # after an error its transport may be dead
        return result


class _GroupRing:
    """The ring over one process group.

    A call first does what its executor does, which agrees with the other ranks before anything moves. Which
    executor that is depends on the other ranks' lengths: the one of the last call that looked the same from here
    is nearly always right. Where it is not, where there is none, or where anything is wrong on any rank, that
    agreement is a ConfigError on all ranks, and then they tell each other everything.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float | None, loss: TransportError | None
    ):
        self.process_group = group
        self.transport = ProcessGroupTransport._instead_of(loss, group, timeout)
        self._usual_deadline = timeout_of(group)
        self.pool = ExecutorPool()
        # By what this rank alone knows of a call: everybody's tokens when it was last made, and its key.
        self._last: dict[tuple, tuple[tuple[int, ...], str]] = {}

    def messages(self) -> int:
        """That were sent so far: if it has not changed, the others have not heard of this rank."""
        return self.transport.counters()["messages_sent"]

    def set_timeout(self, timeout: float | None) -> None:
        self.transport.set_deadline(self._usual_deadline if timeout is None else timeout)

    def _is_waited_for(self, messages: int) -> bool:
        """Whether the others, as of then, still wait for this rank to agree or not."""
        return (
            self.transport.size() > 1 and not self.transport.failed and self.messages() == messages
        )

    def refuse(self, reason: str) -> NoReturn:
        """Takes part in a call that this rank cannot make, so that it is a ConfigError on every rank."""
        with contextlib.suppress(ConfigError):
            RingAttention.refuse(self.transport, reason)
        compare(self.transport, reason)
        raise AssertionError("compare returned although there was a complaint")

    def agree(self, call: str, claims: dict, own: T) -> tuple[T, ...]:
        """Every rank's `own` (its number of tokens, or its shapes) in a call that needs no executor, if all ranks
        make it and claim the same. Collective with whatever they do instead."""
        if self.transport.size() > 1:
            with contextlib.suppress(ConfigError):
                RingAttention.refuse(self.transport, f"this rank calls {call}")
        return compare(self.transport, None, {CALL: call} | claims, own, where=call)[0]

    def run(
        self,
        what: str,
        config: Config,
        q: torch.Tensor,
        k: torch.Tensor,
        body: Callable[[RingAttention], T],
    ) -> T | None:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "ring_attention: a call on a group cannot be part of a CUDA graph: ranks have to agree on "
                "every call"
            )
        self.set_timeout(config.timeout)
        looks = (config.executors, q.shape, k.shape[2], q.dtype, q.device)
        lengths, key = self._last.get(looks, (None, ""))
        executor = None if lengths is None else self.pool.take(key)
        messages = self.messages()
        try:
            if executor is None:
                RingAttention.refuse(self.transport, "this rank makes this call for the first time")
            return body(executor)
        except Exception as error:
            if executor is not None and self._is_waited_for(messages):
                self._refuse_because_of(error)
            if not isinstance(error, ConfigError):
                raise
            # Without its frames, which hold this ring: connections would last until garbage is collected.
            failure = error.with_traceback(None)
        finally:
            if executor is not None:
                self.pool.give_back(key, executor)

        claims = claims_of(what, config, q.shape, k.shape[2], str(q.dtype), q.device.type)
        expected = None if executor is None else lengths
        lengths, all_knew = compare(self.transport, None, claims, q.shape[1], expected)
        if all_knew:
            raise failure  # that was not the reason
        key = f"{looks} {lengths}"
        if q.shape[0] * sum(lengths) == 0 and config.n_global in (None, sum(lengths)):
            return None
        executor = self.pool.take(key)
        kept = b"" if executor is None else b"kept"
        if not all(annulus.gather_records(self.transport, kept)):
            executor = None  # some rank has none: all make theirs
        messages = self.messages()
        try:
            if executor is None:
                self.pool.make_room()
                executor = self._make(config, list(lengths), q, k)
                messages = self.messages()
            result = body(executor)
        except Exception as error:
            if self._is_waited_for(messages):
                RingAttention.refuse(self.transport, _reason(error))
            raise
        self.pool.give_back(key, executor)
        if len(self._last) >= _MOST_CALLS:
            self._last.clear()
        self._last[looks] = lengths, key
        return result

    def _refuse_because_of(self, error: Exception) -> NoReturn:
        try:
            self.refuse(_reason(error))
        except ConfigError as refusal:
            raise refusal from error

    def _make(
        self, config: Config, lengths: list[int], q: torch.Tensor, k: torch.Tensor
    ) -> RingAttention:
        placement = placement_of_lengths(config.placement, lengths, config.n_global)
        pattern = pattern_of(config, q.shape[2])
        return _make_executor(config, pattern, placement, self.transport, q, k)


def _reason(error: BaseException) -> str:
    """For the other ranks."""
    try:
        text = str(error)
    except Exception:
        text = "(it cannot be printed)"
    return sendable(text if isinstance(error, annulus.Error) else f"{type(error).__name__}: {text}")


_local = _LocalRings()
_groups: dict[str, _GroupRing] = {}
_parents: list[dict[str, _GroupRing]] = []  # connections of the processes that this one was forked from
# Why the last ring of a group broke, until there is a new one.
_losses: dict[str, TransportError] = {}


class _Turn:
    """Whose turn it is on one group's ring: calls of two threads would meet the other ranks' in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for a moment only
        self._taken = False
        self.disturbed = False

    def take(self) -> bool:
        """Whether the caller has it now. If not, whoever has it is disturbed, from the very moment it was taken."""
        with self._lock:
            self.disturbed = self._taken
            if self._taken:
                return False
            self._taken = True
            return True

    def give_back(self) -> None:
        with self._lock:
            self._taken = False


_turns: dict[str, _Turn] = {}
_ON_ITS_WAY = "it goes on with those that are left"
_TWO_THREADS = (
    "two threads of rank {} call on one process group at the same time: give each a group of its own, or "
    "let one wait for the other"
)


@contextlib.contextmanager
def ring_of_group(
    name: str, timeout: float | None, call: str = "ring_attention"
) -> Iterator[_GroupRing]:
    """The ring over a group, made on first use, for one call at a time.

    A second caller does not wait, because on another rank it may have come first: it gets a ConfigError, and no
    rank gets rows of the wrong call, because the ring is given up.
    """
    turn = _turns.setdefault(name, _Turn())
    if not turn.take():
        rank = rank_in(name)
        ring = _groups.get(name)
        if ring is not None:
            ring.transport.abort(_TWO_THREADS.format(rank))
        raise ConfigError(f"{call}: {_TWO_THREADS.format(rank)}")
    try:
        ring = _made(name, timeout)
        if turn.disturbed:  # while the ring was not there to be aborted
            ring.transport.abort(_TWO_THREADS.format(ring.transport.rank()))
        yield ring
    except annulus.Error:
        raise  # the others know
    except (
        BaseException
    ) as error:  # Ctrl-C, or what nobody thought of: the others would wait for this rank
        ring = _groups.get(name)
        if ring is not None:
            ring.transport.abort(_reason(error))
        raise
    finally:
        turn.give_back()


def _made(name: str, timeout: float | None) -> _GroupRing:
    ring = _groups.get(name)
    group = dist.distributed_c10d._resolve_process_group(name)
    # A ConfigError leaves a ring as it was, a broken one is made anew. Names are given again once all groups
    # have been destroyed.
    if ring is not None and ring.process_group is not group:
        _losses.pop(name, None)
    elif ring is not None and not ring.transport.failed:
        return ring
    if ring is not None:
        if ring.process_group is group and ring.transport.loss is not None:
            _losses[name] = ring.transport.loss
        _groups.pop(name, None)  # another thread may be in cleanup()
        ring.transport.close()
    ring = _groups[name] = _GroupRing(group, timeout, _losses.get(name))
    _losses.pop(name, None)
    return ring


def has_lost() -> bool:
    """Whether a ring of this process has lost a rank, and nobody has gone on without it yet."""
    return bool(_losses) or any(ring.transport.loss is not None for ring in list(_groups.values()))


@contextlib.contextmanager
def waiting_elsewhere(done: Callable[[float], object]) -> Iterator[None]:
    """Around a wait for other ranks that is none of a ring. If it takes long (done(seconds) is false), the others
    are told, for whom this rank would else seem to be the one that does not come."""
    told = [] if done(_SOON) else [ring.transport for ring in list(_groups.values())]
    for transport in told:
        transport.say_waiting_elsewhere(True)
    try:
        yield
    finally:
        for transport in told:
            transport.say_waiting_elsewhere(False)


def leave(group: dist.ProcessGroup) -> int:
    """Ends the ring over a group for good. The rank of it that is lost, -1: not known."""
    name = group.group_name
    _turns.pop(name, None)
    ring = _groups.pop(name, None)
    loss = _losses.pop(name, None)
    lost = -1 if loss is None else loss.rank
    if ring is not None and ring.process_group is group:
        health = ring.transport.health()  # this rank may be the one that the others have lost
        lost = lost if health["alive"] else health["lost_rank"]
        if _ON_ITS_WAY in health["reason"]:  # it has called survivors(), and is waited for
            lost = -1
        ring.transport.abort(_ON_ITS_WAY)
    return lost


def run(
    what: str,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    body: Callable[[RingAttention], T],
) -> T | None:
    """body(executor), with the executor for this call; None where there is nothing to compute."""
    if config.group is None:
        return _local.run(what, config, q, k, body)
    with ring_of_group(config.group, config.timeout) as ring:
        return ring.run(what, config, q, k, body)


def lengths_of_all(call: str, group: str, claims: dict, tokens: int) -> tuple[int, ...]:
    """How many tokens every rank of a group has; ConfigError unless all make this call and claim the same."""
    with ring_of_group(group, None, call) as ring:
        ring.set_timeout(None)
        return ring.agree(call, claims, tokens)


@contextlib.contextmanager
def errors_of_all(group: str, timeout: object) -> Iterator[None]:
    """What is raised inside before the other ranks of the group have heard of this call, they hear of, too: on
    them, and unless it is a NotImplementedError on this rank as well, it is a ConfigError."""
    ring = _groups.get(group)
    usable = ring is not None and not ring.transport.failed
    messages = ring.messages() if usable else 0
    try:
        yield
    except Exception as error:
        if isinstance(error, TransportError):
            raise
        now = _groups.get(group)
        if now is not None and (usable or now is not ring):
            if now.transport.failed or now.messages() != messages or now.transport.size() == 1:
                raise  # they have
        limit = timeout if isinstance(timeout, (int, float)) and 0 < timeout < 1e9 else None
        told: BaseException = error
        with ring_of_group(group, limit) as ring:
            ring.set_timeout(limit)
            try:
                ring.refuse(_reason(error))
            except ConfigError as refusal:
                told = refusal
        # Behind the ring, which is as good as it was.
        raise (error if isinstance(error, NotImplementedError) else told) from error


def errors_reach_all(of: Callable[..., tuple[object, object]]) -> Callable[[F], F]:
    """Of a function that all ranks of a group call, one argument too many included: see errors_of_all. `of`
    says the group and the timeout, given the arguments."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            group, timeout = of(*args, **kwargs)
            if group is None or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with errors_of_all(group_name(group), timeout):
                return function(*args, **kwargs)

        return call

    return decorate


def group_size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Ranks of a ring and this process's place in it; without a group, one and 0."""
    if group is None:
        return 1, 0
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"group is a {type(group).__name__}: a torch.distributed.ProcessGroup was expected (of a DeviceMesh: "
            "mesh.get_group(...))"
        )
    if not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("group is not a process group that this process is in")
    return dist.get_world_size(group), dist.get_rank(group)


def rank_in(name: str | None) -> int:
    """This process's place in a ring, given the name of its group."""
    return 0 if name is None else dist.get_rank(dist.distributed_c10d._resolve_process_group(name))


def group_name(group: dist.ProcessGroup | None) -> str | None:
    if group is None:
        return None
    group_size_and_rank(group)
    return group.group_name


def clear_cache() -> None:
    """Drops the workspaces of all rings of this process, except those that CUDA graphs use.

    Harmless at any time, on one rank or all.
    """
    for ring in (_local, *_groups.values()):
        ring.pool.clear()


def clear_cache_of(group: dist.ProcessGroup | None) -> None:
    """As clear_cache, but of one group's ring alone; None: of those of one process."""
    name = group_name(group)
    ring = _local if name is None else _groups.get(name)
    if ring is not None:
        ring.pool.clear()


_COMPLEXITY = {
    "ring": "O(n/P): fp32 accumulators of the own rows and two slots of travelling rows",
    "gather": "O(n/P + rows needed): fp32 accumulators of the own rows and every needed row of other ranks",
}
_COMPLEXITY["auto"] = " or ".join(_COMPLEXITY.values()) + ", as the first call decides"


def cached_calls_of(group: dist.ProcessGroup | None, schedule: str) -> tuple[str, int, int]:
    """Of one group's ring: how memory grows, in words; bytes per rank of its largest call; and its cached workspaces."""
    name = group_name(group)
    ring = _local if name is None else _groups.get(name)
    infos = [] if ring is None else [e.memory_info for e in ring.pool.executors()]
    if not infos:
        return _COMPLEXITY[schedule] + "; no call yet", 0, 0
    most = max(infos, key=operator.itemgetter("workspace_bytes"))
    size = most["workspace_bytes"]
    return f"{most['complexity']}; {size} bytes per rank", size, len(infos)


def cleanup() -> None:
    """Drops all workspaces and closes the connections of all rings. CUDA graphs that were captured before must
    not be replayed any more.

    Call it before ``torch.distributed.destroy_process_group``, on every rank. Later calls of
    :func:`ring_attention` make new rings. Idempotent.
    """
    clear_cache()
    _captured.clear()
    for name in list(_groups):
        ring = _groups.pop(name, None)  # None: another thread closes it
        if ring is not None:
            ring.transport.close()


# Connections have threads of their own: they end before Python does.
atexit.register(cleanup)


def _used_share(device: str) -> float:
    free, size = torch.cuda.mem_get_info(device)
    return 1.0 - free / size


def get_memory_info() -> dict[str, object]:
    """Bytes that the rings of this process hold.

    The keys are those of :attr:`annulus.RingAttention.memory_info` and always present; bytes are sums over
    all rings, except scratch_bytes, which they share. 'device' names all devices, if there are several.
    'device_utilization' is the share of a GPU's memory that is in use, by whomever, of the fullest of these
    devices; None where no ring is on a GPU. 'recovered_workspaces' counts those that were made when memory had
    run out (see ``recover``): they go on in pieces until :func:`clear_cache`.
    """
    executors = [e for ring in (_local, *_groups.values()) for e in ring.pool.executors()]
    total: dict[str, object] = {
        "device": "cpu",
        "complexity": "none yet",
        "workspace_bytes": 0,
        "communication_bytes": 0,
        "state_bytes": 0,
        "scratch_bytes": 0,
    }
    devices: set[str] = set()
    for executor in executors:
        info = executor.memory_info
        devices.add(info["device"])
        total["complexity"] = info["complexity"]
        total["scratch_bytes"] = info["scratch_bytes"]  # one pool for all
        for name in ("workspace_bytes", "communication_bytes", "state_bytes"):
            total[name] += info[name]
    total["device"] = ", ".join(sorted(devices)) or "cpu"
    total["device_utilization"] = max(map(_used_share, devices - {"cpu"}), default=None)
    total["cached_workspaces"] = len(executors)
    total["recovered_workspaces"] = sum(e.recovery != "" for e in executors)
    return total


def _forget_after_fork() -> None:
    """A forked child has neither the threads of the executors nor a right to the connections."""
    global _local, _groups
    _local = _LocalRings()  # the lock of the old one may be held by a thread that is gone
    # Kept, never used: to end a connection is to wait for its threads, which the child does not have.
    _parents.append(_groups)
    _groups = {}
    _losses.clear()
    _turns.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
