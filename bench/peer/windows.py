"""Compares causal windows with PyTorch's FlexAttention (compiled) and SDPA with a dense mask, by medians of alternating runs in one
process. Needs the package ('make python').

    .venv/bin/python bench/peer/windows.py --out bench/results/windows.json

Suites: window (each token attends to itself and the 1,023 before it), dilated (to 64 tokens at distances of 0, 16, 32, ...).
Forward of both; backward against SDPA with the mask, because FlexAttention has none on the CPU. SDPA runs in float32 and bfloat16
with a boolean mask; blocks of the mask that FlexAttention may skip are made once, before the clock starts. A ratio is the time of
PyTorch over ours: above 1 Annulus is faster.
"""

import argparse
import json
import pathlib
import statistics
import sys

import annulus
import torch
import torch.nn.functional as F
from annulus.torch import ring_attention
from measure import DTYPES, alternate, make, relative_rms, summary
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from machine import commit, cpu_name

HEADS, DIM = 8, 64
# name: (options of ring_attention, for a sequence of n tokens; whether a query sees a key at this distance)
CASES = {
    "window": (lambda n: {"window": (1023, 0)}, lambda d: (d >= 0) & (d < 1024)),
    "dilated": (
        lambda n: {
            "segment_lengths": [n],
            "dilation_rates": [16],
            "offsets": "all",
            "window": (63 * 16, 0),
        },
        lambda d: (d >= 0) & (d < 1024) & (d % 16 == 0),
    ),
}


def report(row):
    times = {name: side["median"] for name, side in row["seconds"].items()}
    print(
        f"{row['case']:8} {row['direction']:8} {row['dtype']} {row['tokens']:6} tokens: "
        + ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in times.items())
        + "; ratios "
        + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row["ratios"].items()),
        flush=True,
    )


def measured(case, direction, dtype, tokens, bodies, repeat):
    """A row of the result, given {"annulus": body, peer: body, ...}."""
    seconds = dict(zip(bodies, alternate(list(bodies.values()), repeat)))
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
        sys.exit(f"windows: {name}: results differ by {difference:.2e} (limit {limit:.0e}): nothing was timed")


def rows_of(case, dtype, tokens, args):
    options_of, sees = CASES[case]
    options = {"is_causal": True, **options_of(tokens)}
    q, k, v, dout = make((1, tokens, HEADS, DIM), dtype, 4)
    tq, tk, tv, tdout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    where = torch.arange(tokens)
    mask = sees(where[:, None] - where)
    block_mask = create_block_mask(
        lambda b, h, query, key: sees(query - key), None, None, tokens, tokens, device="cpu"
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    limit = 1e-5 if dtype == "fp32" else 2e-2

    with torch.no_grad():
        bodies = {
            "annulus": lambda: (ring_attention(q, k, v, **options), None)[1],
            "flex": lambda: (compiled(tq, tk, tv, block_mask=block_mask), None)[1],
            "sdpa": lambda: (F.scaled_dot_product_attention(tq, tk, tv, attn_mask=mask), None)[1],
        }
        if args.skip_sdpa:
            del bodies["sdpa"]
        ours = ring_attention(q, k, v, **options).transpose(1, 2)
        check(f"{case} flex", ours, compiled(tq, tk, tv, block_mask=block_mask), limit)
        if not args.skip_sdpa:
            check(f"{case} sdpa", ours, F.scaled_dot_product_attention(tq, tk, tv, attn_mask=mask), limit)
        rows = [measured(case, "forward", dtype, tokens, bodies, args.repeat)]
    if args.skip_sdpa:
        return rows

    leaves = [x.requires_grad_() for x in (q, k, v)]
    peers = [x.requires_grad_() for x in (tq, tk, tv)]
    o = ring_attention(*leaves, **options)
    other = F.scaled_dot_product_attention(*peers, attn_mask=mask)
    ours = torch.autograd.grad(o, leaves, dout, retain_graph=True)
    theirs = torch.autograd.grad(other, peers, tdout, retain_graph=True)
    for name, a, b in zip(("dq", "dk", "dv"), ours, theirs):
        check(f"{case} {name}", a.transpose(1, 2), b, limit)
    bodies = {
        "annulus": lambda: (torch.autograd.grad(o, leaves, dout, retain_graph=True), None)[1],
        "sdpa": lambda: (torch.autograd.grad(other, peers, tdout, retain_graph=True), None)[1],
    }
    return [*rows, measured(case, "backward", dtype, tokens, bodies, args.repeat)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--skip-sdpa", action="store_true", help="FlexAttention and forward only")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
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
    print(f"{result['cpu']}, {result['isa']}, {args.threads} threads, PyTorch {torch.__version__}", flush=True)
    for case in args.suite:
        result["suites"][case] = []
        for dtype in args.dtypes:
            result["suites"][case] += rows_of(case, dtype, args.tokens, args)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
