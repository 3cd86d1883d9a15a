"""Rings of processes, and what can happen to them: kill, stop, cut off.

Ranks are forked from a process that has PyTorch loaded and has not used it yet: a ring costs half a second. Every rank
computes forward and backward over the group until a call fails, says which rank it names and when, goes on with the
survivors, and says whether what it computes then is right. `test_torch_faults.py` runs a few, this file as a program as
many as asked for:

    python tests/python/faults.py --kill 200 --stop 10 --cut 20
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import json
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import annulus
import annulus.torch as at

# Messages of a step: some KB, or some 100 KB, most of which are half through when something happens.
SIZES = {"short": (360, 2, 32), "long": (2400, 4, 64)}  # tokens, heads, head dim
PATIENCE = 180.0  # seconds for what takes one or two: the machine may be busy
PATTERN = {"segment_lengths": [60, 180], "dilation_rates": [1, 3], "is_causal": True}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclasses.dataclass
class Rank:
    process: int
    reports: int  # end of the pipe by which it tells
    orders: int  # and by which it is told
    said: list[dict] = dataclasses.field(default_factory=list)
    ended: bool = False
    rest: bytes = b""

    def last(self, what: str) -> dict | None:
        return next((line for line in reversed(self.said) if line["what"] == what), None)


class Ring:
    """Ranks that run body(rank, say, orders) in processes of their own."""

    def __init__(self, ranks: int, body: Callable[..., None], *arguments: object):
        self.ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        sys.stdout.flush()
        for rank in range(ranks):
            reports, orders = os.pipe(), os.pipe()
            process = os.fork()
            if process == 0:
                self._child(rank, body, arguments, reports[1], orders[0])
            os.close(reports[1])
            os.close(orders[0])
            self.ranks.append(Rank(process, reports[0], orders[1]))
            self._selector.register(reports[0], selectors.EVENT_READ, rank)

    def _child(self, rank: int, body: Callable, arguments: tuple, reports: int, orders: int) -> None:
        def say(what: str, **more: object) -> None:
            line = {"what": what, "at": time.monotonic(), **more}
            os.write(reports, json.dumps(line).encode() + b"\n")

        try:
            with contextlib.suppress(AttributeError):  # PR_SET_PDEATHSIG: not to outlive a parent that is killed
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            for other in self.ranks:  # whose ends only the parent is to have
                os.close(other.reports)
                os.close(other.orders)
            faulthandler.register(signal.SIGUSR1)  # says where it is
            body(rank, say, orders, *arguments)
        except BaseException:  # noqa: BLE001: a child does not go on where its parent was
            with contextlib.suppress(OSError):
                say("broke", text=traceback.format_exc()[-3000:])
        os._exit(0)

    def wait(self, what: str, ranks: list[int], seconds: float) -> bool:
        """Until these ranks have said it; False: not in time, or one has ended before."""
        until = time.monotonic() + seconds
        while not all(self.ranks[rank].last(what) for rank in ranks):
            left = until - time.monotonic()
            if left <= 0 or any(self.ranks[r].ended and not self.ranks[r].last(what) for r in ranks):
                return False
            self._read(left)
        return True

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            rank = self.ranks[key.data]
            data = os.read(rank.reports, 65536)
            if not data:
                rank.ended = True
                self._selector.unregister(rank.reports)
            *lines, rank.rest = (rank.rest + data).split(b"\n")
            rank.said += [json.loads(line) for line in lines]

    def kill(self, rank: int) -> None:
        os.kill(self.ranks[rank].process, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        os.kill(self.ranks[rank].process, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        os.kill(self.ranks[rank].process, signal.SIGCONT)

    def cut(self, rank: int) -> None:
        """Ends all its connections; it lives."""
        os.write(self.ranks[rank].orders, b"cut\n")

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process, signal.SIGKILL)
            os.waitpid(rank.process, 0)
            os.close(rank.reports)
            os.close(rank.orders)
        self._selector.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- what ranks do


def obey(orders: int) -> None:
    """Does what the parent says, on a thread of its own: the main one may wait in a call."""

    def listen() -> None:
        with open(orders) as lines:
            for line in lines:
                if line == "cut\n":
                    cut_connections()

    threading.Thread(target=listen, daemon=True).start()


def cut_connections() -> None:
    connections = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            connection = socket.socket(fileno=os.dup(int(name)))
            connection.getpeername()  # an error of those that listen
            connections.append(connection)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


def join(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["ANNULUS_THREADS"] = "1"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", limit, world_size=ranks, rank=rank
    )


def whole(size: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, *SIZES[size], generator=generator) for _ in range(4)]


def both_ways(group: dist.ProcessGroup | None, deadline: float, size: str) -> list[torch.Tensor]:
    """Forward and backward of this rank's part; without a group, of all of it."""
    *inputs, do = (at.shard(x, placement="zigzag", group=group) for x in whole(size))
    mine = [x.clone().requires_grad_() for x in inputs]
    place = {} if group is None else {"group": group, "placement": "zigzag", "timeout": deadline}
    pattern = PATTERN if size == "short" else {"is_causal": True}
    o = at.ring_attention(*mine, **pattern, **place)
    o.backward(do)
    return [o.detach()] + [x.grad for x in mine]


def expected(group: dist.ProcessGroup, size: str) -> list[torch.Tensor]:
    """This rank's part of what one process alone computes."""
    return [at.shard(x, placement="zigzag", group=group) for x in both_ways(None, 0, size)]


def right(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all((f - w).norm() <= 1e-5 * w.norm() for f, w in zip(found, wanted))


def compute_until_lost(
    rank: int, say: Callable, orders: int, ranks: int, port: int, deadline: float, size: str
) -> None:
    """Then go on with those that are left."""
    join(rank, ranks, port)
    obey(orders)
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
    time.sleep(2 * PATIENCE)  # the parent ends it: the others may not be done


# ---- what happens to them


@dataclasses.dataclass
class Outcome:
    """Of one fault."""

    fault: str
    ranks: int
    victim: int
    raised: dict[int, float]  # seconds until a survivor's call raised, by rank
    named: dict[int, int]  # whom it named
    reformed: float | None  # seconds until all survivors had a new group; None: they did not
    right: bool  # the next results
    complaints: list[str] = dataclasses.field(default_factory=list)
    # Who may be named: of a cut connection between two that live, both ends.
    suspects: set[int] = dataclasses.field(default_factory=set)

    @property
    def good(self) -> bool:
        return len(self.raised) == self.ranks - 1 and self.right and not self.complaints


def inflict(fault: str, ranks: int, deadline: float, size: str, choose: random.Random) -> Outcome:
    """One ring, one fault at a random moment of forward or backward."""
    victim = choose.randrange(ranks)
    survivors = [rank for rank in range(ranks) if rank != victim]
    outcome = Outcome(fault, ranks, victim, {}, {}, None, False, suspects={victim})
    with Ring(ranks, compute_until_lost, ranks, free_port(), deadline, size) as ring:
        if not ring.wait("ready", list(range(ranks)), PATIENCE):
            outcome.complaints.append(f"never began: {[r.said for r in ring.ranks]}")
            return outcome
        time.sleep(choose.uniform(0.0, 0.2))
        begin = time.monotonic()
        getattr(ring, fault)(victim)
        ring.wait("lost", survivors, deadline + PATIENCE)
        ring.wait("result", survivors, PATIENCE)
        if fault == "stop":
            # It comes back: nobody waits for it, and it learns so.
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
        # One that was cut off lives and may be back in time.
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
