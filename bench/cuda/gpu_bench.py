#!/usr/bin/env python3
"""Compares the library on a GPU with its peers, in one process.

    make gpu-bench          # builds the package where PyTorch with CUDA is, then runs this
    python3 bench/cuda/gpu_bench.py --out bench/results/h200.json [--only longnet_forward] [--rounds 5]

The figure of a case is our time over the peer's, by medians of readings of at least 80 ms in random order. A GPU lowers its clock at its
power limit, so only ratios within one run are meaningful. Peers: cuDNN through PyTorch (LongNet: one call per branch and offset on strided
views, WITHOUT the merge or the accumulation that ours includes), PyTorch's flash backend, FlexAttention, and plain PyTorch code.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import annulus
import annulus.torch
import masks
import torch
import torch.nn.functional as F
from ours import HEADS, Ours, Report, longnet_flops, longnet_pattern, normal
from peers import DILATIONS, SEGMENTS, Function, cudnn_backward, cudnn_forward, medians, views
from torch.nn.attention import SDPBackend, sdpa_kernel


def longnet(report: Report, tokens: int, label: str, dim: int, causal: bool, backward: bool) -> None:
    mask = "causal" if causal else "full"
    forward_name, backward_name = (f"longnet_{p}_d{dim}_{label}_{mask}" for p in ("forward", "backward"))
    if not report.wants(forward_name, backward_name):
        return
    own = {kind: Ours(longnet_pattern(causal, kind == "interleaved"), 1, tokens, dim, backward=backward)
           for kind in ("blocked", "interleaved")}
    part = own["blocked"].parts[0]
    tensors = [part[n] for n in ("q", "k", "v", "do")]
    calls = [views(tensors, w, r, o) for w, r in zip(SEGMENTS, DILATIONS, strict=True) for o in range(r)]
    functions: dict[str, Function] = {k: x.run("forward") for k, x in own.items()}
    functions["cudnn"] = lambda: [cudnn_forward(q, k, v, causal) for q, k, v, _ in calls]
    found = medians(functions, report.rounds)
    for kind in own:
        report.add(f"{forward_name}_{kind}", found[kind], "cuDNN, no merge", found["cudnn"], longnet_flops(tokens, dim, causal, False))
    if backward:
        kept = [(a, cudnn_forward(*a[:3], causal)) for a in calls]
        grads = [torch.empty_like(x[0]).copy_(a[3]) for a, x in kept]
        functions = {k: x.run("backward") for k, x in own.items()}
        functions["cudnn"] = lambda: [cudnn_backward(g, *a[:3], x, causal) for (a, x), g in zip(kept, grads, strict=True)]
        found = medians(functions, report.rounds)
        for kind in own:
            report.add(f"{backward_name}_{kind}", found[kind], "cuDNN, no accumulation", found["cudnn"],
                       longnet_flops(tokens, dim, causal, True))


def dense(report: Report, length: int, label: str, causal: bool) -> None:
    mask, dim, batch = "causal" if causal else "full", 128, 65536 // length
    names = [f"dense_{p}_d128_{label}_{mask}" for p in ("forward", "backward", "backward_deterministic")]
    if not report.wants(*names):
        return
    own = Ours(annulus.Pattern.dense(HEADS, causal), batch, length, dim)
    same = Ours(annulus.Pattern.dense(HEADS, causal), batch, length, dim, deterministic=True)
    part = own.parts[0]
    q, k, v, do = (part[n].transpose(1, 2) for n in ("q", "k", "v", "do"))
    flops = 4.0 * dim * batch * HEADS * length**2 * (0.5 if causal else 1)
    found = medians({"own": own.run("forward"), "cudnn": lambda: cudnn_forward(q, k, v, causal)}, report.rounds)
    report.add(names[0], found["own"], "cuDNN", found["cudnn"], flops)
    x = cudnn_forward(q, k, v, causal)
    same.run("forward")()
    found = medians({"own": own.run("backward"), "same": same.run("backward"),
                     "cudnn": lambda: cudnn_backward(do, q, k, v, x, causal)}, report.rounds)
    report.add(names[1], found["own"], "cuDNN", found["cudnn"], 2.5 * flops)
    report.add(names[2], found["same"], "cuDNN", found["cudnn"], 2.5 * flops)


def portable(report: Report) -> None:
    """In a process of its own: the family is chosen by the environment."""
    for causal in (False, True):
        name = f"portable_dense_forward_d128_4k_{'causal' if causal else 'full'}"
        if not report.wants(name):
            continue
        own = Ours(annulus.Pattern.dense(HEADS, causal), 16, 4096, 128, backward=False)
        q, k, v = (own.parts[0][n].transpose(1, 2) for n in ("q", "k", "v"))

        def flash() -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        found = medians({"own": own.run("forward"), "flash": flash}, report.rounds)
        report.add(name, found["own"], "PyTorch flash (FA2)", found["flash"],
                   4.0 * 128 * 16 * HEADS * 4096**2 * (0.5 if causal else 1))


def rings(report: Report) -> None:
    cases = [("ring8_longnet_d128_256k_full", longnet_pattern(False), 262144, 8, "contiguous"),
             ("ring4_dense_d128_64k_causal_zigzag", annulus.Pattern.dense(HEADS, True), 65536, 4, "zigzag")]
    for name, pattern, tokens, ranks, placement in cases:
        if not report.wants(name):
            continue
        one = Ours(pattern, 1, tokens, 128)
        many = Ours(pattern, 1, tokens, 128, ranks=ranks, placement=placement)
        for what in ("forward", "backward"):
            found: dict[str, list[float]] = {"one": [], "many": []}
            for _ in range(report.rounds):
                found["one"].append(one.wall_clock(what))
                found["many"].append(many.wall_clock(what))
            report.add(f"{name}_{what}", statistics.median(found["many"]), "one rank", statistics.median(found["one"]))
        del one, many
        torch.cuda.empty_cache()


def user_longnet(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What people write: slice, attend, scatter, merge by log-sum-exp, all under autograd."""
    outputs, weights = [], []
    for w, r in zip(SEGMENTS, DILATIONS, strict=True):
        o = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -math.inf, device=q.device)
        each = HEADS // r
        for offset in range(r):
            a = views([q, k, v], w, r, offset)
            x = cudnn_forward(*a, causal)
            views([o], w, r, offset)[0].copy_(x[0])
            rows = lse.view(q.shape[1] // w, w // r, r, HEADS)[:, :, offset, offset * each:(offset + 1) * each]
            rows.copy_(x[1].reshape(x[1].shape[:3]).transpose(1, 2))
        outputs.append(o)
        weights.append(lse)
    share = torch.softmax(torch.stack(weights), 0).to(q.dtype)
    return sum(o * s[..., None] for o, s in zip(outputs, share, strict=True))


def user(report: Report, tokens: int, label: str, causal: bool) -> None:
    name = f"user_longnet_d128_{label}_{'causal' if causal else 'full'}"
    if not report.wants(name):
        return
    leaves = [normal(1, tokens, HEADS, 128).requires_grad_() for _ in range(3)]
    do = normal(1, tokens, HEADS, 128)

    def ours() -> None:
        o = annulus.torch.ring_attention(*leaves, segment_lengths=SEGMENTS, dilation_rates=DILATIONS, is_causal=causal,
                                         max_communication_bytes=10**12)
        torch.autograd.grad(o, leaves, do)

    def theirs() -> None:
        torch.autograd.grad(user_longnet(*leaves, causal), leaves, do)

    found = medians({"own": ours, "user": theirs}, report.rounds)
    report.add(name, found["own"], "PyTorch by hand", found["user"], longnet_flops(tokens, 128, causal, False) * 3.5)


def flex(report: Report) -> None:
    name = "flex_longnet_forward_d128_64k_full"
    if not report.wants(name):
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = 65536
    own = Ours(longnet_pattern(False), 1, tokens, 128, backward=False)
    q, k, v = (own.parts[0][n].transpose(1, 2).contiguous() for n in ("q", "k", "v"))
    pairs = list(zip(SEGMENTS, DILATIONS, strict=True))

    def allowed(_b: Any, h: Any, i: Any, j: Any) -> Any:
        any_branch = None
        for w, r in pairs:
            o = h * r // HEADS
            here = (i // w == j // w) & (i % w % r == o) & (j % w % r == o)
            any_branch = here if any_branch is None else any_branch | here
        return any_branch

    mask = create_block_mask(allowed, 1, HEADS, tokens, tokens, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)
    found = medians({"own": own.run("forward"), "flex": lambda: compiled(q, k, v, block_mask=mask)}, min(3, report.rounds))
    report.add(name, found["own"], "FlexAttention", found["flex"])


def machine() -> dict[str, Any]:
    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    return dict(device=torch.cuda.get_device_name(), torch=torch.__version__, cudnn=torch.backends.cudnn.version(),
                nvidia_smi=ask("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv"),
                commit=ask("git", "rev-parse", "HEAD"), command=" ".join(sys.argv))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    arguments = parser.parse_args()
    report = Report(arguments.only, arguments.rounds, arguments.seconds)

    def attempt(function: Callable[..., None], *args: Any) -> None:
        try:
            function(report, *args)
        except Exception as error:  # the other cases count, too
            print(f"{function.__name__}{args}: {type(error).__name__}: {error}"[:500], flush=True)
        torch.cuda.empty_cache()

    if len(arguments.only) == 1 and arguments.only[0].startswith("portable"):
        attempt(portable)
    else:
        for dim in (128, 64):
            for causal in (False, True):
                attempt(longnet, 262144, "256k", dim, causal, dim == 128)
        for length, label in ((2048, "2k"), (4096, "4k"), (16384, "16k")):
            for causal in (False, True):
                attempt(dense, length, label, causal)
        attempt(rings)
        attempt(user, 262144, "256k", False)
        for causal in (False, True):
            attempt(longnet, 1048576, "1m", 128, causal, False)
        attempt(flex)
        for dim in (128, 64):
            attempt(masks.window, dim)
        for keys in (64, 1024):
            attempt(masks.dilated_window, keys)
        attempt(masks.documents)
        attempt(masks.longnet_documents)
        attempt(masks.nothing)
    if arguments.out:
        whole = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": []}
        names = {c["name"] for c in report.cases}
        cases = [c for c in whole["cases"] if c["name"] not in names] + report.cases
        arguments.out.write_text(json.dumps({**whole, "machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
