"""Calls of ring primitives on four processes, one of which is killed, stopped or slow: ring_faults.py <call> <fault>.

A program of its own, because ranks are forked from a process that has not used PyTorch yet.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from support.process_ring import PATIENCE, Ring, free_port, join

RANKS = 4
LONG = 60.0  # seconds: a deadline that is never reached
# Of a stopped rank the others only hear nothing.
DEADLINES = {"kill": LONG, "stop": 5.0, "slow": LONG}


def once(call: str, rank: int, timeout: float) -> None:
    """One call, with a check of its result."""
    previous = (rank - 1) % RANKS
    if call == "check_ring":
        assert at.check_ring(dist.group.WORLD, timeout=timeout).ranks == RANKS
        return
    x = torch.full((50_000,), float(rank), requires_grad=True)
    if call == "ring_pass":
        found = at.ring_pass(x, dist.group.WORLD, timeout=timeout)
    else:
        found, _ = at.ring_pass_kv(x, x.detach().bool(), dist.group.WORLD, timeout=timeout)
    assert bool((found == previous).all())
    (found.sum() * rank).backward()
    assert bool((x.grad == (rank + 1) % RANKS).all())


def call_until_lost(
    rank: int, say: Callable, orders: int, port: int, call: str, timeout: float
) -> None:
    join(rank, RANKS, port)
    once(call, rank, LONG)
    say("ready")
    try:
        while True:
            once(call, rank, timeout)
    except annulus.TransportError as error:
        say("lost", rank=error.rank, text=str(error))
    time.sleep(2 * PATIENCE)  # the parent ends it: the others may not be done


def wait_for_the_slow_one(
    rank: int, say: Callable, orders: int, port: int, call: str, timeout: float
) -> None:
    """Rank 2 calls after the others have waited longer than a call takes."""
    join(rank, RANKS, port)
    once(call, rank, LONG)
    store = dist.distributed_c10d._get_default_store()
    others = [other for other in range(RANKS) if other != 2]
    if rank == 2:
        store.wait([f"waited/{other}" for other in others])
    else:
        transport = at.ring._registry._groups[dist.group.WORLD.group_name].transport

        def watch() -> None:
            while True:
                waiting = transport.waiting
                if waiting is not None and waiting[1] > 1.0:
                    break
                time.sleep(0.05)
            store.set(f"waited/{rank}", "")

        threading.Thread(target=watch, daemon=True).start()
    once(call, rank, timeout)
    once(call, rank, timeout)
    say("done")
    time.sleep(2 * PATIENCE)


def inflict(call: str, fault: str) -> str | None:
    """What is wrong with the results of the ranks; None: nothing."""
    timeout, everybody = DEADLINES[fault], list(range(RANKS))
    if fault == "slow":
        with Ring(RANKS, wait_for_the_slow_one, free_port(), call, timeout) as ring:
            done = ring.wait("done", everybody, 2 * PATIENCE)
            return None if done else f"{[rank.said for rank in ring.ranks]}"
    victim = random.randrange(RANKS)
    survivors = [rank for rank in everybody if rank != victim]
    with Ring(RANKS, call_until_lost, free_port(), call, timeout) as ring:
        if not ring.wait("ready", everybody, PATIENCE):
            return f"never began: {[rank.said for rank in ring.ranks]}"
        time.sleep(random.uniform(0.0, 0.2))  # somewhere in a call
        getattr(ring, fault)(victim)
        ring.wait("lost", survivors, timeout + PATIENCE)
        for rank in survivors:
            lost = ring.ranks[rank].last("lost")
            if lost is None or lost["rank"] != victim:
                return f"rank {rank} did not name rank {victim}: {ring.ranks[rank].said}"
    return None


if __name__ == "__main__":
    complaint = inflict(*sys.argv[1:])
    if complaint is not None:
        sys.exit(complaint)
