"""Rings of processes that a test can kill, stop or cut off.

Ranks are forked from a process that has loaded PyTorch but not used it yet, so a ring starts in half a second.
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
from collections.abc import Callable, Iterator

import annulus.torch as at
import torch
import torch.distributed as dist

# Messages of a step have some KB, or some 100 KB, which are mostly half transferred when a fault happens.
SIZES = {"short": (360, 2, 32), "long": (2400, 4, 64)}  # tokens, heads, head dim
PATIENCE = 180.0  # seconds; what is waited for usually takes one or two, but the machine may be busy
PATTERN = {"segment_lengths": [60, 180], "dilation_rates": [1, 3], "is_causal": True}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclasses.dataclass
class Rank:
    process: int
    reports: int  # read end of the pipe from the rank
    orders: int  # write end of the pipe to the rank
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
            with contextlib.suppress(AttributeError):  # PR_SET_PDEATHSIG: end with a parent that is killed
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            for other in self.ranks:  # only the parent keeps these ends open
                os.close(other.reports)
                os.close(other.orders)
            faulthandler.register(signal.SIGUSR1)  # prints the stack
            body(rank, say, orders, *arguments)
        except BaseException:  # noqa: BLE001 (a child must not return into the parent's code)
            with contextlib.suppress(OSError):
                say("broke", text=traceback.format_exc()[-3000:])
        os._exit(0)

    def wait(self, what: str, ranks: list[int], seconds: float) -> bool:
        """Waits until these ranks have said it. False: one of them has not in time, or has ended without it."""
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
            rank.ended = rank.ended or rank.last("finished") is not None

    def kill(self, rank: int) -> None:
        os.kill(self.ranks[rank].process, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        os.kill(self.ranks[rank].process, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        os.kill(self.ranks[rank].process, signal.SIGCONT)

    def cut(self, rank: int) -> None:
        """Ends all connections of a rank, but not the rank."""
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
    """Follows the parent's orders on a second thread, because the main thread may wait in a call."""

    def listen() -> None:
        with open(orders) as lines:
            for line in lines:
                if line == "cut\n":
                    cut_connections()

    threading.Thread(target=listen, daemon=True).start()


def connections() -> Iterator[socket.socket]:
    """The connected stream sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.getpeername():
                    yield connection


def cut_connections() -> None:
    for connection in connections():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def join(rank: int, ranks: int, port: int, seconds: float = 60.0) -> None:
    torch.set_num_threads(1)
    os.environ["ANNULUS_THREADS"] = "1"
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", limit, world_size=ranks, rank=rank)


def joined_ring(
    ranks: int, body: Callable[..., None], *arguments: object, port: int | None = None, seconds: float = 60.0
) -> Ring:
    """A ring whose ranks join a process group and then run body(rank, say, *arguments).

    A rank whose body has returned waits until the parent ends it, because other ranks may still need it.
    """
    port = free_port() if port is None else port

    def run(rank: int, say: Callable, orders: int) -> None:
        join(rank, ranks, port, seconds)
        obey(orders)
        body(rank, say, *arguments)
        say("finished")
        while True:
            signal.pause()

    return Ring(ranks, run)


def whole(size: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, *SIZES[size], generator=generator) for _ in range(4)]


def both_ways(group: dist.ProcessGroup | None, deadline: float, size: str) -> list[torch.Tensor]:
    """Forward and backward of this rank's shard; without a group, of the whole sequence."""
    *inputs, do = (at.shard(x, placement="zigzag", group=group) for x in whole(size))
    mine = [x.clone().requires_grad_() for x in inputs]
    place = {} if group is None else {"group": group, "placement": "zigzag", "timeout": deadline}
    pattern = PATTERN if size == "short" else {"is_causal": True}
    o = at.ring_attention(*mine, **pattern, **place)
    o.backward(do)
    return [o.detach()] + [x.grad for x in mine]


def expected(group: dist.ProcessGroup, size: str) -> list[torch.Tensor]:
    """This rank's shard of what one process computes."""
    return [at.shard(x, placement="zigzag", group=group) for x in both_ways(None, 0, size)]


def right(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all((f - w).norm() <= 1e-5 * w.norm() for f, w in zip(found, wanted))
