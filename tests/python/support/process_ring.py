"""Rings of processes that a test can order about, and kill, stop or cut off.

Ranks are forked from a process that has PyTorch loaded and has not used it yet: a ring then costs half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import annulus.torch as at
import torch
import torch.distributed as dist

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
