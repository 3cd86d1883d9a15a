"""Compares Annulus with PyTorch on identical tensors, by medians of alternating runs in one process, so that noise affects both.

    make pytorch-bench                       everything; results go to bench/results/
    .venv/bin/python bench/peer/versus_pytorch.py --suite forward backward --repeat 9 --out FILE.json

Suites: forward, backward (dense SDPA), peaky (large logits), dilated (r = 1..16 at equal FLOPs), longnet (131,072 tokens against
index + SDPA + merge), one_head (two threads against one), ring (P = 4 against P = 1), scaling (2N against N).
"""

import statistics
import sys

import torch
import torch.nn.functional as F
from measure import (
    DILATIONS,
    SEGMENTS,
    Annulus,
    alternate,
    make,
    pairs,
    parser_of,
    relative_rms,
    run_suites,
    summary,
)


def check(name, ours, theirs, limit):
    difference = relative_rms(ours, theirs)
    if not difference < limit:
        sys.exit(
            f"versus_pytorch: {name}: results differ by {difference:.2e} relative (limit {limit:.0e}): nothing was timed"
        )
    return difference


def peak(dtype, threads):
    native = dtype == "bf16" and Annulus.lib.annulus_bench_isa() in (b"amx_bf16", b"avx512_bf16")
    return Annulus.lib.annulus_bench_peak_gflops(int(native)) * threads


def dense_case(direction, dtype, dim, tokens, causal, args, scale=1.0):
    shape = (1, tokens, 8, dim)
    q, k, v, dout = make(shape, dtype, 4, scale)
    o = torch.empty_like(q)
    lse = torch.empty(shape[:3], dtype=torch.float32)
    ring = Annulus(shape, dtype, causal, threads=args.threads)
    # SDPA's own layout, contiguous: [batch, heads, tokens, dim].
    tq, tk, tv, tdo = [t.transpose(1, 2).contiguous() for t in (q, k, v, dout)]
    limit = 1e-5 if dtype == "fp32" else 2e-2
    ring.forward(q, k, v, o, lse)
    repeat = max(3, args.repeat if tokens <= 1024 else args.repeat // 2)
    if direction == "forward":
        check(
            f"forward {dtype}",
            o.transpose(1, 2),
            F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal),
            limit,
        )
        ours, theirs = alternate(
            [
                lambda: ring.forward(q, k, v, o, lse),
                lambda: (F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal), None)[1],
            ],
            repeat,
        )
        flops = 4
    else:
        grads = [torch.empty_like(q) for _ in range(3)]
        for t in (tq, tk, tv):
            t.requires_grad_(True)
        out = F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal)
        ring.backward(q, k, v, o, lse, dout, *grads)
        expected = torch.autograd.grad(out, (tq, tk, tv), tdo, retain_graph=True)
        for name, g, e in zip(("dq", "dk", "dv"), grads, expected):
            check(f"backward {name} {dtype}", g.transpose(1, 2), e, limit)
        ours, theirs = alternate(
            [
                lambda: ring.backward(q, k, v, o, lse, dout, *grads),
                lambda: (torch.autograd.grad(out, (tq, tk, tv), tdo, retain_graph=True), None)[1],
            ],
            repeat,
        )
        flops = 10
    work = flops * dim * 8 * pairs(tokens, causal)
    roof = peak(dtype, args.threads)
    a, b = summary(ours), summary(theirs)
    return {
        "direction": direction,
        "dtype": dtype,
        "head_dim": dim,
        "tokens": tokens,
        "causal": causal,
        "logit_scale": scale,
        "annulus": a,
        "pytorch": b,
        "ratio": b["median"] / a["median"],
        "annulus_gflops": work / a["median"] / 1e9,
        "pytorch_gflops": work / b["median"] / 1e9,
        "peak_gflops": roof,
        "share_of_peak": work / a["median"] / 1e9 / roof,
    }


