"""Executors behind the operators: who runs a configuration, and where executors are kept."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import json
import math
import operator
import os
import threading
from typing import NoReturn

import torch
import torch.distributed as dist

import annulus
from annulus import ConfigError, Pattern, Placement, RingAttention
from annulus.torch._transport import ProcessGroupTransport, timeout_of

# Workspaces kept per ring; the least recently used one is dropped first.
CAPACITY = 20
_NO_LIMIT = 2**62
_TAG_LENGTHS = 100  # the executors' own tags are below
_REFUSED = -1  # instead of a number of tokens: this rank cannot make the call


_NAMES = {
    "pattern": ("dense", "longnet", "head_groups"),
    "offsets": ("blocked", "interleaved"),
    "mix_gradient": ("full", "detached"),
    "placement": ("contiguous", "zigzag", "striped", "hilbert"),
    "schedule": ("auto", "ring", "gather"),
}


def _is_whole(x: object) -> bool:
    try:
        operator.index(x)
    except TypeError:
        return False
    return not isinstance(x, bool)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about a call that is not a tensor. Travels through operators as its JSON text, which says
    it all: a compiled graph that holds it may be loaded by another process."""

    pattern: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool
    offsets: str
    mix_gradient: str
    group_scale: bool
    scale: float | None
    group: str | None  # name of the process group; None: this process alone
    placement: str
    n_global: int | None
    schedule: str
    reproducible: bool
    backward: bool
    min_tokens_for_ring: int
    max_communication_bytes: int
    timeout: float | None

    def complaint(self) -> str | None:
        """What is wrong with it that no tensor is needed to see."""
        for name, names in _NAMES.items():
            value = getattr(self, name)
            if value not in names:
                return f"{name} is {value!r}: one of {', '.join(map(repr, names))} was expected"
        for name in ("is_causal", "group_scale", "reproducible"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                return f"{name} is {value!r}: True or False was expected"
        plain = self.pattern == "dense"
        if len(self.segment_lengths) != len(self.dilation_rates):
            return (
                f"there are {len(self.segment_lengths)} segment_lengths and {len(self.dilation_rates)} "
                "dilation_rates: one of each per branch was expected"
            )
        if plain == bool(self.segment_lengths) or (plain and self.group_scale):
            return (
                "pattern 'dense' has no segment_lengths, dilation_rates or group_scale, the others need "
                "segment_lengths and dilation_rates"
            )
        if self.offsets != "blocked" and self.pattern != "longnet":
            return f"offsets is {self.offsets!r}, which means something for pattern 'longnet' only"
        for name in ("segment_lengths", "dilation_rates"):
            values = getattr(self, name)
            if not all(_is_whole(x) and x > 0 for x in values):
                return f"{name} is {list(values)}: positive whole numbers were expected"
        for name in ("n_global", "min_tokens_for_ring", "max_communication_bytes"):
            value = getattr(self, name)
            if not (_is_whole(value) and value >= 0 or name == "n_global" and value is None):
                return f"{name} is {value!r}: a whole number was expected"
        for name in ("scale", "timeout"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                fine = math.isfinite(value) and (name == "scale" or value > 0)
            except TypeError:
                fine = False
            if not fine:
                return f"{name} is {value!r}: a finite{' positive' * (name == 'timeout')} number was expected"
        return None

    def text(self) -> str:
        # Numbers of NumPy's and tensors of one element are fine, too.
        return json.dumps(dataclasses.astuple(self), default=lambda x: x.item())


_configs: dict[str, Config] = {}


def config_of(text: str) -> Config:
    config = _configs.get(text)
    if config is None:
        if len(_configs) >= 1000:
            _configs.clear()
        config = Config(*(tuple(x) if isinstance(x, list) else x for x in json.loads(text)))
        _configs[text] = config
    return config


def pattern_of(config: Config, heads: int) -> Pattern:
    """The pattern of a configuration for this many query heads."""
    if config.pattern == "dense":
        return Pattern.dense(heads, causal=config.is_causal)
    if config.pattern == "head_groups":
        return Pattern.head_groups(
            heads,
            config.segment_lengths,
            config.dilation_rates,
            causal=config.is_causal,
            group_scale=config.group_scale,
        )
    return Pattern.longnet(
        heads,
        config.segment_lengths,
        config.dilation_rates,
        causal=config.is_causal,
        offsets=config.offsets,
        group_scale=config.group_scale,
    )


def placement_of_lengths(name: str, lengths: list[int]) -> Placement:
    """The placement of these numbers of tokens per rank. Contiguous shards may have any lengths."""
    tokens = sum(lengths)
    placement = Placement.named(name, tokens, len(lengths))
    if all(placement.local_tokens(r) == n for r, n in enumerate(lengths)):
        return placement
    if name != "contiguous":
        expected = [placement.local_tokens(r) for r in range(len(lengths))]
        raise ConfigError(
            f"the ranks hold {lengths} tokens, but placement {name!r} of {tokens} tokens gives them "
            f"{expected}: make the shards with annulus.torch.shard"
        )
    ranges, first = [], 0
    for n in lengths:
        ranges.append([range(first, first + n)] if n > 0 else [])
        first += n
    return Placement.explicit(tokens, ranges)


def _shape_key(text: str, q: torch.Tensor, k: torch.Tensor) -> tuple:
    return text, tuple(q.shape), k.shape[2], q.dtype


def _make_executor(
    config: Config,
    pattern: Pattern,
    placement: Placement,
    transport: annulus.Transport,
    q: torch.Tensor,
    k: torch.Tensor,
) -> RingAttention:
    return RingAttention(
        pattern,
        placement,
        transport=transport,
        batch=q.shape[0],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        scale=config.scale,
        mix_gradient=config.mix_gradient,
        schedule=config.schedule,
        reproducible=config.reproducible,
        backward=config.backward,
        min_tokens_for_ring=config.min_tokens_for_ring,
        max_communication_bytes=config.max_communication_bytes,
        # They exist already: there is nothing to protect them from.
        max_qkv_elements=_NO_LIMIT,
    )


class _Lease:
    """An executor for the length of a `with` block; other threads get others."""

    def __init__(self, ring: _LocalRings, key: tuple, executor: RingAttention):
        self._ring = ring
        self._key = key
        self._executor = executor

    def __enter__(self) -> RingAttention:
        return self._executor

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._ring.give_back(self._key, self._executor, kind is None)


class _LocalRings:
    """Rings of one rank. Threads may call at once: each takes an executor of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: collections.OrderedDict[tuple, list[RingAttention]] = collections.OrderedDict()

    def take(self, text: str, q: torch.Tensor, k: torch.Tensor) -> _Lease:
        key = _shape_key(text, q, k)
        with self._lock:
            free = self._free.get(key)
            executor = free.pop() if free else None
        if executor is None:
            config = config_of(text)
            if config.n_global not in (None, q.shape[1]):
                raise ConfigError(
                    f"n_global is {config.n_global}, but q has {q.shape[1]} tokens and there is no group"
                )
            transport = annulus.make_in_process_ring(1)[0]
            placement = Placement.named(config.placement, q.shape[1], 1)
            executor = _make_executor(
                config, pattern_of(config, q.shape[2]), placement, transport, q, k
            )
        return _Lease(self, key, executor)

    def give_back(self, key: tuple, executor: RingAttention, healthy: bool) -> None:
        if not healthy:  # its transport may be dead
            return
        with self._lock:
            self._free.setdefault(key, []).append(executor)
            self._free.move_to_end(key)
            while sum(map(len, self._free.values())) > CAPACITY:
                oldest = next(iter(self._free))
                self._free[oldest].pop()
                if not self._free[oldest]:
                    del self._free[oldest]

    def clear(self) -> None:
        with self._lock:
            self._free.clear()

    def executors(self) -> list[RingAttention]:
        with self._lock:
            return [e for free in self._free.values() for e in free]


class _GroupRing:
    """The ring over one process group. Every rank calls in the same order, so that all keep and drop
    the same executors."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None):
        self.process_group = group
        self.transport = ProcessGroupTransport(group, timeout)
        self._usual_deadline = timeout_of(group)
        self._executors: collections.OrderedDict[tuple, RingAttention] = collections.OrderedDict()

    def lengths(self, tokens: int) -> list[int]:
        """How many tokens every rank holds. Collective. Point to point, so that an error names a rank."""
        rank, size = self.transport.rank(), self.transport.size()
        mine = tokens.to_bytes(8, "little", signed=True)
        theirs = {peer: bytearray(8) for peer in range(size) if peer != rank}
        transfers = [
            self.transport.receive(peer, _TAG_LENGTHS, memoryview(buffer))
            for peer, buffer in theirs.items()
        ]
        transfers += [self.transport.send(peer, _TAG_LENGTHS, memoryview(mine)) for peer in theirs]
        for transfer in transfers:
            transfer.wait()
        theirs[rank] = mine
        lengths = [int.from_bytes(theirs[peer], "little", signed=True) for peer in range(size)]
        if _REFUSED in lengths and tokens != _REFUSED:
            RingAttention.refuse(self.transport, "")  # to hear the reason
        return lengths

    def refuse(self, reason: str, timeout: float | None, tells_lengths: bool) -> NoReturn:
        """Takes part in a call that this rank cannot make, so that it is a ConfigError on every rank."""
        self.transport.set_deadline(self._usual_deadline if timeout is None else timeout)
        if tells_lengths:
            self.lengths(_REFUSED)
        RingAttention.refuse(self.transport, reason)

    def take(
        self, text: str, q: torch.Tensor, k: torch.Tensor
    ) -> contextlib.AbstractContextManager[RingAttention]:
        config = config_of(text)
        self.transport.set_deadline(
            self._usual_deadline if config.timeout is None else config.timeout
        )
        lengths = tuple(self.lengths(q.shape[1])) if config.n_global is None else None
        key = (*_shape_key(text, q, k), lengths)
        executor = self._executors.get(key)
        if executor is None:
            try:
                placement = (
                    Placement.named(config.placement, config.n_global, self.transport.size())
                    if lengths is None
                    else placement_of_lengths(config.placement, list(lengths))
                )
                pattern = pattern_of(config, q.shape[2])
            except ConfigError as error:
                RingAttention.refuse(self.transport, str(error))
            executor = _make_executor(config, pattern, placement, self.transport, q, k)
            self._executors[key] = executor
            if len(self._executors) > CAPACITY:
                self._executors.popitem(last=False)
        self._executors.move_to_end(key)
        return contextlib.nullcontext(executor)

    def clear(self) -> None:
        self._executors.clear()

    def executors(self) -> list[RingAttention]:
        return list(self._executors.values())


_local = _LocalRings()
_groups: dict[str, _GroupRing] = {}


def ring_of(config: Config) -> _LocalRings | _GroupRing:
    """The ring that runs a configuration, made on first use."""
    return _local if config.group is None else _group_ring(config.group, config.timeout)


def _group_ring(name: str, timeout: float | None) -> _GroupRing:
    ring = _groups.get(name)
    group = dist.distributed_c10d._resolve_process_group(name)
    # A ConfigError leaves a ring as it was, a broken one is made anew. Names are given again once all groups
    # have been destroyed.
    if ring is None or ring.transport.failed or ring.process_group is not group:
        if ring is not None:
            del _groups[name]
            ring.transport.close()
        ring = _groups[name] = _GroupRing(group, timeout)
    return ring


def refuse(
    group: dist.ProcessGroup | None, n_global: object, timeout: object, error: ConfigError
) -> NoReturn:
    """Raises the error, on the other ranks of the group, too."""
    if group is not None:
        limit = timeout if isinstance(timeout, (int, float)) and timeout > 0 else None
        _group_ring(group.group_name, limit).refuse(str(error), limit, n_global is None)
    raise error


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


def group_name(group: dist.ProcessGroup | None) -> str | None:
    group_size_and_rank(group)
    return None if group is None else group.group_name


def clear_cache() -> None:
    """Drops the workspaces of all rings of this process.

    Harmless at any time between calls; with a process group, every rank does it or none.
    """
    _local.clear()
    for ring in _groups.values():
        ring.clear()


def cleanup() -> None:
    """Drops all workspaces and closes the connections of all rings.

    Call it before ``torch.distributed.destroy_process_group``, on every rank. Later calls of
    :func:`ring_attention` make new rings. Idempotent.
    """
    clear_cache()
    while _groups:
        _groups.popitem()[1].transport.close()


# Connections have threads of their own: they end before Python does.
atexit.register(cleanup)


def get_memory_info() -> dict[str, object]:
    """Bytes that the rings of this process hold.

    The keys are those of :attr:`annulus.RingAttention.memory_info` and always present; bytes are sums over
    all rings, except scratch_bytes, which they share.
    """
    executors = _local.executors() + [e for ring in _groups.values() for e in ring.executors()]
    total: dict[str, object] = {
        "complexity": "none yet",
        "workspace_bytes": 0,
        "communication_bytes": 0,
        "state_bytes": 0,
        "scratch_bytes": 0,
        "device_utilization": -1.0,
    }
    for executor in executors:
        info = executor.memory_info
        total["complexity"] = info["complexity"]
        total["scratch_bytes"] = info["scratch_bytes"]  # one pool for all
        for name in ("workspace_bytes", "communication_bytes", "state_bytes"):
            total[name] += info[name]
    total["cached_workspaces"] = len(executors)
    return total


def _forget_after_fork() -> None:
    """A forked child has neither the threads of the executors nor a right to the connections."""
    global _local
    _local = _LocalRings()  # the lock of the old one may be held by a thread that is gone
    _groups.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
