"""Compares causal masks with PyTorch's FlexAttention (compiled) and SDPA, by alternating runs in one process.
Needs the package ('make python').

    .venv/bin/python bench/peer/masks.py --out bench/results/masks.json

Suites: window (each token attends to itself and the 1,023 before it), dilated_window (to 64 tokens at distances 0, 16, 32, ...),
documents (32 packed documents of random lengths). Backward is compared with SDPA alone: FlexAttention has none on the CPU. SDPA
takes a dense mask and computes all pairs, so that only short sequences are compared with it; documents are one call each. The block
mask of FlexAttention is made once and not timed. A ratio is PyTorch's time over ours.
--cpu-time takes the time of the process instead of the clock's, for one thread on a busy machine.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
import time

import annulus
import torch
import torch.nn.functional as F
from annulus.torch import ring_attention
from measure import DTYPES, alternate, make, relative_rms, summary
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from machine import commit, cpu_name

HEADS, DIM = 8, 64


class Window:
    """Causal; a token attends to itself and the tokens at the next `keys - 1` multiples of the dilation before it."""

    def __init__(self, tokens, keys, dilation):
        self.options = {"window": ((keys - 1) * dilation, 0)}
        if dilation > 1:
            self.options |= {"segment_lengths": [tokens], "dilation_rates": [dilation], "offsets": "all"}
        self.keys, self.dilation, self.tokens = keys, dilation, tokens

    def sees(self, query, key):
        distance = query - key
        inside = (distance >= 0) & (distance < self.keys * self.dilation)
        return inside & (distance % self.dilation == 0)

    def sdpa(self, args):
        """SDPA as a function of q, k and v; None where it would take too long."""
        if self.tokens > args.most_sdpa_tokens:
            return None
        where = torch.arange(self.tokens)
        mask = self.sees(where[:, None], where)
        return lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask)


class Documents:
    """Causal; packed documents of random lengths."""

    def __init__(self, tokens, count):
        cuts = [0, *sorted(random.Random(1).sample(range(1, tokens), count - 1)), tokens]
        self.options = {"cu_seqlens": cuts}
        self.ranges = list(zip(cuts, cuts[1:]))
        self.number = torch.repeat_interleave(torch.arange(count), torch.tensor(cuts).diff())

    def sees(self, query, key):
        return (query >= key) & (self.number[query] == self.number[key])

    def sdpa(self, args):
        def run(*qkv):
            parts = [F.scaled_dot_product_attention(*(x[:, :, a:b] for x in qkv), is_causal=True) for a, b in self.ranges]
            return torch.cat(parts, 2)

        return run


CASES = {
    "window": lambda tokens: Window(tokens, 1024, 1),
    "dilated_window": lambda tokens: Window(tokens, 64, 16),
    "documents": lambda tokens: Documents(tokens, 32),
}


def report(row):
    times = {name: side["median"] for name, side in row["seconds"].items()}
    print(
        f"{row['case']:14} {row['direction']:8} {row['dtype']} {row['tokens']:6} tokens: "
        + ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in times.items())
        + "; ratios "
        + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row["ratios"].items()),
        flush=True,
    )


def timed_by_cpu(body):
    def run():
        start = time.process_time()
        body()
        return time.process_time() - start

    return run


def measured(case, direction, dtype, tokens, bodies, args):
    """A row of the result, given {"annulus": body, peer: body, ...}."""
    runs = [timed_by_cpu(body) if args.cpu_time else body for body in bodies.values()]
    seconds = dict(zip(bodies, alternate(runs, args.repeat)))
    # Of neighbouring runs, so that noise of the machine affects both.
    ratios = {
        name: statistics.median(t / ours for t, ours in zip(times, seconds["annulus"]))
        for name, times in seconds.items()
        if name != "annulus"
    }
    row = {
        "case": case,
        "direction": direction,
        "dtype": dtype,
        "tokens": tokens,
        "heads": HEADS,
        "head_dim": DIM,
        "seconds": {name: summary(times) for name, times in seconds.items()},
        "ratios": ratios,
    }
    report(row)
    return row


def check(name, found, expected, limit):
    difference = relative_rms(found, expected)
    if not difference < limit:
        sys.exit(f"masks: {name}: results differ by {difference:.2e} (limit {limit:.0e}): nothing was timed")


def rows_of(case, dtype, tokens, args):
    mask = CASES[case](tokens)
    options = {"is_causal": True, "threads": args.threads, **mask.options}
    sdpa = mask.sdpa(args)
    q, k, v, dout = make((1, tokens, HEADS, DIM), dtype, 4)
    tq, tk, tv, tdout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    block_mask = create_block_mask(
        lambda b, h, query, key: mask.sees(query, key), None, None, tokens, tokens, device="cpu"
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    limit = 1e-5 if dtype == "fp32" else 2e-2

    with torch.no_grad():
        bodies = {
            "annulus": lambda: (ring_attention(q, k, v, **options), None)[1],
            "flex": lambda: (compiled(tq, tk, tv, block_mask=block_mask), None)[1],
        }
        if sdpa is not None:
            bodies["sdpa"] = lambda: (sdpa(tq, tk, tv), None)[1]
        ours = ring_attention(q, k, v, **options).transpose(1, 2)
        check(f"{case} flex", ours, compiled(tq, tk, tv, block_mask=block_mask), limit)
        if sdpa is not None:
            check(f"{case} sdpa", ours, sdpa(tq, tk, tv), limit)
        rows = [measured(case, "forward", dtype, tokens, bodies, args)]
    if sdpa is None:
        return rows

    leaves = [x.requires_grad_() for x in (q, k, v)]
    peers = [x.requires_grad_() for x in (tq, tk, tv)]
    o = ring_attention(*leaves, **options)
    other = sdpa(*peers)
    ours = torch.autograd.grad(o, leaves, dout, retain_graph=True)
    theirs = torch.autograd.grad(other, peers, tdout, retain_graph=True)
    for name, a, b in zip(("dq", "dk", "dv"), ours, theirs):
        check(f"{case} {name}", a.transpose(1, 2), b, limit)
    bodies = {
        "annulus": lambda: (torch.autograd.grad(o, leaves, dout, retain_graph=True), None)[1],
        "sdpa": lambda: (torch.autograd.grad(other, peers, tdout, retain_graph=True), None)[1],
    }
    return [*rows, measured(case, "backward", dtype, tokens, bodies, args)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--most-sdpa-tokens", type=int, default=4096, help="longest sequence that is compared with SDPA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="time of the process; needs --threads 1")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: idle threads may spin")
    torch.set_num_threads(args.threads)
    result = {
        "cpu": cpu_name(),
        "isa": annulus.isa(),
        "threads": args.threads,
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(sys.argv),
        "suites": {},
    }
    if args.cpu_time:
        result["timing"] = "time of the process"
    print(f"{result['cpu']}, {result['isa']}, {args.threads} threads, PyTorch {torch.__version__}", flush=True)
    for case in args.suite:
        result["suites"][case] = []
        for dtype in args.dtypes:
            for tokens in args.tokens:
                result["suites"][case] += rows_of(case, dtype, tokens, args)
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