def suite_dense(direction, args):
    rows = []
    for dtype in args.dtypes:
        for dim in (64, 128):
            for tokens in (512, 1024, 2048, 4096):
                for causal in (False, True):
                    rows.append(dense_case(direction, dtype, dim, tokens, causal, args))
                    report(rows[-1])
    return rows


def report(row):
    print(
        "{direction:8} {dtype} D={head_dim:<3} s={tokens:<5} {kind:6} {annulus_gflops:7.1f} GFLOP/s {share:5.1f} % of peak, "
        "PyTorch {pytorch_gflops:7.1f}: {ratio:.2f}x".format(
            kind="causal" if row["causal"] else "full", share=100 * row["share_of_peak"], **row
        ),
        flush=True,
    )


def suite_peaky(args):
    """Logits of standard deviation 9 (q and k three times as large) against ordinary ones."""
    rows = []
    for dim in (64, 128):
        shape = (1, 2048, 8, dim)
        plain, spread = make(shape, "fp32", 3), make(shape, "fp32", 3, 3.0)
        o, lse = torch.empty(shape), torch.empty(shape[:3])
        ring = Annulus(shape, "fp32", False, threads=args.threads)
        a, b = alternate(
            [lambda: ring.forward(*plain, o, lse), lambda: ring.forward(*spread, o, lse)],
            args.repeat,
        )
        ratio = statistics.median(b) / statistics.median(a)
        rows.append(
            {
                "head_dim": dim,
                "tokens": 2048,
                "ordinary": summary(a),
                "peaky": summary(b),
                "ratio": ratio,
            }
        )
        print(
            f"peaky    fp32 D={dim:<3} s=2048: {ratio:.3f} of the time of ordinary logits",
            flush=True,
        )
    return rows


def suite_dilated(args):
    """One branch of segment 512 r^2 and dilation r: the same sequence, the same FLOPs, rows ever further apart."""
    rows = []
    rates = (1, 2, 4, 8, 16)
    shape = (1, 131072, 8, 64)
    for dtype in args.dtypes:
        q, k, v = make(shape, dtype, 3)
        o, lse = torch.empty_like(q), torch.empty(shape[:3])
        for causal in (False, True):
            rings = [
                Annulus(
                    shape,
                    dtype,
                    causal,
                    branches=[(512 * r * r, r)],
                    threads=args.threads,
                    backward=False,
                )
                for r in rates
            ]
            seconds = alternate(
                [lambda ring=ring: ring.forward(q, k, v, o, lse) for ring in rings], args.repeat
            )
            base = statistics.median(seconds[0])
            for r, s in zip(rates, seconds):
                rows.append(
                    {
                        "dtype": dtype,
                        "causal": causal,
                        "dilation": r,
                        "seconds": summary(s),
                        "ratio": statistics.median(s) / base,
                    }
                )
            print(
                f"dilated  {dtype} {'causal' if causal else 'full':6} time over r = 1: "
                + ", ".join(f"r={r['dilation']} {r['ratio']:.3f}" for r in rows[-5:]),
                flush=True,
            )
    return rows


