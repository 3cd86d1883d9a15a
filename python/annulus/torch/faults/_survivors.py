"""survivors: a new process group of the ranks that are left after a loss."""

from __future__ import annotations

import datetime
import weakref

import torch.distributed as dist

from annulus import ConfigError, TransportError
from annulus.torch.faults._places import places
from annulus.torch.faults._reunion import Reunion
from annulus.torch.ring import _registry, _standby
from annulus.torch.ring._process_groups import group_size_and_rank
from annulus.torch.ring._transport import timeout_of

# How many groups of survivors this rank has made from a group. Ranks with the same count meet.
_epochs: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def survivors(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
    least: int | None = None,
) -> dist.ProcessGroup:
    """A new process group of the remaining ranks of a group that has lost some.

    Collective over the remaining ranks: each calls it when a call on the group has raised a
    :class:`annulus.TransportError`. They meet at a store that one of them serves; every process that has been in a ring
    serves one. So the process that served the group's own store may be lost, too. If another rank is lost while they
    meet, they start again. The old group cannot be used any more: its ring is closed, and its messages cannot reach the
    new group, which has new connections.

    Returns a process group with the ranks in the old order. Pass it as ``group`` from now on; the next call plans for
    it. Rows that only a lost rank had are lost. See :func:`shard` for data that every rank can make again. A second
    call with the old group makes another group, of the ranks that remain then.

    Args:
        group: the old group; None: all ranks.
        timeout: seconds to wait for the other ranks, and the timeout of the new group; None: that of `group`. Ranks
            that were reported as lost, or whose processes have ended, are not waited for.
        least: fewest ranks to continue with. None: more than half of the group, so that the two parts of a divided
            network do not both continue.

    Raises:
        TransportError: fewer than `least` ranks remain, or the other ranks have continued without this one.
    """
    whole = dist.group.WORLD if group is None else group
    size, me = group_size_and_rank(whole)
    if least is None:
        least = size // 2 + 1
    if type(least) is not int or not 1 <= least <= size:
        raise ConfigError(f"survivors: least is {least!r}, expected a whole number from 1 to {size}")
    if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout < 1e9):
        raise ConfigError(f"survivors: timeout is {timeout!r}, expected seconds above 0, or None")
    seconds = timeout_of(whole) if timeout is None else timeout
    meeting, lost = _standby.meeting_of(whole), _registry.leave(whole)
    epoch = _epochs.get(whole, 0)

    def make(left: list[int], name: str, store: dist.Store) -> dist.ProcessGroup:
        if meeting.addresses:  # otherwise this is the group's own store
            store.set_timeout(datetime.timedelta(seconds=seconds))
        made = _new_group(whole, left, name, store, seconds)
        addresses = [meeting.addresses[rank] for rank in left] if meeting.addresses else []
        _standby.meet(made, _standby.Meeting(name, addresses))
        return made

    reunion = Reunion(me, size, lost, least, seconds, places(whole, meeting), make)
    made = reunion.hold(f"annulus/survivors/{meeting.name}/{epoch}")
    if isinstance(made, str):
        error = TransportError(f"[rank {me}/{size}] survivors: {made}")
        error.rank = reunion.at_fault
        raise error
    _epochs[whole] = epoch + 1
    return made


def _new_group(
    whole: dist.ProcessGroup, left: list[int], name: str, store: dist.Store, seconds: float
) -> dist.ProcessGroup:
    every = dist.get_process_group_ranks(whole)
    ranks = [every[rank] for rank in left]
    c10d = dist.distributed_c10d
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d._world.pg_map[whole][0],
        store,
        f"annulus_{name}",
        timeout=datetime.timedelta(seconds=seconds),
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made
