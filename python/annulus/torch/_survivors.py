"""Life after a loss: the ranks that are left of a group agree on who they are and go on as a new one."""

from __future__ import annotations

import datetime
import json
import time
import uuid

import torch.distributed as dist

from annulus import ConfigError, TransportError
from annulus.torch import _rings, _standby
from annulus.torch._rendezvous import within
from annulus.torch._transport import timeout_of

# When all are there but those that somebody has lost: they may be on their way all the same. Seconds.
_GRACE = 0.2


def survivors(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
    least: int | None = None,
) -> dist.ProcessGroup:
    """A new group of the ranks that are left of one that has lost some.

    Collective over those that are left: each calls it when a call on the group has raised a
    :class:`annulus.TransportError`. They meet at a store which one of them serves (every process that has been in a
    ring serves one), so that the loss of the process that served the group's own is a loss like any other. The group that
    was is of no further use; its ring is closed, and no message of it can reach the new one, which has its own connections.

    Returns a process group with the ranks in the order they had. Pass it as ``group`` from now on; the next call
    plans for it. Rows that only a lost rank had are lost: see :func:`shard` for those that every rank can make again.

    Args:
        group: the ranks as they were; None: all of them.
        timeout: seconds that the others may take to come, and the new group's own; None: that of `group`. It is
            waited for only if ranks are missing that nobody has reported as lost.
        least: fewest ranks to go on with. None: more than half of the group, so that the parts of a network that
            was cut in two do not both go on.

    Raises:
        TransportError: there are fewer than `least`, or the others have gone on without this rank.
    """
    whole = dist.group.WORLD if group is None else group
    size, me = _rings.group_size_and_rank(whole)
    if least is None:
        least = size // 2 + 1
    if not isinstance(least, int) or not 1 <= least <= size:
        raise ConfigError(f"survivors: least is {least!r}: a number from 1 to {size} was expected")
    seconds = timeout_of(whole) if timeout is None else timeout
    until = time.monotonic() + seconds
    meeting, lost = _standby.meeting_of(whole), _rings.leave(whole)
    for store in _standby.places(whole, meeting, me, last=lost == me):
        prefixed = dist.PrefixStore(f"annulus/survivors/{meeting.name}", store)
        try:
            left, name = within(
                max(0.0, until - time.monotonic()) + 1,
                lambda: _agree(prefixed, me, size, lost, least, until),  # noqa: B023: run at once
                "agreeing on who is left",
            )
        except (RuntimeError, TimeoutError):  # who served this store is gone, too
            continue
        here = f"[rank {me}/{size}] survivors"
        if me not in left:
            raise _error(f"{here}: the others have gone on without this rank, as {left}", me)
        if len(left) < least:
            raise _error(f"{here}: only ranks {left} are left, fewer than {least}", lost)
        return _new_group(whole, left, name, prefixed, seconds)
    raise _error(f"[rank {me}/{size}] survivors: nobody can be met", lost)


def _error(text: str, rank: int) -> TransportError:
    error = TransportError(text)
    error.rank = rank
    return error


def _agree(
    store: dist.Store, me: int, size: int, lost: int, least: int, until: float
) -> tuple[list[int], str]:
    """Who is left, and the name of their group: what the first to see everybody there says."""
    store.set(f"here/{me}", str(lost))
    missed = {lost}
    present = {me}
    since = None
    while not store.check(["decision"]):
        for peer in set(range(size)) - present:
            if store.check([f"here/{peer}"]):
                present.add(peer)
                missed.add(int(store.get(f"here/{peer}")))
        now = time.monotonic()
        if since is None and present >= set(range(size)) - missed:
            since = now
        complete = len(present) == size or (since is not None and now >= since + _GRACE)
        if now >= until and len(present) < least:
            store.delete_key(f"here/{me}")
            return sorted(present), ""
        if complete or now >= until:
            decision = json.dumps([sorted(present), uuid.uuid4().hex])
            store.compare_set("decision", "", decision)
            break
        time.sleep(0.005)
    left, name = json.loads(store.get("decision"))
    return left, name


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
