"""Compares the speed of two builds of the package.

    bench/compare_builds.py OLD_PYTHON NEW_PYTHON --out speed.json

Each PYTHON has one build and PyTorch installed. Both run as workers that take turns on the same case, in swapped order from round to
round, so that a machine that slows down slows both. A turn has as many calls as fit into --turn seconds. The ratio is the median of
new / old over rounds; 'spread' is half the distance between its quartiles. On a busy machine the ratio of the fastest turns is more
reliable. With --limit 1.01 the exit status is 1 if a ratio exceeds the limit by more than its spread. Comparing OLD with itself shows the
noise of the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from machine import cpu_name

LONGNET = {"segment_lengths": [2048, 4096, 8192, 16384, 32768], "dilation_rates": [1, 2, 4, 8, 16]}


@dataclasses.dataclass(frozen=True)
class Case:
    entry: str  # "ring" (RingAttention, results given), "whole" (attention) or "torch" (autograd)
    pattern: str
    tokens: int
    dtype: str = "fp32"
    head_dim: int = 64
    heads: int = 4
    kv_heads: int = 4
    causal: bool = False
    ranks: int = 1
    placement: str = "contiguous"

    @property
    def name(self) -> str:
        shape = f"{self.tokens} tokens h{self.heads}/{self.kv_heads} D{self.head_dim} {self.dtype}"
        ring = f" P{self.ranks} {self.placement}" if self.ranks > 1 else ""
        return f"{self.entry} {self.pattern}{' causal' * self.causal} {shape}{ring}"


def cases() -> list[Case]:
    out = []
    for dtype in ("fp32", "bf16"):
        for head_dim in (64, 128):
            out.append(Case("ring", "dense", 1024, dtype, head_dim))
        out.append(Case("ring", "dense", 4096, dtype))
        out.append(Case("ring", "dense", 4096, dtype, 128, heads=2, kv_heads=1, causal=True))
        out.append(Case("ring", "longnet", 32768, dtype, heads=2, kv_heads=2))
        out.append(Case("ring", "longnet", 32768, dtype, heads=4, kv_heads=1, causal=True))
        out.append(Case("ring", "dense", 4096, dtype, ranks=4))
        out.append(Case("ring", "dense", 4096, dtype, ranks=4, causal=True, placement="zigzag"))
        out.append(Case("ring", "longnet", 32768, dtype, heads=2, kv_heads=2, ranks=4))
    out.append(Case("ring", "dense", 1024, "fp16"))
    # Hardly any work: these measure the cost of a call.
    for ranks in (1, 4):
        out.append(Case("ring", "dense", 64, heads=1, kv_heads=1, ranks=ranks))
    out.append(Case("ring", "dense", 64, "bf16", heads=1, kv_heads=1))
    out.append(Case("whole", "dense", 64, heads=1, kv_heads=1))
    out.append(Case("whole", "dense", 64, heads=1, kv_heads=1, ranks=4))
    out.append(Case("torch", "dense", 64, heads=1, kv_heads=1))
    return out


# The worker: imports the package of its interpreter, answers one line of JSON to every line of JSON.


def prepare(case: Case) -> dict[str, Callable[[int], None]]:
    """By pass: a function that does it so many times."""
    import annulus
    import annulus.torch
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    generator = torch.Generator().manual_seed(4)

    def normal(heads: int) -> torch.Tensor:
        shape = (1, case.tokens, heads, case.head_dim)
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v, do = (normal(h) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads))
    branches = LONGNET if case.pattern == "longnet" else {}
    pattern = (
        annulus.Pattern.longnet(case.heads, *branches.values(), causal=case.causal)
        if branches
        else annulus.Pattern.dense(case.heads, case.causal)
    )
    if case.entry == "torch":
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def torch_forward(calls: int) -> None:
            with torch.no_grad():
                for _ in range(calls):
                    annulus.torch.ring_attention(q, k, v, is_causal=case.causal, **branches)

        def torch_both(calls: int) -> None:
            for _ in range(calls):
                o = annulus.torch.ring_attention(*leaves, is_causal=case.causal, **branches)
                torch.autograd.grad(o, leaves, do)

        return {"forward": torch_forward, "forward and backward": torch_both}
    if case.entry == "whole":
        options = dict(pattern=pattern, ranks=case.ranks, placement=case.placement)
        o, lse = annulus.attention(q, k, v, return_lse=True, **options)

        def whole_forward(calls: int) -> None:
            for _ in range(calls):
                annulus.attention(q, k, v, out=o, **options)

        def whole_backward(calls: int) -> None:
            for _ in range(calls):
                annulus.attention_backward(q, k, v, o, lse, do, **options)

        return {"forward": whole_forward, "backward": whole_backward}
    return prepare_ring(case, pattern, dtype, (q, k, v, do))


def prepare_ring(case: Case, pattern: Any, dtype: Any, arrays: Any) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor

    import annulus
    import torch

    placement = annulus.Placement.named(case.placement, case.tokens, case.ranks)
    # The ranks' threads live as long as the case; a turn of many calls wakes them once.
    threads = ThreadPoolExecutor(case.ranks)

    def on_ranks(body: Callable[[int], Any]) -> list[Any]:
        if case.ranks == 1:
            return [body(0)]
        return [f.result() for f in [threads.submit(body, rank) for rank in range(case.ranks)]]

    transports = annulus.make_in_process_ring(case.ranks)
    rings = on_ranks(
        lambda rank: annulus.RingAttention(
            pattern,
            placement,
            transport=transports[rank],
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=dtype,
        )
    )
    mine = []
    for rank in range(case.ranks):
        index = torch.from_numpy(placement.positions(rank))
        q, k, v, do = (x.index_select(1, index) for x in arrays)
        o, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
        mine.append((q, k, v, o, lse, do, *(torch.empty_like(x) for x in (q, k, v))))

    def forward(calls: int) -> None:
        def body(rank: int) -> None:
            for _ in range(calls):
                rings[rank].forward(*mine[rank][:5])

        on_ranks(body)

    def backward(calls: int) -> None:
        def body(rank: int) -> None:
            for _ in range(calls):
                rings[rank].backward(*mine[rank])

        on_ranks(body)

    return {"forward": forward, "backward": backward}


def work() -> None:
    import annulus

    # Results go to where standard output was; what anybody prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(
        json.dumps({"file": annulus.__file__, "isa": annulus.isa(), "threads": annulus.threads()}),
        file=answers,
        flush=True,
    )
    passes: dict[str, Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if "case" in order:
            passes = {}  # frees the last case before the next is made
            passes = prepare(Case(**order["case"]))
            for body in passes.values():
                body(1)
            answer = list(passes)
        else:
            start = time.perf_counter()
            passes[order["pass"]](order["calls"])
            answer = (time.perf_counter() - start) / order["calls"]
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self.read()

    def read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[0]} ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, **order: Any) -> Any:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(old: Worker, new: Worker, which: str, rounds: int, turn: float) -> dict[str, Any]:
    once = min(worker.ask(**{"pass": which, "calls": 1}) for worker in (old, new))
    calls = max(1, math.ceil(turn / max(once, 1e-6)))
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        order = ((0, old), (1, new)) if index % 2 == 0 else ((1, new), (0, old))
        for side, worker in order:
            seconds[side].append(worker.ask(**{"pass": which, "calls": calls}))
    ratios = [b / a for a, b in zip(*seconds)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "calls": calls,
        "old_seconds": statistics.median(seconds[0]),
        "new_seconds": statistics.median(seconds[1]),
        "ratio": statistics.median(ratios),
        "spread": (quartiles[2] - quartiles[0]) / 2,
        "ratio_of_fastest": min(seconds[1]) / min(seconds[0]),
    }


def main() -> int:
    if sys.argv[1:] == ["--work"]:
        work()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn", type=float, default=0.1, help="seconds of one turn, at least")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--limit", type=float, help="fail if a ratio is larger")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds is less than 2: there would be no spread")
    old, new = Worker(arguments.old), Worker(arguments.new)
    print(f"{cpu_name()}: old {old.about}, new {new.about}", flush=True)
    rows, slower = [], []
    for case in cases():
        if arguments.only not in case.name:
            continue
        passes = [worker.ask(case=dataclasses.asdict(case)) for worker in (old, new)][0]
        for which in passes:
            row = measure(old, new, which, arguments.rounds, arguments.turn)
            rows.append({"case": case.name, "pass": which, **dataclasses.asdict(case), **row})
            text = (
                f"{case.name:58} {which:20} {1e3 * row['old_seconds']:9.3f} {1e3 * row['new_seconds']:9.3f} ms"
                f"  {row['ratio']:.3f} +- {row['spread']:.3f}  fastest {row['ratio_of_fastest']:.3f}"
            )
            print(text, flush=True)
            if arguments.limit and row["ratio"] - row["spread"] > arguments.limit:
                slower.append(text)
    old.end()
    new.end()
    if arguments.out:
        document = {"cpu": cpu_name(), "old": old.about, "new": new.about, "cases": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if slower:
        print("\n".join(["slower than the limit:", *slower]))
    return 1 if slower or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
