#!/usr/bin/env python3
"""Measures errors beside cuDNN's, host time of a call, and memory, on a GPU.

    make gpu-bench          # runs this, too
    python3 bench/cuda/gpu_facts.py --out bench/results/h200.json

Errors are root mean squares against fp64 results of the same rounded inputs, over the root mean square of those results. Host time is
the wall time of calls without waiting for the device, with one head, so that the device keeps up. Memory is the peak of PyTorch's
allocator plus all other memory that the process took from the device.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import time
from typing import Any

import annulus
import annulus.torch
import torch
from gpu_bench import Ours, machine, normal
from peers import DILATIONS, SEGMENTS, cudnn_backward, cudnn_forward


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool) -> dict[str, torch.Tensor]:
    """[batch, tokens, heads, dim] in fp64, one head at a time."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    outputs, sums = [], []
    for head in range(q.shape[2]):
        a, b, c = (x[:, :, head] for x in leaves)
        scores = a @ b.transpose(1, 2) / math.sqrt(q.shape[3])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        sums.append(scores.logsumexp(-1))
        outputs.append(scores.softmax(-1) @ c)
    o = torch.stack(outputs, 2)
    gradients = torch.autograd.grad(o, leaves, do.double())
    return dict(o=o.detach(), lse=torch.stack(sums, 2).detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


def errors_of(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    out = {n: float((found[n].double() - right[n]).square().mean().sqrt() / right[n].square().mean().sqrt())
           for n in ("o", "dq", "dk", "dv")}
    if "lse" in found:
        out["lse_absolute"] = float((found["lse"].double() - right["lse"]).abs().max())
    return out


def ours(inputs: list[torch.Tensor], causal: bool, ranks: int) -> dict[str, torch.Tensor]:
    """The results of a ring of `ranks`, put together."""
    batch, tokens, heads, dim = inputs[0].shape
    own = Ours(annulus.Pattern.dense(heads, causal), batch, tokens, dim, ranks=ranks, dtype=inputs[0].dtype)
    shards = [x.chunk(ranks, 1) for x in inputs]
    for rank, part in enumerate(own.parts):
        for name, shard in zip(("q", "k", "v", "do"), shards, strict=True):
            part[name].copy_(shard[rank])
    torch.cuda.synchronize()
    for what in ("forward", "backward"):
        def pass_of(rank: int, what: str = what) -> None:
            with torch.cuda.stream(own.parts[rank]["stream"]):
                getattr(own, what)(own.parts[rank])
        own.on_ranks(pass_of)
        torch.cuda.synchronize()
    return {n: torch.cat([p[n] for p in own.parts], 1) for n in ("o", "lse", "dq", "dk", "dv")}


def errors(tokens: int = 4096, heads: int = 4, dim: int = 128) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        for causal in (False, True):
            inputs = [normal(1, tokens, heads, dim, dtype=dtype) for _ in range(4)]
            right = reference(*inputs, causal)
            q, k, v, do = (x.transpose(1, 2) for x in inputs)
            x = cudnn_forward(q, k, v, causal)
            dq, dk, dv = cudnn_backward(do, q, k, v, x, causal)[:3]
            theirs = {n: t.transpose(1, 2) for n, t in dict(o=x[0], dq=dq, dk=dk, dv=dv).items()}
            row: dict[str, Any] = dict(dtype=str(dtype).removeprefix("torch."), mask="causal" if causal else "full", tokens=tokens,
                                       head_dim=dim, cudnn=errors_of(theirs, right))
            for ranks in (1, 4):
                row[f"ranks_{ranks}"] = errors_of(ours(inputs, causal, ranks), right)
            row["worst_ratio"] = max(row[f"ranks_{r}"][n] / row["cudnn"][n] for r in (1, 4) for n in ("o", "dq", "dk", "dv"))
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def host_cost(tokens: int = 4096) -> dict[str, Any]:
    """Microseconds the calling thread spends in one forward call, beside PyTorch's own attention."""
    q, k, v = (normal(1, tokens, 1, 64) for _ in range(3))
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))

    def microseconds(function: Any, calls: int = 100) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls * 1e6

    functions = dict(annulus=lambda: annulus.torch.ring_attention(q, k, v),
                     sdpa=lambda: torch.nn.functional.scaled_dot_product_attention(a, b, c))
    found: dict[str, list[float]] = {n: [] for n in functions}
    with torch.no_grad():
        for _ in range(9):
            for name, function in functions.items():
                found[name].append(microseconds(function))
        torch.cuda.synchronize()
        held = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        for _ in range(100):
            functions["annulus"]()
        torch.cuda.synchronize()
        lost = held[0] - torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - held[1]
    row = dict(tokens=tokens, allocated_bytes_after_100_calls=lost, **{f"{n}_us": statistics.median(t[1:]) for n, t in found.items()})
    print(json.dumps(row), flush=True)
    return row


def forward_memory(tokens: int = 262144, heads: int = 8, dim: int = 64) -> dict[str, Any]:
    """Bytes and milliseconds of a LongNet forward, its tensors included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # Not by way of fp32, which would be the peak.
    q, k, v = (torch.empty(1, tokens, heads, dim, device="cuda", dtype=torch.float16).normal_() for _ in range(3))
    options = dict(segment_lengths=SEGMENTS, dilation_rates=DILATIONS)
    with torch.no_grad():
        annulus.torch.ring_attention(q, k, v, **options)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        beside = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                annulus.torch.ring_attention(q, k, v, **options)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 20)
    row = dict(tokens=tokens, heads=heads, head_dim=dim, dtype="float16", bytes=peak + max(0, beside), beside_pytorch_bytes=beside,
               forward_ms=statistics.median(times))
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    facts = dict(forward_memory=forward_memory(), host_cost=host_cost(), errors=errors(), machine=machine())
    if arguments.out:
        whole = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps({**whole, "facts": facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
