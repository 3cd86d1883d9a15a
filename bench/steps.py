"""Measures the cost of a ring step over torch.distributed:  python bench/steps.py

In a step, every rank sends to the next rank and receives from the one before. Three ways take turns: bare Gloo called from
Python with prepared tensors, the fastest way to use Gloo from Python; the transport of annulus.torch; and a transport that calls
Python for every message, as annulus.torch once did. The library drives the last two: a pass over one token per rank is the
agreement of the ranks and one step for each other rank.

Records medians over rounds, in microseconds per step: wall time, CPU time of the whole process (with Gloo's own thread), and CPU
time of the calling thread, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import socket
import statistics
import sys
import time

import annulus
import torch
import torch.distributed as dist
from annulus.torch import ProcessGroupTransport
from machine import cpu_name

LIMIT = datetime.timedelta(seconds=60)


class Transfer:
    def __init__(self, work, tensor):
        self.work, self.tensor = work, tensor

    def wait(self):
        if self.work is not None:
            self.work.wait(LIMIT)
        self.cancel()

    def cancel(self):
        self.work = self.tensor = None


class MessageByMessage(annulus.Transport):
    """Python code for every message: a view, a tensor over it, the call, and the wait."""

    def __init__(self, gloo):
        super().__init__(dist.get_rank(), dist.get_world_size(), "gloo, message by message")
        self.gloo = gloo

    def send(self, peer, tag, buffer):
        return self._start("send", peer, tag, buffer)

    def receive(self, peer, tag, buffer):
        return self._start("recv", peer, tag, buffer)

    def _start(self, way, peer, tag, buffer):
        if len(buffer) == 0:
            return Transfer(None, None)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        return Transfer(getattr(self.gloo, way)([tensor], peer, tag), tensor)


def bare(gloo, size):
    """One step by Gloo alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, found = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks

    def step():
        receive = gloo.recv([found], previous, 1)
        send = gloo.send([out], following, 1)
        receive.wait(LIMIT)
        send.wait(LIMIT)

    return step


def ring_pass(transport, tokens, heads):
    """A pass, and how many steps it has."""
    ranks, dim = dist.get_world_size(), 64
    pattern, placement = annulus.Pattern.dense(heads), annulus.Placement.contiguous(tokens * ranks, ranks)
    executor = annulus.RingAttention(pattern, placement, transport=transport, head_dim=dim, backward=False)
    q = torch.zeros(1, tokens, heads, dim)
    agreement = (ranks - 1).bit_length()
    return lambda: executor.forward(q, q, q), ranks - 1 + agreement


def measure(function, steps, repeat):
    dist.barrier()
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    before = [clock() for clock in clocks]
    for _ in range(repeat):
        function()
    return [1e6 * (clock() - b) / repeat / steps for clock, b in zip(clocks, before)]


def worker(args):
    torch.set_num_threads(1)
    os.environ["ANNULUS_THREADS"] = "1"
    dist.init_process_group("gloo")
    world = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.ProcessGroupGloo(dist.PrefixStore(n, world), rank, ranks, LIMIT) for n in ("a", "b")]
    ours = ProcessGroupTransport(timeout=60)
    one = {"bare": (bare(groups[0], 512), 1), "annulus": ring_pass(ours, 1, 1)}
    one["message by message"] = ring_pass(MessageByMessage(groups[1]), 1, 1)
    # 256 KiB a step and hardly any arithmetic: the transfer is what counts.
    long = {"bare": (bare(groups[0], 2**18), 1), "annulus": ring_pass(ours, 8, 64)}
    long["message by message"] = ring_pass(MessageByMessage(groups[1]), 8, 64)
    rows = []
    for what, ways in (("512 bytes", one), ("256 KiB", long)):
        times = {way: [] for way in ways}
        for round_ in range(args.rounds + 1):
            for way, (function, steps) in ways.items():
                found = measure(function, steps, args.repeat)
                if round_ > 0:
                    times[way].append(found)
        for way, found in times.items():
            wall, cpu, own = (statistics.median(x) for x in zip(*found))
            rows.append({"message": what, "way": way, "wall_us": wall, "cpu_us": cpu, "thread_us": own})
    if rank == 0:
        pathlib.Path(args.out).write_text(json.dumps(rows))
    dist.barrier()
    ours.close()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    import subprocess
    import tempfile

    results = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__, "rows": []}
    for ranks in args.ranks:
        with tempfile.NamedTemporaryFile() as file:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, __file__, "--worker", "--out", file.name]
            command += ["--rounds", str(args.rounds), "--repeat", str(args.repeat)]
            base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            base["OMP_NUM_THREADS"] = "1"
            processes = [subprocess.Popen(command, env=base | {"RANK": str(r)}) for r in range(ranks)]
            if any(process.wait() != 0 for process in processes):
                raise SystemExit("steps: a rank failed")
            results["rows"] += [{"ranks": ranks} | row for row in json.loads(pathlib.Path(file.name).read_text())]
    print(f"{results['cpu']}, {results['cores']} cores, PyTorch {results['torch']}: microseconds per step")
    print(f"{'ranks':>5} {'message':>10} {'way':20} {'wall':>8} {'CPU':>8} {'caller':>8}  caller over bare Gloo's")
    for row in results["rows"]:
        same = (r for r in results["rows"] if (r["ranks"], r["message"]) == (row["ranks"], row["message"]))
        ratio = row["thread_us"] / next(r["thread_us"] for r in same if r["way"] == "bare")
        print(
            f"{row['ranks']:5} {row['message']:>10} {row['way']:20} {row['wall_us']:8.1f} {row['cpu_us']:8.1f} "
            f"{row['thread_us']:8.1f}  {ratio:.2f}"
        )
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
