"""Runs rings of processes for a long time:  make soak

    PYTHONPATH=tests/python python tests/python/faults/soak.py --steps 100000 --ranks 3   # repeated forward and backward
    PYTHONPATH=tests/python python tests/python/faults/soak.py --cycles 200               # kill a rank, re-form the ring

With --cycles, two ranks stay for all cycles. In each cycle they make a group with a new third rank, compute, lose that
rank by kill -9, and compute again as two. Every result is compared. After a quarter of the steps or cycles, when caches
are full, resident memory, descriptors and threads must not grow any more. Prints one line for each rank, and exits with 1
if they grow.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from support.process_ring import PATIENCE, Ring, both_ways, expected, free_port, join, joined_ring, right

DEADLINE = 20.0
# The allocator may hold a little more, and a connection may still be closing. 200 bytes per step would be 15 MB.
MOST = {"resident": 8 << 20, "descriptors": 2, "threads": 2}


def resources() -> dict[str, int]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def verdict(what: str, number: int, seconds: float, history: list[list[dict]]) -> bool:
    """Prints the least that the ranks held in the second and in the last quarter. Returns whether that is flat.

    The least, because a connection that is still closing or a retry is no leak: a leak is in all later samples.
    """
    quarter = max(1, len(history) // 4)
    early, late = history[quarter : 2 * quarter], history[-quarter:]
    flat = True
    for rank in range(len(history[0])):
        values = []
        for name, most in MOST.items():
            unit = 2**20 if name == "resident" else 1
            before, after = (min(ranks[rank][name] for ranks in part) for part in (early, late))
            values.append(f"{name} {before / unit:.5g} -> {after / unit:.5g}")
            flat = flat and after - before <= most
        print(f"{number} {what}, rank {rank}: {', '.join(values)}", flush=True)
    print(f"{number} {what}: {'flat' if flat else 'GROWN'}, {seconds:.0f} s", flush=True)
    return flat


# ---- steps


def inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 48, 2, 16, generator=generator) for _ in range(4)]


def pass_over(group: dist.ProcessGroup | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    *leaves, do = tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    place = {} if group is None else {"group": group, "placement": "zigzag", "timeout": DEADLINE}
    o = at.ring_attention(*leaves, segment_lengths=[16, 48], dilation_rates=[1, 3], is_causal=True, **place)
    o.backward(do)
    return [o.detach()] + [x.grad for x in leaves]


def compute(rank: int, say: Callable, steps: int) -> None:
    group = dist.group.WORLD
    # Three sets of inputs in turn: rows of another step would change the result.
    whole = [inputs(seed) for seed in range(3)]
    mine, wanted = (
        [[at.shard(x, placement="zigzag", group=group) for x in each] for each in sets]
        for sets in (whole, [pass_over(None, each) for each in whole])
    )
    results = [pass_over(group, each) for each in mine]
    if not all(right(found, expected) for found, expected in zip(results, wanted)):
        say("wrong", step=0)
        return
    begin = time.monotonic()
    samples = 40
    for step in range(1, steps + 1):
        found = pass_over(group, mine[step % 3])
        if not all(map(torch.equal, found, results[step % 3])):
            say("wrong", step=step)
            return
        if step * samples // steps > (step - 1) * samples // steps:
            say("so far", step=step, **resources())
    say("done", seconds=time.monotonic() - begin)


def soak_steps(steps: int, ranks: int) -> bool:
    with joined_ring(ranks, compute, steps) as ring:
        if not ring.wait("done", list(range(ranks)), PATIENCE + 0.1 * steps):
            print(f"steps: {[rank.said[-1:] for rank in ring.ranks]}")
            return False
        said = [[line for line in rank.said if line["what"] == "so far"] for rank in ring.ranks]
        seconds = max(rank.last("done")["seconds"] for rank in ring.ranks)
        return verdict("steps", steps, seconds, [list(lines) for lines in zip(*said)])


# ---- cycles


def cycle(rank: int, say: Callable, port: int, steps: int) -> None:
    join(rank, 3, port)
    group = dist.group.WORLD
    wanted = expected(group, "short")
    correct = all([right(both_ways(group, DEADLINE, "short"), wanted) for _ in range(steps)])
    say("ready", port=port)
    try:
        while True:
            correct = right(both_ways(group, DEADLINE, "short"), wanted) and correct
    except annulus.TransportError as error:
        named = error.rank
    left = at.survivors(group, timeout=30.0)
    wanted = expected(left, "short")
    correct = all([right(both_ways(left, DEADLINE, "short"), wanted) for _ in range(steps)]) and correct
    at.cleanup()
    dist.destroy_process_group()
    say("done", port=port, named=named, right=correct, **resources())


def stay(rank: int, say: Callable, orders: int, steps: int) -> None:
    with open(orders) as lines:
        for line in lines:
            cycle(rank, say, int(line), steps)


def be_third(rank: int, say: Callable, orders: int, port: int, steps: int) -> None:
    cycle(2, say, port, steps)


def soak_cycles(cycles: int, steps: int = 5) -> bool:
    history: list[list[dict]] = []
    begin = time.monotonic()
    with Ring(2, stay, steps) as ring:
        for number in range(cycles):
            port = free_port()
            for rank in ring.ranks:
                rank.said.clear()
                os.write(rank.orders, f"{port}\n".encode())
            with Ring(1, be_third, port, steps) as third:
                ready = third.wait("ready", [0], PATIENCE) and ring.wait("ready", [0, 1], PATIENCE)
                if ready:
                    third.kill(0)
                if not ready or not ring.wait("done", [0, 1], PATIENCE):
                    print(f"cycle {number}: {[r.said for r in (*ring.ranks, *third.ranks)]}")
                    return False
            history.append([rank.last("done") for rank in ring.ranks])
            if any(d["named"] != 2 or not d["right"] for d in history[-1]):
                print(f"cycle {number}: {history[-1]}")
                return False
    return verdict("cycles", cycles, time.monotonic() - begin, history)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=3, help="ranks of the ring that runs the steps")
    parser.add_argument("--cycles", type=int, default=0)
    options = parser.parse_args()
    flat = options.steps == 0 or soak_steps(options.steps, options.ranks)
    flat = (options.cycles == 0 or soak_cycles(options.cycles)) and flat
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
