"""The library's executors on a GPU, and a report of cases beside their peers."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable
from typing import Any

import annulus
import torch
from peers import DILATIONS, SEGMENTS, Function

HEADS = 16


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


class Ours:
    """Executors of all ranks of a ring in this process, one GPU, and their tensors."""

    def __init__(self, pattern: annulus.Pattern, batch: int, tokens: int, dim: int, *, ranks: int = 1, placement: str = "contiguous",
                 dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        self.ranks = ranks
        self.threads = concurrent.futures.ThreadPoolExecutor(ranks)
        where = annulus.Placement.named(placement, tokens, ranks)
        transports = annulus.make_in_process_ring(ranks)
        limits = dict(max_qkv_elements=10**12, max_communication_bytes=10**12)

        def make(rank: int) -> dict[str, Any]:
            local = where.local_tokens(rank)
            ring = annulus.RingAttention(pattern, where, transport=transports[rank], batch=batch, kv_heads=pattern.heads,
                                         head_dim=dim, dtype=dtype, device="cuda:0", **limits, **options)
            q, k, v, do = (normal(batch, local, pattern.heads, dim, dtype=dtype) for _ in range(4))
            o, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
            lse = torch.empty(batch, local, pattern.heads, device="cuda")
            return dict(ring=ring, stream=torch.cuda.Stream(), q=q, k=k, v=v, o=o, lse=lse, do=do, dq=dq, dk=dk, dv=dv)

        self.parts = self.on_ranks(make)

    def on_ranks(self, body: Callable[[int], Any]) -> list[Any]:
        if self.ranks == 1:
            return [body(0)]
        return [f.result() for f in [self.threads.submit(body, r) for r in range(self.ranks)]]

    def forward(self, part: dict[str, Any]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        part["ring"].forward(part["q"], part["k"], part["v"], o=part["o"], lse=part["lse"], stream=stream)

    def backward(self, part: dict[str, Any]) -> None:
        p, stream = part, torch.cuda.current_stream().cuda_stream
        p["ring"].backward(p["q"], p["k"], p["v"], p["o"], p["lse"], p["do"], dq=p["dq"], dk=p["dk"], dv=p["dv"], stream=stream)

    def run(self, what: str) -> Function:
        """One call on the current stream; rings of several ranks by wall_clock() instead."""
        function = getattr(self, what)
        return lambda: function(self.parts[0])

    def wall_clock(self, what: str, least_ms: float = 80.0) -> float:
        """Milliseconds of one pass of all ranks, each on a stream of its own."""
        function = getattr(self, what)

        def body(rank: int, calls: int) -> None:
            with torch.cuda.stream(self.parts[rank]["stream"]):
                for _ in range(calls):
                    function(self.parts[rank])

        def timed(calls: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.on_ranks(lambda rank: body(rank, calls))
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / calls * 1e3

        timed(1)
        return timed(max(1, math.ceil(least_ms / timed(2))))


def longnet_pattern(causal: bool, interleaved: bool = False) -> annulus.Pattern:
    return annulus.Pattern.longnet(HEADS, SEGMENTS, DILATIONS, causal=causal, offsets="interleaved" if interleaved else "blocked")


def longnet_flops(tokens: int, dim: int, causal: bool, backward: bool) -> float:
    pairs = sum(tokens / w * HEADS * (w / r) ** 2 for w, r in zip(SEGMENTS, DILATIONS, strict=True))
    return pairs * dim * (10 if backward else 4) * (0.5 if causal else 1)


class Report:
    def __init__(self, only: list[str], rounds: int, seconds: float) -> None:
        self.only, self.rounds, self.end = only, rounds, time.time() + seconds
        self.cases: list[dict[str, Any]] = []

    def wants(self, *names: str) -> bool:
        return time.time() < self.end and (not self.only or any(o in n for o in self.only for n in names))

    def add(self, name: str, ours: float, peer: str, peer_ms: float, flops: float | None = None) -> None:
        row: dict[str, Any] = dict(name=name, ours_ms=ours, peer=peer, peer_ms=peer_ms, ratio=ours / peer_ms)
        if flops:
            row["tflops"] = flops / ours / 1e9
        self.cases.append(row)
        rate = f"{row['tflops']:5.0f} TFLOP/s" if flops else ""
        print(f"{name:48s} {ours:9.3f} ms  {peer_ms:9.3f} ms {peer:24s} {row['ratio']:6.3f}  {rate}", flush=True)