def longnet_pytorch(q, k, v, causal, heads):
    """LongNet in plain PyTorch: for each branch and offset slice, SDPA with log-sum-exp and scatter; then merge."""
    batch, tokens, _, dim = q.shape
    outs, lses = [], []
    for w, r in zip(SEGMENTS, DILATIONS):
        o_b = torch.zeros_like(q)
        l_b = torch.full((batch, tokens, heads), float("-inf"))
        per = -(-heads // r)
        for offset in range(-(-heads // per)):
            h = slice(offset * per, min(heads, (offset + 1) * per))
            # [segments, heads, rows, dim]
            parts = [
                t[:, offset::r, h].reshape(tokens // w, w // r, -1, dim).transpose(1, 2)
                for t in (q, k, v)
            ]
            o_s, l_s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, causal
            )
            o_b[:, offset::r, h] = o_s.transpose(1, 2).reshape(batch, tokens // r, -1, dim)
            # The op returns [segments, rows, heads] in some builds and [segments, heads, rows] in others.
            l_s = l_s if l_s.shape[1] == w // r and l_s.shape[2] != w // r else l_s.transpose(1, 2)
            l_b[:, offset::r, h] = l_s.reshape(batch, tokens // r, -1)
        outs.append(o_b)
        lses.append(l_b)
    lse = torch.stack(lses)
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total)
    out = torch.zeros_like(q, dtype=torch.float32)
    for o_b, weight in zip(outs, weights):
        out += o_b * weight.unsqueeze(-1)
    return out.to(q.dtype), total


def longnet_pytorch_backward(q, k, v, out, lse, dout, causal, heads):
    """Its gradients: flash attention's for each branch and offset, with the merged output and log-sum-exp. One batch entry."""
    _, tokens, _, dim = q.shape
    sums = [torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v)]
    for w, r in zip(SEGMENTS, DILATIONS):
        per = -(-heads // r)
        for offset in range(-(-heads // per)):
            h = slice(offset * per, min(heads, (offset + 1) * per))
            parts = [
                t[:, offset::r, h].reshape(tokens // w, w // r, -1, dim).transpose(1, 2)
                for t in (dout, q, k, v, out)
            ]
            l_s = lse[:, offset::r, h].reshape(tokens // w, w // r, -1).transpose(1, 2)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *parts, l_s, 0.0, causal
            )
            for total, part in zip(sums, grads):
                total[:, offset::r, h] += part.transpose(1, 2).reshape(1, tokens // r, -1, dim)
    return [total.to(q.dtype) for total in sums]


def suite_longnet(args):
    rows = []
    for dtype in args.dtypes:
        for causal in (False, True):
            shape = (1, 131072, 8, 64)
            q, k, v = make(shape, dtype, 3)
            o, lse = torch.empty_like(q), torch.empty(shape[:3])
            ring = Annulus(
                shape,
                dtype,
                causal,
                branches=list(zip(SEGMENTS, DILATIONS)),
                threads=args.threads,
                backward=False,
            )
            ring.forward(q, k, v, o, lse)
            expected, _ = longnet_pytorch(q, k, v, causal, 8)
            error = check(f"longnet {dtype}", o, expected, 1e-5 if dtype == "fp32" else 2e-2)
            a, b = alternate(
                [
                    lambda: ring.forward(q, k, v, o, lse),
                    lambda: (longnet_pytorch(q, k, v, causal, 8), None)[1],
                ],
                max(3, args.repeat // 3),
            )
            rows.append(
                {
                    "dtype": dtype,
                    "causal": causal,
                    "tokens": 131072,
                    "annulus": summary(a),
                    "pytorch": summary(b),
                    "ratio": statistics.median(b) / statistics.median(a),
                    "relative_difference": error,
                }
            )
            print(
                f"longnet  {dtype} {'causal' if causal else 'full':6} 131,072 tokens: {statistics.median(a):.2f} s, PyTorch "
                f"{statistics.median(b):.2f} s: {rows[-1]['ratio']:.2f}x",
                flush=True,
            )
    return rows


def suite_one_head(args):
    rows = []
    for direction in ("forward", "backward"):
        for causal in (False, True):
            shape = (1, 4096, 1, 64)
            q, k, v, dout = make(shape, "fp32", 4)
            o, lse = torch.empty_like(q), torch.empty(shape[:3])
            grads = [torch.empty_like(q) for _ in range(3)]
            rings = [Annulus(shape, "fp32", causal, threads=t) for t in (1, args.threads)]
            rings[0].forward(q, k, v, o, lse)
            bodies = [
                (
                    (lambda r=r: r.forward(q, k, v, o, lse))
                    if direction == "forward"
                    else (lambda r=r: r.backward(q, k, v, o, lse, dout, *grads))
                )
                for r in rings
            ]
            one, many = alternate(bodies, args.repeat)
            ratio = statistics.median(one) / statistics.median(many)
            rows.append(
                {
                    "direction": direction,
                    "causal": causal,
                    "tokens": 4096,
                    "threads": args.threads,
                    "speedup": ratio,
                }
            )
            print(
                f"one head {direction} {'causal' if causal else 'full':6} s=4096: {ratio:.2f}x with {args.threads} threads",
                flush=True,
            )
    return rows


def suite_ring(args):
    rows = []
    for name, branches, tokens in (
        ("longnet", list(zip(SEGMENTS, DILATIONS)), 65536),
        ("dense", [], 8192),
    ):
        for schedule, label in ((0, "ring"), (1, "gather")):
            shape = (1, tokens, 8, 64)
            q, k, v, dout = make(shape, "fp32", 4)
            o, lse = torch.empty_like(q), torch.empty(shape[:3])
            grads = [torch.empty_like(q) for _ in range(3)]
            rings = [
                Annulus(
                    shape,
                    "fp32",
                    False,
                    branches=branches,
                    ranks=p,
                    threads=args.threads,
                    schedule=schedule,
                )
                for p in (1, 4)
            ]
            for direction in ("forward", "backward"):
                bodies = [
                    (
                        (lambda r=r: r.forward(q, k, v, o, lse))
                        if direction == "forward"
                        else (lambda r=r: r.backward(q, k, v, o, lse, dout, *grads))
                    )
                    for r in rings
                ]
                one, four = alternate(bodies, max(3, args.repeat // 3))
                ratio = statistics.median(four) / statistics.median(one)
                rows.append(
                    {
                        "pattern": name,
                        "schedule": label,
                        "direction": direction,
                        "tokens": tokens,
                        "ratio": ratio,
                        "one_rank": summary(one),
                        "four_ranks": summary(four),
                    }
                )
                print(
                    f"ring     {name} {label} {direction} {tokens} tokens: P = 4 takes {ratio:.3f} of P = 1",
                    flush=True,
                )
    return rows


def suite_scaling(args):
    sizes = [32768 << i for i in range(5)]
    bodies, kept = [], []
    for tokens in sizes:
        shape = (1, tokens, 8, 64)
        q = make((1, 32768, 8, 64), "bf16", 3)
        q, k, v = [t.repeat(1, tokens // 32768, 1, 1).contiguous() for t in q]
        o, lse = torch.empty_like(q), torch.empty(shape[:3])
        ring = Annulus(
            shape,
            "bf16",
            False,
            branches=list(zip(SEGMENTS, DILATIONS)),
            threads=args.threads,
            backward=False,
        )
        kept.append((ring, q, k, v, o, lse))
        bodies.append(lambda ring=ring, q=q, k=k, v=v, o=o, lse=lse: ring.forward(q, k, v, o, lse))
    seconds = alternate(bodies, max(3, args.repeat // 3))
    rows = []
    for i, tokens in enumerate(sizes):
        rows.append(
            {
                "dtype": "bf16",
                "tokens": tokens,
                "seconds": summary(seconds[i]),
                "ratio_to_half": (
                    statistics.median(seconds[i]) / statistics.median(seconds[i - 1]) if i else None
                ),
            }
        )
    print(
        "scaling  "
        + ", ".join(
            f"{r['tokens'] // 1024}k {r['seconds']['median']:.2f} s"
            + (f" ({r['ratio_to_half']:.2f}x)" if r["ratio_to_half"] else "")
            for r in rows
        ),
        flush=True,
    )
    return rows


def main():
    suites = {
        "forward": lambda a: suite_dense("forward", a),
        "backward": lambda a: suite_dense("backward", a),
        "peaky": suite_peaky,
        "dilated": suite_dilated,
        "longnet": suite_longnet,
        "one_head": suite_one_head,
        "ring": suite_ring,
        "scaling": suite_scaling,
    }
    parser = parser_of(__doc__, suites)
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    run_suites(suites, parser.parse_args())


if __name__ == "__main__":
    main()
