"""What a small call costs:  python bench/perf/calls.py

The attention itself is next to nothing here. Prints microseconds beside their bars, and fails where one is missed. That such
calls do little is in tests/python/core/test_runtime.py and tests/python/attention/test_fast_path.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import annulus
import numpy as np


def best(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Microseconds per call, in the best of several rounds: other work shares the machine."""
    rounds = []
    for _ in range(40):
        begin = clock()
        for _ in range(50):
            call()
        rounds.append(1e6 * (clock() - begin) / 50)
    return min(rounds)


def main() -> int:
    missed = 0

    def bar(what: str, found: float, most: float) -> None:
        nonlocal missed
        missed += found > most
        print(f"{what:64} {found:8.1f}   <= {most:g}{'' if found <= most else '   MISSED'}", flush=True)

    x = np.random.default_rng(1).standard_normal((1, 64, 2, 64), dtype=np.float32)
    bar("us per annulus.attention of 64 tokens", best(lambda: annulus.attention(x, x, x), time.perf_counter), 100)
    try:
        import annulus.torch as at
        import torch
    except ImportError:
        print("annulus.torch is left out: PyTorch is not installed")
        return missed > 0
    q, k, v, do = torch.randn(4, 1, 8, 1, 16).unbind()
    with torch.no_grad():
        found = best(lambda: at.ring_attention(q, k, v), time.thread_time)
    bar("us of this thread per ring_attention of 8 tokens", found, 100)
    for each in (q, k, v):
        each.requires_grad_()
    found = best(lambda: at.ring_attention(q, k, v).backward(do), time.thread_time)
    bar("the same, forward and backward", found, 250)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
