"""The ranks of test_survivors.py: reunions.py CASE... Faults that happen while the survivors of a ring meet.

Each case is a ring of processes. CASES says, by rank, which groups the rank has to get, one after the other.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from annulus.torch.faults import _places, _reunion, _survivors
from annulus.torch.ring import _registry, _standby
from support.process_ring import joined_ring

PATIENCE = 240.0  # seconds; longer means that a rank waits for one that never comes
QUICK = 120.0  # seconds for survivors(), on a busy machine whose name server does not always answer


def attend(group: dist.ProcessGroup, timeout: float = PATIENCE) -> None:
    x = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0))
    mine = at.shard(x, group=group)
    o = at.ring_attention(mine, mine, mine, group=group, timeout=timeout)
    wanted = at.shard(at.ring_attention(x, x, x), group=group)
    assert torch.allclose(o, wanted, atol=1e-5)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_the_last(rank: int, group: dist.ProcessGroup) -> None:
    last = dist.get_world_size(group) - 1
    if rank == last:
        die()
    try:
        attend(group)
    except annulus.TransportError as error:
        assert error.rank == last, error
    else:
        raise AssertionError("no loss was noticed")


def go_on(say: Callable, group: dist.ProcessGroup) -> dist.ProcessGroup:
    begin = time.monotonic()
    left = at.survivors(group)
    took = time.monotonic() - begin
    attend(left)
    say("group", ranks=dist.get_process_group_ranks(left), took=took)
    return left


def killed_when_decided(rank: int, say: Callable, group: dist.ProcessGroup, victim: int) -> None:
    """Another rank is killed when all know who is left and make the group."""
    lose_the_last(rank, group)
    if rank == victim:
        _survivors._new_group = die
    go_on(say, group)


def killed_while_meeting(rank: int, say: Callable, group: dist.ProcessGroup, victim: int) -> None:
    """Another rank is killed before all know who is left."""
    lose_the_last(rank, group)
    _reunion._GRACE = 5.0
    if rank == victim:
        threading.Timer(0.1, die).start()
    go_on(say, group)


def two_at_once(rank: int, say: Callable, group: dist.ProcessGroup) -> None:
    """Two ranks are killed. No rank needs to have noticed both losses."""
    if rank in (1, 3):
        die()
    try:
        attend(group)
    except annulus.TransportError as error:
        assert error.rank in (1, 3), error
        _registry._groups[group.group_name].transport._failed_rank = 3  # all report the same rank
    go_on(say, group)


def slandered(rank: int, say: Callable, group: dist.ProcessGroup) -> None:
    """Rank 1 has lost rank 0, which lives, because a connection was cut. All must meet at one place."""
    if rank == 1:
        transport = _registry._groups[group.group_name].transport
        with transport._lock:
            transport._end(0, "lost by rank 1: cut", "cut")
    else:
        try:
            attend(group)
        except annulus.TransportError as error:
            assert error.rank == 0, error
    _reunion._GRACE = 5.0  # all of them come
    go_on(say, group)


def another_place(rank: int, say: Callable, group: dist.ProcessGroup) -> None:
    """Rank 0 is too busy to answer the others and waits at its own store."""
    usual = _places.Place.open
    first = _standby.meeting_of(group).addresses[0]

    def busy(self: _places.Place) -> dist.Store | None:
        return None if self._address == first else usual(self)

    if rank != 0:
        time.sleep(0.5)
        _places.Place.open = busy
    go_on(say, group)


def place_of_one_who_is_here(rank: int, say: Callable, group: dist.ProcessGroup) -> None:
    """Rank 0 is too busy to answer some ranks at first. They wait at rank 1's store, and rank 1 at rank 0's."""
    usual = _places.Place.open
    first = _standby.meeting_of(group).addresses[0]
    busy_until = time.monotonic() + 1.0

    def busy(self: _places.Place) -> dist.Store | None:
        busy = self._address == first and time.monotonic() < busy_until
        return None if busy else usual(self)

    if rank > 1:
        _places.Place.open = busy
    go_on(say, group)


def twice(rank: int, say: Callable, group: dist.ProcessGroup) -> None:
    """survivors() is called with the first group both times, as callers do that always pass None."""
    lose_the_last(rank, group)
    go_on(say, group)
    if rank == 1:
        die()
    go_on(say, group)


def too_few_then_enough(rank: int, say: Callable, group: dist.ProcessGroup) -> None:
    """A rank that comes first and finds no other may come again."""
    if rank == 0:
        try:
            at.survivors(group, timeout=0.5)
        except annulus.TransportError as error:
            assert "only ranks [0] are left" in str(error), error
        else:
            raise AssertionError("a group of one out of three")
        dist.distributed_c10d._get_default_store().set("test/alone", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["test/alone"])
    go_on(say, group)


def waits_for_a_checkpoint(rank: int, say: Callable, group: dist.ProcessGroup, silent: int) -> None:
    """Rank 0 waits in the ring, another rank for a checkpoint. The error must name the `silent` rank."""
    if rank == silent:
        time.sleep(PATIENCE)
    elif rank != 0:
        checkpoints = at.Checkpoints.__new__(at.Checkpoints)
        checkpoints._pending = concurrent.futures.Future()  # as if it were being written
        threading.Timer(20, checkpoints._pending.set_result, [None]).start()
        checkpoints.wait()
    else:
        try:
            attend(group, timeout=10.0)
        except annulus.TransportError as error:
            say("group", ranks=[error.rank], took=0.0)


CASES: dict[str, tuple[Callable, int, tuple, dict[int, list[list[int]]]]] = {
    "killed_while_meeting_0": (
        killed_while_meeting,
        5,
        (0,),
        dict.fromkeys((1, 2, 3), [[1, 2, 3]]),
    ),
    "killed_when_decided_0": (killed_when_decided, 5, (0,), dict.fromkeys((1, 2, 3), [[1, 2, 3]])),
    "killed_when_decided_1": (killed_when_decided, 5, (1,), dict.fromkeys((0, 2, 3), [[0, 2, 3]])),
    "two_at_once": (two_at_once, 5, (), dict.fromkeys((0, 2, 4), [[0, 2, 4]])),
    "slandered": (slandered, 3, (), dict.fromkeys(range(3), [[0, 1, 2]])),
    "another_place": (another_place, 3, (), dict.fromkeys(range(3), [[0, 1, 2]])),
    "place_of_one_who_is_here": (
        place_of_one_who_is_here,
        4,
        (),
        dict.fromkeys(range(4), [[0, 1, 2, 3]]),
    ),
    "twice": (twice, 5, (), dict.fromkeys((0, 2, 3), [[0, 1, 2, 3], [0, 2, 3]])),
    "too_few_then_enough": (too_few_then_enough, 3, (), dict.fromkeys(range(3), [[0, 1, 2]])),
    "waits_for_a_checkpoint_1": (waits_for_a_checkpoint, 3, (1,), {0: [[1]]}),
    "waits_for_a_checkpoint_2": (waits_for_a_checkpoint, 3, (2,), {0: [[2]]}),
}


def run(name: str) -> bool:
    body, ranks, arguments, wanted = CASES[name]

    def be(rank: int, say: Callable) -> None:
        attend(dist.group.WORLD)
        body(rank, say, dist.group.WORLD, *arguments)
        say("done")

    with joined_ring(ranks, be, seconds=PATIENCE) as ring:
        ring.wait("done", list(wanted), 3 * PATIENCE)
        good = True
        for rank, groups in wanted.items():
            said = [line for line in ring.ranks[rank].said if line["what"] == "group"]
            slow = [line for line in said if line["took"] > QUICK]
            if (
                [line["ranks"] for line in said] != groups
                or slow
                or not ring.ranks[rank].last("done")
            ):
                print(
                    f"{name}: rank {rank} of {ranks}: {groups} were expected: {ring.ranks[rank].said}"
                )
                good = False
    return good


if __name__ == "__main__":
    results = [run(name) for name in sys.argv[1:] or CASES]
    print(f"{sum(results)} of {len(results)} reunions went well")
    sys.exit(0 if all(results) else 1)
