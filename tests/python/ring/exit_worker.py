"""One rank of test_exit.py; a ring that nobody closes must not end its process with an abort: exit_worker.py <file>

Rank 1 locks the file until it ends. Rank 0 waits for that while Python exits: its connections end when threads may not
return to Python any more.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import sys
import threading
import time

import torch
import torch.distributed as dist
from annulus.torch.ring import ProcessGroupTransport


class OutlivesTheOther:
    """Destroyed while Python exits. Then waits for the end of the other process and of the threads that wait for it."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = path.open("w")
        # Of Linux; a thread that comes back from a wait now cannot be joined.
        threads = (t.native_id for t in threading.enumerate() if "annulus" in t.name)
        self._threads = [f"/proc/self/task/{each}" for each in threads]

    # Its defaults still exist while Python exits.
    def __del__(self, flock=fcntl.flock, how=fcntl.LOCK_EX, exists=os.path.exists, sleep=time.sleep) -> None:
        flock(self._file, how)
        while any(map(exists, self._threads)):
            sleep(0.01)


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1:
        lock = path.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.lock = lock  # type: ignore[attr-defined]
    sys.transport = transport = ProcessGroupTransport()  # type: ignore[attr-defined]
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    for way, peer in (("send", 1 - rank), ("receive", 1 - rank))[:: 1 if rank == 0 else -1]:
        begin, arguments = transport.prepare(way, peer, 7, memoryview(large.numpy()))
        begin(*arguments).wait(transport.wait_limit)
    dist.destroy_process_group()
    if rank == 0:
        sys.outlives = OutlivesTheOther(path)  # type: ignore[attr-defined]
    print("rank", rank, "exits", flush=True)


if __name__ == "__main__":
    main()
