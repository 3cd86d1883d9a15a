"""Checks that two builds give the same bits, by digests of the results of some hundred small configurations.

    PYTHON_OF_OLD bench/bits.py run old.json
    PYTHON_OF_NEW bench/bits.py run new.json
    python bench/bits.py compare old.json new.json      lists what differs; exit status 1 if anything does

Each PYTHON has one build of the package and PyTorch (for bfloat16) installed. The configurations are the same in every run: all presets,
placements (with an uneven explicit one) and rings of 1 to 8 ranks, each with seeded draws of everything else: dtype, head dims, GQA, batch,
causality, schedule, travel, reproducible, mix_gradient, scales, strides, ragged lengths. Inputs depend on the configuration's name alone.
ANNULUS_ISA and ANNULUS_THREADS work as usual. Compare only runs on the same instruction set, and with the same number of threads unless
configurations are reproducible. `run FILE --only TEXT` runs the configurations whose name contains TEXT, `--every K` every K-th one.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import annulus
import annulus.torch
import numpy as np
import torch

ARRAYS = ("o", "lse", "dq", "dk", "dv")
PRESETS = ("dense", "longnet", "head_groups")
PLACEMENTS = ("contiguous", "zigzag", "striped", "hilbert", "explicit")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Head dims with kernels of their own (64, 128), the limits (8, 256) and what is padded.
HEAD_DIMS = (8, 16, 24, 40, 64, 64, 72, 128, 128, 200, 256)
BRANCHES = (
    ((16, 64), (1, 2)),
    ((32, 64, 128), (1, 2, 4)),
    ((7, 30), (1, 3)),
    ((24, 24), (2, 4)),  # segments that pair up
    ((64,), (4,)),  # leaves rows that attend to nothing
    ((50, 200), (1, 1)),
    ((6, 100), (4, 1)),  # a segment that the dilation does not divide
)


@dataclasses.dataclass(frozen=True)
class Case:
    entry: str  # "ring" (RingAttention), "whole" (attention) or "torch" (autograd)
    preset: str
    placement: str
    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    causal: bool
    branches: int  # of BRANCHES
    offsets: str
    group_scale: bool
    scale: float | None
    schedule: str
    travel: str
    reproducible: bool
    mix: str
    layout: (
        str  # "dense", "transposed" (heads before tokens in memory) or "padded" (gaps between rows)
    )
    spread: float  # standard deviation of q and k: large ones make softmax one-hot

    @property
    def name(self) -> str:
        words = [self.entry, self.preset, "causal" if self.causal else "full"]
        if self.preset != "dense":
            segments, dilations = BRANCHES[self.branches]
            words += ["-".join(f"{s}x{d}" for s, d in zip(segments, dilations))]
            words += [self.offsets] * (self.preset == "longnet")
            words += ["group_scale"] * self.group_scale + [self.mix] * (self.mix != "full")
        words += [f"{self.placement}{self.ranks}", self.schedule, f"travel_{self.travel}"]
        words += ["reproducible"] * self.reproducible
        words += [f"b{self.batch}t{self.tokens}h{self.heads}kv{self.kv_heads}d{self.head_dim}"]
        words += [self.dtype, self.layout]
        words += [f"scale{self.scale}"] * (self.scale is not None)
        words += [f"spread{self.spread:g}"] * (self.spread != 1)
        return "/".join(words)

    @property
    def pattern(self) -> annulus.Pattern:
        if self.preset == "dense":
            return annulus.Pattern.dense(self.heads, self.causal)
        segments, dilations = BRANCHES[self.branches]
        if self.preset == "longnet":
            return annulus.Pattern.longnet(
                self.heads, segments, dilations, self.causal, self.offsets, self.group_scale
            )
        return annulus.Pattern.head_groups(
            self.heads, segments, dilations, self.causal, self.group_scale
        )


def draw(random_: random.Random, entry: str, preset: str, placement: str, ranks: int) -> Case:
    choose = random_.choice
    kv_heads = choose((1, 1, 2, 3))
    heads = kv_heads * choose((1, 2, 4))
    branches = random_.randrange(len(BRANCHES))
    if preset == "head_groups" and heads < len(BRANCHES[branches][0]):
        heads, kv_heads = 4, choose((1, 2, 4))
    mix = choose(("full", "full", "detached"))
    if preset != "longnet" or entry == "whole":
        mix = "full"
    reproducible = random_.random() < 0.25
    return Case(
        entry=entry,
        preset=preset,
        placement=placement,
        ranks=ranks,
        tokens=choose((5, 61, 128, 203, 256, 331, 400)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=choose(HEAD_DIMS),
        batch=choose((1, 1, 2, 3)),
        dtype=choose(tuple(DTYPES)),
        causal=random_.random() < 0.5,
        branches=branches,
        offsets=choose(("blocked", "interleaved")) if preset == "longnet" else "blocked",
        group_scale=random_.random() < 0.3,
        scale=choose((None, None, 0.3)),
        schedule=choose(("gather", "auto") if reproducible else ("ring", "ring", "gather", "auto")),
        travel=choose(("auto", "keys", "queries")) if entry == "ring" else "auto",
        reproducible=reproducible,
        mix=mix,
        layout=choose(("dense", "dense", "transposed", "padded")),
        spread=choose((1.0, 1.0, 1.0, 1.0, 8.0)),
    )


def cases() -> list[Case]:
    random_ = random.Random("annulus bits 1")
    out = []
    for _ in range(3):
        for preset in PRESETS:
            for placement in PLACEMENTS:
                for ranks in range(1, 9):
                    out.append(draw(random_, "ring", preset, placement, ranks))
    # Long enough that queries and keys need several tasks, blocks and chunks.
    for preset in PRESETS:
        for dtype in DTYPES:
            for head_dim in (64, 128, 40):
                case = draw(random_, "ring", preset, random_.choice(PLACEMENTS), 1)
                out.append(
                    dataclasses.replace(
                        case,
                        ranks=random_.choice((1, 2, 3)),
                        tokens=random_.choice((2300, 2816)) if preset == "dense" else 5000,
                        heads=2 if preset == "dense" else 4,
                        kv_heads=random_.choice((1, 2)),
                        batch=1,
                        dtype=dtype,
                        head_dim=head_dim,
                    )
                )
    for entry, placements in (("whole", PLACEMENTS), ("torch", ("contiguous",))):
        for preset in PRESETS:
            for _ in range(8):
                ranks = random_.randint(1, 4) if entry == "whole" else 1
                out.append(draw(random_, entry, preset, random_.choice(placements), ranks))
    names = [case.name for case in out]
    assert len(set(names)) == len(names)
    return out


def uneven(tokens: int, ranks: int, random_: random.Random) -> annulus.Placement:
    """Chunks of random lengths, dealt out; rank 0 has every other token of its first chunk, the last rank the rest of them."""
    cuts = sorted(random_.randint(0, tokens) for _ in range(3 * ranks - 1))
    chunks = [range(a, b) for a, b in zip([0, *cuts], [*cuts, tokens])]
    ranges: list[list[range]] = [[] for _ in range(ranks)]
    for index, chunk in enumerate(chunks):
        if index == 0 and len(chunk) > 1:
            ranges[0].append(chunk[::2])
            ranges[-1].append(chunk[1::2])
        elif len(chunk) > 0:
            ranges[random_.randrange(ranks)].append(chunk)
    return annulus.Placement.explicit(tokens, ranges)


def inputs(case: Case) -> list[torch.Tensor]:
    """q, k, v and the gradient of o, whole sequences, from a generator that every NumPy has."""
    generator = np.random.RandomState(zlib.crc32(case.name.encode()))
    out = []
    for heads, spread in (
        (case.heads, case.spread),
        (case.kv_heads, case.spread),
        (case.kv_heads, 1.0),
        (case.heads, 1.0),
    ):
        shape = (case.batch, case.tokens, heads, case.head_dim)
        values = generator.standard_normal(shape) * spread
        out.append(torch.from_numpy(values.astype(np.float32)).to(DTYPES[case.dtype]))
    return out


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x.contiguous()


def on_ranks(ranks: int, body: Callable[[Any], Any]) -> list[Any]:
    results: list[Any] = [None] * ranks
    transports = annulus.make_in_process_ring(ranks)

    def main(rank: int) -> None:
        try:
            results[rank] = body(transports[rank])
        except Exception as error:  # reported by the caller
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def compute(case: Case) -> list[list[torch.Tensor]]:
    """o, lse, dq, dk, dv of each rank."""
    q, k, v, do = (lay_out(x, case.layout) for x in inputs(case))
    random_ = random.Random(case.name)
    placement = (
        uneven(case.tokens, case.ranks, random_)
        if case.placement == "explicit"
        else annulus.Placement.named(case.placement, case.tokens, case.ranks)
    )
    if case.entry == "torch":
        segments, dilations = BRANCHES[case.branches] if case.preset != "dense" else (None, None)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = annulus.torch.ring_attention(
            *leaves,
            segment_lengths=segments,
            dilation_rates=dilations,
            pattern=case.preset,
            is_causal=case.causal,
            offsets=case.offsets,
            mix_gradient=case.mix,
            group_scale=case.group_scale and case.preset != "dense",
            scale=case.scale,
            schedule=case.schedule,
            reproducible=case.reproducible,
            return_lse=True,
        )
        return [[o.detach(), lse, *torch.autograd.grad(o, leaves, do)]]
    if case.entry == "whole":
        options = dict(
            pattern=case.pattern,
            scale=case.scale,
            ranks=case.ranks,
            placement=placement,
            schedule=case.schedule,
            reproducible=case.reproducible,
        )
        o, lse = annulus.attention(q, k, v, return_lse=True, **options)
        return [[o, lse, *annulus.attention_backward(q, k, v, o, lse, do, **options)]]

    def body(transport: Any) -> list[torch.Tensor]:
        ring = annulus.RingAttention(
            case.pattern,
            placement,
            transport=transport,
            batch=case.batch,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=DTYPES[case.dtype],
            scale=case.scale,
            mix_gradient=case.mix,
            schedule=case.schedule,
            reproducible=case.reproducible,
            backward_travel=case.travel,
            # For "auto": below the limit it gathers, above it the bytes decide.
            min_tokens_for_ring=1 if case.tokens % 2 == 1 else 32768,
        )
        index = torch.from_numpy(placement.positions(transport.rank()))
        mine = [lay_out(x.index_select(1, index), case.layout) for x in (q, k, v, do)]
        state = ring.make_branch_state() if case.mix == "detached" else None
        o, lse = ring.forward(*mine[:3], state=state)
        return [o, lse, *ring.backward(*mine[:3], o, lse, mine[3], state=state)]

    return on_ranks(case.ranks, body)


def digests(results: list[list[torch.Tensor]]) -> dict[str, str]:
    out = {}
    for index, name in enumerate(ARRAYS):
        sha = hashlib.sha256()
        for rank in results:
            x = rank[index].contiguous()
            sha.update(repr((tuple(x.shape), str(x.dtype))).encode())
            sha.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        out[name] = sha.hexdigest()
    return out


def run(path: pathlib.Path, only: str, every: int) -> int:
    start = time.monotonic()
    chosen = [case for case in cases() if only in case.name][::every]
    found: dict[str, Any] = {}
    failed = 0
    for case in chosen:
        try:
            found[case.name] = digests(compute(case))
        except Exception as error:
            failed += 1
            found[case.name] = f"{type(error).__name__}: {error}"
            print(f"{case.name}: {found[case.name]}", file=sys.stderr)
    document = {"isa": annulus.isa(), "threads": annulus.threads(), "cases": found}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{len(chosen)} configurations, {failed} failed, on {document['isa']} with {document['threads']} "
        f"threads in {time.monotonic() - start:.1f} s: {path}"
    )
    return 1 if failed or not chosen else 0


def compare(old_path: pathlib.Path, new_path: pathlib.Path) -> int:
    old, new = json.loads(old_path.read_text()), json.loads(new_path.read_text())
    if old["isa"] != new["isa"]:
        print(f"computed on {old['isa']} and {new['isa']}: set ANNULUS_ISA for both runs")
        return 1
    names = list(dict.fromkeys([*old["cases"], *new["cases"]]))
    if old["threads"] != new["threads"]:
        print(
            f"computed with {old['threads']} and {new['threads']} threads, among which work is split: only "
            "reproducible configurations are compared"
        )
        names = [name for name in names if "/reproducible/" in name]
    different = 0
    for name in names:
        a, b = old["cases"].get(name), new["cases"].get(name)
        if a == b and isinstance(a, dict):
            continue
        different += 1
        if a is None or b is None:
            print(f"{name}: only in {old_path if b is None else new_path}")
        elif isinstance(a, dict) and isinstance(b, dict):
            print(f"{name}: {', '.join(x for x in ARRAYS if a[x] != b[x])}")
        else:
            print(f"{name}: {a if isinstance(a, str) else b}")
    print(f"{len(names)} configurations on {old['isa']}: {different or 'none'} differ")
    return 1 if different or not names else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="write the digests of the installed package")
    command.add_argument("file", type=pathlib.Path)
    command.add_argument("--only", default="", help="configurations whose name contains this")
    command.add_argument("--every", type=int, default=1, help="one configuration of this many")
    command = commands.add_parser("compare", help="two such files")
    command.add_argument("old", type=pathlib.Path)
    command.add_argument("new", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments.old, arguments.new)
    return run(arguments.file, arguments.only, arguments.every)


if __name__ == "__main__":
    sys.exit(main())
