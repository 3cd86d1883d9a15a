"""Rings of processes that lose a rank, which is killed, stopped or cut off.

Every rank computes forward and backward over the group until a call fails. It then reports when that was and which rank
the error names, continues with the survivors, and reports whether the next results are right. `test_faults.py` runs a few
rings. To run more:

    PYTHONPATH=tests/python python tests/python/faults/kill_ranks.py --kill 200 --stop 10 --cut 20
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator

import annulus
import annulus.torch as at
import torch.distributed as dist
from support.process_ring import PATIENCE, SIZES, both_ways, expected, joined_ring, right


def compute_until_lost(rank: int, say: Callable, deadline: float, size: str) -> None:
    """Computes until a rank is lost, then with the survivors."""
    group = dist.group.WORLD
    wanted = expected(group, size)
    both_ways(group, 60.0, size)
    say("ready")
    passes = 0
    begin = 0.0
    try:
        while True:
            begin = time.monotonic()
            found = both_ways(group, deadline, size)
            passes += 1
            if not right(found, wanted):
                say("wrong", passes=passes)
    except annulus.TransportError as error:
        took = time.monotonic() - begin
        say("lost", rank=error.rank, text=str(error), passes=passes, took=took)
    try:
        left = at.survivors(group, timeout=30.0)
    except annulus.TransportError as error:
        say("alone", rank=error.rank, text=str(error))
        return
    say("reformed", left=dist.get_process_group_ranks(left))
    wanted = expected(left, size)
    correct = all(right(both_ways(left, 60.0, size), wanted) for _ in range(3))
    say("result", right=correct)


# ---- faults


@dataclasses.dataclass
class Outcome:
    """The outcome of one fault."""

    fault: str
    ranks: int
    victim: int
    raised: dict[int, float]  # seconds until a survivor's call raised, by rank
    named: dict[int, int]  # the rank that its error named
    reformed: float | None  # seconds until all survivors had a new group; None: they got none
    right: bool  # the next results
    complaints: list[str] = dataclasses.field(default_factory=list)
    # Ranks that may be named. A cut connection has two ends, and both ranks live.
    suspects: set[int] = dataclasses.field(default_factory=set)

    @property
    def good(self) -> bool:
        return len(self.raised) == self.ranks - 1 and self.right and not self.complaints


def inflict(fault: str, ranks: int, deadline: float, size: str, choose: random.Random) -> Outcome:
    """One ring, one fault at a random moment of forward or backward."""
    victim = choose.randrange(ranks)
    survivors = [rank for rank in range(ranks) if rank != victim]
    outcome = Outcome(fault, ranks, victim, {}, {}, None, False, suspects={victim})
    with joined_ring(ranks, compute_until_lost, deadline, size) as ring:
        if not ring.wait("ready", list(range(ranks)), PATIENCE):
            outcome.complaints.append(f"never began: {[r.said for r in ring.ranks]}")
            return outcome
        time.sleep(choose.uniform(0.0, 0.2))
        begin = time.monotonic()
        getattr(ring, fault)(victim)
        ring.wait("lost", survivors, deadline + PATIENCE)
        ring.wait("result", survivors, PATIENCE)
        if fault == "stop":
            # It comes back and must learn that the others have continued without it.
            ring.resume(victim)
            if not ring.wait("alone", [victim], deadline + PATIENCE):
                outcome.complaints.append(f"the victim goes on: {ring.ranks[victim].said}")
        if fault == "cut" and ring.ranks[victim].last("lost"):
            outcome.suspects.add(ring.ranks[victim].last("lost")["rank"])
        for rank in survivors:
            lost = ring.ranks[rank].last("lost")
            if lost is not None:
                outcome.raised[rank] = lost["at"] - begin
                outcome.named[rank] = lost["rank"]
                if lost["rank"] not in outcome.suspects:
                    outcome.complaints.append(f"rank {rank} named {lost['rank']}: {lost['text']}")
            for what in ("broke", "wrong", "alone"):
                if ring.ranks[rank].last(what):
                    outcome.complaints.append(f"rank {rank}: {ring.ranks[rank].last(what)}")
        results = [ring.ranks[rank].last("result") for rank in survivors]
        groups = [ring.ranks[rank].last("reformed") for rank in survivors]
        # A rank that was cut off lives and may rejoin in time.
        whole = [survivors] + ([list(range(ranks))] if fault == "cut" else [])
        if all(groups) and groups[0]["left"] in whole and all(g["left"] == groups[0]["left"] for g in groups):
            outcome.reformed = max(g["at"] for g in groups) - begin
        outcome.right = outcome.reformed is not None and all(r and r["right"] for r in results)
    return outcome


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def table(outcomes: list[Outcome], out: Callable[[str], None] = print) -> None:
    out(
        f"{'fault':6} {'rings':>5} {'survivors':>9} {'raised':>6} {'named right':>11} {'median s':>9} {'p99 s':>7} "
        f"{'max s':>7} {'re-formed':>9} {'right':>5} {'re-formed after, median s':>25}"
    )
    for fault in dict.fromkeys(o.fault for o in outcomes):
        these = [o for o in outcomes if o.fault == fault]
        times = [t for o in these for t in o.raised.values()]
        named = sum(n in o.suspects for o in these for n in o.named.values())
        again = [o.reformed for o in these if o.reformed is not None]
        out(
            f"{fault:6} {len(these):5} {sum(o.ranks - 1 for o in these):9} {len(times):6} {named:11} "
            f"{quantile(times, 0.5):9.3f} {quantile(times, 0.99):7.3f} {max(times, default=0):7.3f} "
            f"{len(again):9} {sum(o.right for o in these):5} {quantile(again, 0.5):25.3f}"
        )


def faults(
    counts: dict[str, int], ranks: list[int], sizes: list[str], deadline: float, seed: int
) -> Iterator[Outcome]:
    choose = random.Random(seed)
    for fault, count in counts.items():
        for number in range(count):
            size = sizes[number // len(ranks) % len(sizes)]
            yield inflict(fault, ranks[number % len(ranks)], deadline, size, choose)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for fault in ("kill", "stop", "cut"):
        parser.add_argument(f"--{fault}", type=int, default=0, metavar="RINGS")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--deadline", type=float, default=4.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts = {fault: getattr(options, fault) for fault in ("kill", "stop", "cut")}
    outcomes = []
    for outcome in faults(counts, options.ranks, options.sizes, options.deadline, options.seed):
        outcomes.append(outcome)
        for complaint in outcome.complaints:
            print(f"{outcome.fault} {len(outcomes)}: rank {outcome.victim} of {outcome.ranks}: {complaint}", flush=True)
    table(outcomes)
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
