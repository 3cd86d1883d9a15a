"""What sinks cost on a GPU: attention with them over the same without, interleaved.

    python bench/cuda/sinks.py [--tokens 65536] [--rounds 20]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from annulus.torch import ring_attention

CASES = {
    "causal": {"is_causal": True},
    "window 1024": {"is_causal": True, "window": (1023, 0)},
    "window 128": {"is_causal": True, "window": (127, 0)},
    "longnet": {
        "segment_lengths": [2048, 4096, 8192, 16384, 32768],
        "dilation_rates": [1, 2, 4, 8, 16],
        "is_causal": True,
    },
}


def milliseconds(call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    shape = (1, arguments.tokens, 16, 128)
    make = torch.Generator("cuda").manual_seed(1)
    q, k, v, do = (
        torch.randn(shape, device="cuda", generator=make).bfloat16() for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.zeros(16, device="cuda", requires_grad=True)
    for name, options in CASES.items():
        times: dict[tuple[str, bool], list[float]] = {}
        for _ in range(arguments.rounds + 3):
            for with_sinks in (False, True):
                more = {**options, "sinks": sinks} if with_sinks else options
                result = []
                times.setdefault(("forward", with_sinks), []).append(
                    milliseconds(lambda: result.append(ring_attention(*leaves, **more)))  # noqa: B023
                )
                wanted = [*leaves, sinks] if with_sinks else leaves
                times.setdefault(("backward", with_sinks), []).append(
                    milliseconds(lambda: torch.autograd.grad(result[0], wanted, do))  # noqa: B023
                )
        for way in ("forward", "backward"):
            without, with_them = (statistics.median(times[way, x][3:]) for x in (False, True))
            print(
                f"{name:12} {way:8} {without:8.3f} ms, with sinks {with_them:8.3f} ms: "
                f"{with_them / without:.3f}"
            )


if __name__ == "__main__":
    main()
