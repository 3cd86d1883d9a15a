"""What softcap and dropout cost: attention with them over the same without, and beside PyTorch's SDPA, interleaved.

    python bench/softcap_dropout.py [--device cpu] [--tokens 2048] [--heads 2] [--dim 64] [--rounds 15]

On the CPU set ANNULUS_THREADS=1 for one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from annulus.torch import ring_attention
from torch.nn.functional import scaled_dot_product_attention

P = 0.1
OURS = {
    "plain": {},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout_p": P, "dropout_seed": 1},
    "both": {"softcap": 20.0, "dropout_p": P, "dropout_seed": 1},
}
THEIRS = {"sdpa": 0.0, "sdpa dropout": P}


def seconds(call, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    for name, default in (("tokens", 2048), ("heads", 2), ("dim", 64), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    if a.device == "cpu":
        torch.set_num_threads(int(os.environ.get("ANNULUS_THREADS", "0")) or torch.get_num_threads())
    make = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        shape = (1, a.tokens, a.heads, a.dim)
        q, k, v, do = (torch.randn(shape, generator=make).to(a.device, dtype) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        calls = {n: (lambda o=o: ring_attention(*leaves, is_causal=True, **o)) for n, o in OURS.items()}
        for n, p in THEIRS.items():
            calls[n] = lambda p=p: scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in leaves), is_causal=True, dropout_p=p
            ).transpose(1, 2)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(a.rounds + 2):
            for name, call in calls.items():
                out = []
                forward = seconds(lambda: out.append(call()), a.device)  # noqa: B023
                backward = seconds(lambda: torch.autograd.grad(out[0], leaves, do), a.device)  # noqa: B023
                times.setdefault(("forward", name), []).append(forward)
                times.setdefault(("backward", name), []).append(backward)
        for way in ("forward", "backward"):
            median = {n: statistics.median(times[way, n][2:]) for n in calls}
            shown = ", ".join(f"{n} {median[n] / median['plain']:.2f}" for n in calls if n != "plain")
            print(f"{str(dtype)[6:]:9} {way:8} plain {1e3 * median['plain']:8.2f} ms; over plain: {shown}")


if __name__ == "__main__":
    main()
