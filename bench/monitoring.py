"""Measures the cost of monitoring:  python bench/monitoring.py

A ring of threads runs forward and backward over 16,384 tokens in one process, in turns with the event stream off, on, and on
with an exporter that writes every event to a file ("exported"). Prints CPU time of the process and wall time of a round, on
over off: the ratio of the shortest times, which a busy machine disturbs least, and the median and quartiles of the ratios of
neighbouring rounds. It also prints the number of events in a round times the cost of one event, measured separately.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import statistics
import tempfile
import time

import annulus
import numpy as np
from annulus import _core, monitor


class Ring:
    def __init__(self, ranks: int, tokens: int, heads: int, dim: int):
        transports = annulus.make_in_process_ring(ranks)
        pattern = annulus.Pattern.longnet(heads, [2048, 4096, 16384], [1, 2, 4])
        placement = annulus.Placement.contiguous(tokens, ranks)
        self.pool = concurrent.futures.ThreadPoolExecutor(ranks)
        rng = np.random.default_rng(0)
        shape = (1, tokens // ranks, heads, dim)
        self.inputs = [
            [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)] for _ in range(ranks)
        ]
        self.rings = list(
            self.pool.map(
                lambda transport: annulus.RingAttention(
                    pattern, placement, transport=transport, head_dim=dim, schedule="ring"
                ),
                transports,
            )
        )

    def round(self) -> tuple[float, float]:
        """Seconds of wall and of CPU."""

        def one(rank: int) -> None:
            q, k, v, do = self.inputs[rank]
            o, lse = self.rings[rank].forward(q, k, v)
            self.rings[rank].backward(q, k, v, o, lse, do)

        begin, cpu = time.perf_counter(), time.process_time()
        list(self.pool.map(one, range(len(self.rings))))
        return time.perf_counter() - begin, time.process_time() - cpu


def cost_of_an_event(count: int = 200_000) -> float:
    """Seconds, the call from Python included: the cheapest of some stretches."""
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(count // 10):
            _core.events_record("compute", "forward", 0, 1, -1, 0, 1, 2, False)
        best = min(best, (time.perf_counter() - begin) / (count // 10))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    ring = Ring(options.ranks, options.tokens, options.heads, options.head_dim)
    ring.round()  # caches, threads, pages
    times: dict[str, list[tuple[float, float]]] = {"off": [], "on": [], "exported": []}
    order = random.Random(1)
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(options.rounds):
            # In turns, and every time in another order.
            for state in order.sample(list(times), len(times)):
                exporter = None
                if state == "off":
                    monitor.stop()
                elif state == "on":
                    monitor.start()
                else:
                    exporter = monitor.JsonLines(file.name, interval=0.25)
                times[state].append(ring.round())
                if exporter is not None:
                    exporter.close()
    monitor.start()
    _, place, _ = monitor.read(_core.events_next())
    ring.round()
    events = len(monitor.read(place)[0])
    cost = cost_of_an_event()
    monitor.stop()

    result: dict[str, object] = {
        "tokens": options.tokens,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "events_per_round": events,
        "seconds_per_event": cost,
        "off_wall_seconds": statistics.median(wall for wall, _ in times["off"]),
        "off_cpu_seconds": statistics.median(cpu for _, cpu in times["off"]),
    }
    result["bound"] = events * cost / result["off_cpu_seconds"]
    for state in ("on", "exported"):
        for which, name in enumerate(("wall", "cpu")):
            ratios = [a[which] / b[which] for a, b in zip(times[state], times["off"])]
            result[f"{state}_{name}_ratio"] = statistics.quantiles(ratios, n=4)
            least = [min(row[which] for row in times[each]) for each in (state, "off")]
            result[f"{state}_{name}_least"] = least[0] / least[1]
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{options.tokens} tokens, {options.ranks} ranks of threads, forward and backward: "
        f"{result['off_wall_seconds']:.3f} s, {result['off_cpu_seconds']:.3f} s of CPU; "
        f"{options.rounds} rounds"
    )
    for state in ("on", "exported"):
        for name in ("cpu", "wall"):
            low, middle, high = result[f"{state}_{name}_ratio"]
            least = result[f"{state}_{name}_least"]
            print(
                f"  {state:9} {name:5} least {100 * (least - 1):+.2f} %,  median {100 * (middle - 1):+.2f} %"
                f"  ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"
            )
    print(
        f"  {events} events a round, {1e9 * cost:.0f} ns each: {100 * result['bound']:.4f} % of the CPU time"
    )


if __name__ == "__main__":
    main()
