"""What a key_padding_mask costs: forward and backward with it over the same without, interleaved. Bar: 1.05.

    python bench/key_padding.py [--device cpu] [--tokens 4096] [--heads 4] [--dim 64] [--batch 2] [--check]
    torchrun --nproc-per-node=2 bench/key_padding.py ...

Cases: `known` has the mask of an earlier call, as all layers of a model but the first; `new` has a mask that no rank
has seen; `lengths` are seqused_k and leftpad_k of the same keys; `holes` is a mask that has to be columns; `nothing` is
a mask that ignores no key. --padded is the share of the keys that the others ignore. --check: fails if a ratio of
`nothing`, `known` or `new` is above the bar.

Cases alternate, and calls that differ in lengths share an executor: each of them plans anew here, also `plain`. On a GPU
with few tokens that is most of the time, so use long sequences there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import annulus.torch as at
import torch
import torch.distributed as dist

BAR = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--padded", type=float, default=0.02, help="share of the keys")
    parser.add_argument("--check", action="store_true")
    for name, default in (("tokens", 4096), ("heads", 4), ("dim", 64), ("batch", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    group, rank = None, 0
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if a.device == "cuda" else "gloo")
        group, rank = dist.group.WORLD, dist.get_rank()
    if a.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(int(os.environ.get("ANNULUS_THREADS", "0")) or torch.get_num_threads())
    slowest = 0.0
    for dtype in a.dtype:
        slowest = max(slowest, ratios(a, getattr(torch, dtype), group, rank))
    if group is not None:
        at.cleanup()
        dist.destroy_process_group()
    return int(a.check and slowest > BAR)


def ratios(a: argparse.Namespace, dtype: torch.dtype, group: dist.ProcessGroup | None, rank: int) -> float:
    """Prints the ratios of one dtype. Returns the largest that has a bar."""
    make = torch.Generator().manual_seed(1)
    shape = (a.batch, a.tokens, a.heads, a.dim)
    q, k, v, do = (
        at.shard(torch.randn(shape, generator=make), group=group).to(a.device, dtype) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    padded = int(a.padded * a.tokens)
    begin, end = [0] * a.batch, [a.tokens - padded * (entry + 1) // a.batch for entry in range(a.batch)]
    where = torch.arange(a.tokens)
    whole = torch.stack([where >= e for e in end])
    hole = whole | (where % 50 == 7)
    masks = [at.shard(x, group=group).to(a.device) for x in (whole, hole, torch.zeros_like(whole))]
    known, holes, nothing = masks
    cases = {
        "plain": dict,
        "nothing": lambda: {"key_padding_mask": nothing},
        "known": lambda: {"key_padding_mask": known},
        "new": lambda: {"key_padding_mask": known.clone()},
        "lengths": lambda: {"leftpad_k": begin, "seqused_k": end},
        "holes": lambda: {"key_padding_mask": holes},
    }

    def meet() -> None:
        if a.device == "cuda":
            torch.cuda.synchronize()
        if group is not None:
            dist.barrier()

    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(a.rounds + 2):
        for name, arguments in cases.items():
            more = arguments()
            meet()
            start = time.perf_counter()
            o = at.ring_attention(*leaves, is_causal=True, group=group, **more)
            meet()
            middle = time.perf_counter()
            torch.autograd.grad(o, leaves, do)
            meet()
            times.setdefault(("forward", name), []).append(middle - start)
            times.setdefault(("backward", name), []).append(time.perf_counter() - middle)
    slowest = 0.0
    for way in ("forward", "backward"):
        plain = times[way, "plain"][2:]
        # Of neighbouring runs, so that noise of the machine affects both.
        found = {
            name: statistics.median(t / p for t, p in zip(times[way, name][2:], plain))
            for name in cases
            if name != "plain"
        }
        slowest = max(slowest, *(found[name] for name in ("nothing", "known", "new")))
        if rank == 0:
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
            head = f"{str(dtype)[6:]:9} {way:8} plain {1e3 * statistics.median(plain):8.2f} ms"
            print(f"{head}; over plain: {shown}", flush=True)
    return slowest


if __name__ == "__main__":
    sys.exit(main())
