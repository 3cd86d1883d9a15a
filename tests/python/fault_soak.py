"""Kill and re-form, again and again, in processes that stay:  python tests/python/fault_soak.py --cycles 200

Two ranks live through all cycles. In each they make a group with a new third one, compute, lose it by kill -9, go on as two,
and compute again. Resident memory, descriptors and threads must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from faults import Ring, both_ways, expected, free_port, join, right

import annulus
import annulus.torch as at

DEADLINE = 20.0


def resources() -> dict[str, int]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def cycle(rank: int, say: Callable, port: int, steps: int) -> None:
    join(rank, 3, port)
    group = dist.group.WORLD
    wanted = expected(group, "short")
    correct = all(right(both_ways(group, DEADLINE, "short"), wanted) for _ in range(steps))
    say("ready", port=port)
    try:
        while True:
            correct = right(both_ways(group, DEADLINE, "short"), wanted) and correct
    except annulus.TransportError as error:
        named = error.rank
    left = at.survivors(group, timeout=30.0)
    wanted = expected(left, "short")
    correct = all(right(both_ways(left, DEADLINE, "short"), wanted) for _ in range(steps)) and correct
    at.cleanup()
    dist.destroy_process_group()
    say("done", port=port, named=named, right=correct, **resources())


def stay(rank: int, say: Callable, orders: int, steps: int) -> None:
    with open(orders) as lines:
        for line in lines:
            cycle(rank, say, int(line), steps)


def come_and_go(rank: int, say: Callable, orders: int, port: int, steps: int) -> None:
    cycle(2, say, port, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5, help="passes before the kill and after")
    options = parser.parse_args()
    history: list[list[dict]] = []
    with Ring(2, stay, options.steps) as ring:
        for number in range(options.cycles):
            port = free_port()
            for rank in ring.ranks:
                rank.said.clear()
                os.write(rank.orders, f"{port}\n".encode())
            with Ring(1, come_and_go, port, options.steps) as third:
                ready = third.wait("ready", [0], 120) and ring.wait("ready", [0, 1], 120)
                if ready:
                    third.kill(0)
                if not ready or not ring.wait("done", [0, 1], 120):
                    print(f"cycle {number}: {[r.said for r in (*ring.ranks, *third.ranks)]}")
                    return 1
            history.append([rank.last("done") for rank in ring.ranks])
            if any(d["named"] != 2 or not d["right"] for d in history[-1]):
                print(f"cycle {number}: {history[-1]}")
                return 1
            if number % max(1, options.cycles // 10) == 0 or number == options.cycles - 1:
                print(f"cycle {number}: {json.dumps([{k: d[k] for k in resources()} for d in history[-1]])}", flush=True)
    # Caches fill at first.
    begin, end = history[len(history) // 4], history[-1]
    grown = [{k: e[k] - b[k] for k in resources()} for b, e in zip(begin, end)]
    cycles = len(history) - 1 - len(history) // 4
    print(f"grown in the last {cycles} cycles: {grown}")
    flat = all(g["descriptors"] <= 2 and g["threads"] <= 2 and g["resident"] < 16e6 for g in grown)
    return 0 if flat else 1


if __name__ == "__main__":
    begin = time.monotonic()
    status = main()
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(status)
