"""Compares bf16 on AMX tiles with PyTorch's SDPA, which uses them, too: medians of alternating runs in one process.

    .venv/bin/python bench/peer/tiles.py --out bench/results/tiles.json      on a CPU with AMX
    ANNULUS_ISA=avx512 .venv/bin/python bench/peer/tiles.py                  the same with other kernels
    ANNULUS_ISA=amx_bf16_emulated .venv/bin/python bench/peer/tiles.py --suite peaked      errors alone, on any CPU with AVX-512

16 heads; GFLOP/s at 4 D (forward) and 10 D (backward) per pair. Errors are relative RMS against fp64 on some rows, beside those of
PyTorch. Cloud hosts are shared: a full forward by all threads is valid if PyTorch reaches 2.0 (D 64) or 2.7 TFLOP/s (D 128). It runs up to
three times for that, and the run in which PyTorch was fastest is kept. With one thread, both sides run on the same CPU.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F
from measure import DILATIONS, ROOT, SEGMENTS, Annulus, commit, cpu_name, make, pairs, relative_rms, summary
from versus_pytorch import longnet_pytorch, longnet_pytorch_backward

HEADS = 16
QUIET_GFLOPS = {64: 2000, 128: 2700}  # of PyTorch on an idle host


def alternate(bodies, seconds, least=9):
    """As measure.alternate, for `seconds` and at least `least` rounds; bodies have run once. Short calls run in bursts, as in a model.
    The first call of a burst does not count: waking the threads after the pause takes as long as the call."""
    spent = [[] for _ in bodies]
    start = time.perf_counter()
    bodies[0]()
    calls = 8 if time.perf_counter() - start < 5e-3 else 1
    start = time.perf_counter()
    while len(spent[0]) < least * calls or time.perf_counter() - start < seconds:
        for own, body in zip(spent, bodies):
            time.sleep(0.03)  # the other side's idle threads stop spinning
            if calls > 1:
                body()
            for _ in range(calls):
                begin = time.perf_counter()
                body()
                own.append(time.perf_counter() - begin)
    return spent


@contextlib.contextmanager
def on_cpus(threads):
    """Runs single threads of both sides on the same CPU: another core has other neighbours."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)} if threads == 1 else cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def exact(q, k, v, causal, rows, head):
    """O and log-sum-exp of some rows of a head, in fp64."""
    q, k, v = [t[0, :, head].double() for t in (q, k, v)]
    scores = q[rows] @ k.T / q.shape[-1] ** 0.5
    if causal:
        scores[torch.arange(k.shape[0])[None] > rows[:, None]] = -torch.inf
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def errors(q, k, v, o, lse, theirs, causal):
    rows = torch.arange(0, q.shape[1], 37)
    want, want_lse = exact(q, k, v, causal, rows, 3)

    def rms(got):
        return ((got.double() - want).norm() / want.norm()).item()

    return {
        "error": rms(o[0, rows, 3]),
        "pytorch_error": rms(theirs[0, 3, rows]),
        "rounding_error": rms(want.bfloat16()),
        "lse_error": (lse[0, rows, 3].double() - want_lse).abs().max().item(),
    }


def forward_case(tokens, dim, causal, threads, seconds):
    shape = (1, tokens, HEADS, dim)
    q, k, v = make(shape, "bf16", 3)
    o, lse = torch.empty_like(q), torch.empty(shape[:3])
    tq, tk, tv = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    torch.set_num_threads(threads)
    ring = Annulus(shape, "bf16", causal, threads=threads, backward=False)
    ring.forward(q, k, v, o, lse)

    def sdpa():
        return F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal)

    found = errors(q, k, v, o, lse, sdpa(), causal)
    a, b = alternate([lambda: ring.forward(q, k, v, o, lse), sdpa], seconds)
    return finish("forward", tokens, dim, causal, threads, 4, a, b, found)


def backward_case(tokens, dim, causal, threads, seconds):
    shape = (1, tokens, HEADS, dim)
    q, k, v, dout = make(shape, "bf16", 4)
    o, lse = torch.empty_like(q), torch.empty(shape[:3])
    grads = [torch.empty_like(q) for _ in range(3)]
    tq, tk, tv, tdo = [t.transpose(1, 2).contiguous() for t in (q, k, v, dout)]
    torch.set_num_threads(threads)
    ring = Annulus(shape, "bf16", causal, threads=threads)
    ring.forward(q, k, v, o, lse)
    ring.backward(q, k, v, o, lse, dout, *grads)
    for t in (tq, tk, tv):
        t.requires_grad_(True)
    out = F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal)

    def theirs():
        return torch.autograd.grad(out, (tq, tk, tv), tdo, retain_graph=True)

    wide = [t[:, 3:4].detach().double().requires_grad_(True) for t in (tq, tk, tv)]
    exact_out = F.scaled_dot_product_attention(*wide, is_causal=causal)
    want = torch.autograd.grad(exact_out, wide, tdo[:, 3:4].double())
    found = {}
    for name, ours, other, gradient in zip(("dq", "dk", "dv"), grads, theirs(), want):
        found[name + "_error"] = relative_rms(ours.transpose(1, 2)[:, 3:4], gradient)
        found["pytorch_" + name + "_error"] = relative_rms(other[:, 3:4], gradient)
    a, b = alternate([lambda: ring.backward(q, k, v, o, lse, dout, *grads), theirs], seconds)
    return finish("backward", tokens, dim, causal, threads, 10, a, b, found)


def finish(direction, tokens, dim, causal, threads, flops, a, b, found):
    work = flops * dim * HEADS * pairs(tokens, causal)
    row = {
        "direction": direction,
        "tokens": tokens,
        "head_dim": dim,
        "causal": causal,
        "threads": threads,
        "annulus": summary(a),
        "pytorch": summary(b),
        "annulus_gflops": work / statistics.median(a) / 1e9,
        "pytorch_gflops": work / statistics.median(b) / 1e9,
        "ratio": statistics.median(b) / statistics.median(a),
        **found,
    }
    print(
        f"{direction:8} s={tokens:<5} D={dim:<3} {'causal' if causal else 'full':6} {threads:2} threads: "
        f"{row['annulus_gflops']:7.0f} GFLOP/s, PyTorch {row['pytorch_gflops']:7.0f}: {row['ratio']:.2f}x  "
        + ", ".join(f"{name} {value:.2e}" for name, value in found.items()),
        flush=True,
    )
    return row


def quiet_forward_case(tokens, dim, causal, threads, most_threads, seconds):
    rows = []
    for _ in range(3 if threads == most_threads and not causal else 1):
        with on_cpus(threads):
            rows.append(forward_case(tokens, dim, causal, threads, seconds))
        if rows[-1]["pytorch_gflops"] >= QUIET_GFLOPS[dim]:
            break
    return max(rows, key=lambda row: row["pytorch_gflops"])


@functools.cache
def longnet_rows(shape):
    return make(shape, "bf16", 4)


def longnet_case(tokens, dim, causal, backward, threads, seconds):
    shape = (1, tokens, HEADS, dim)
    q, k, v, dout = longnet_rows(shape)
    o, lse = torch.empty_like(q), torch.empty(shape[:3])
    grads = [torch.empty_like(q) for _ in range(3)]
    torch.set_num_threads(threads)
    branches = list(zip(SEGMENTS, DILATIONS))
    ring = Annulus(shape, "bf16", causal, branches=branches, threads=threads, backward=backward)

    def ours():
        ring.forward(q, k, v, o, lse)
        if backward:
            ring.backward(q, k, v, o, lse, dout, *grads)

    def theirs():
        out, total = longnet_pytorch(q, k, v, causal, HEADS)
        if not backward:
            return [out]
        return longnet_pytorch_backward(q, k, v, out, total, dout, causal, HEADS)

    ours()
    found = grads if backward else [o]
    difference = max(relative_rms(x, expected) for x, expected in zip(found, theirs()))
    a, b = alternate([ours, theirs], seconds, least=2)  # seconds each
    row = {
        "tokens": tokens,
        "head_dim": dim,
        "causal": causal,
        "backward": backward,
        "threads": threads,
        "annulus": summary(a),
        "pytorch": summary(b),
        "ratio": statistics.median(b) / statistics.median(a),
        "relative_difference": difference,
    }
    print(
        f"longnet  s={tokens} D={dim} {'causal' if causal else 'full'}{', and backward' if backward else ''}: "
        f"{row['annulus']['median']:.3f} s, PyTorch {row['pytorch']['median']:.3f} s: {row['ratio']:.2f}x, "
        f"differ by {difference:.1e}",
        flush=True,
    )
    return row


def dilated_case(dim, threads, seconds):
    """The same FLOPs with dilation 1 and 4."""
    shape = (1, 65536, HEADS, dim)
    q, k, v = make(shape, "bf16", 3)
    o, lse = torch.empty_like(q), torch.empty(shape[:3])
    torch.set_num_threads(threads)
    rings = [
        Annulus(shape, "bf16", False, branches=[(2048 * r * r, r)], threads=threads, backward=False)
        for r in (1, 4)
    ]
    bodies = [lambda ring=r: ring.forward(q, k, v, o, lse) for r in rings]
    for body in bodies:
        body()
    a, b = alternate(bodies, seconds, least=7)
    ratio = statistics.median(b) / statistics.median(a)
    print(f"dilated  D={dim}: dilation 4 takes {ratio:.3f} of the time of dilation 1", flush=True)
    return {"head_dim": dim, "threads": threads, "time_over_dilation_1": ratio}


def peaked_case(dim, causal, deviation, threads):
    """Errors where scores have this standard deviation: few keys have most of the weight."""
    shape = (1, 1024, HEADS, dim)
    q, k, v, dout = make(shape, "bf16", 4, deviation**0.5)
    o, lse = torch.empty_like(q), torch.empty(shape[:3])
    grads = [torch.empty_like(q) for _ in range(3)]
    ring = Annulus(shape, "bf16", causal, threads=threads)
    ring.forward(q, k, v, o, lse)
    ring.backward(q, k, v, o, lse, dout, *grads)

    def pytorch(dtype):
        rows = [t.transpose(1, 2).to(dtype).contiguous().requires_grad_(True) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*rows, is_causal=causal)
        return out.detach(), *torch.autograd.grad(out, rows, dout.transpose(1, 2).to(dtype))

    found = {}
    names = ("error", "dq_error", "dk_error", "dv_error")
    theirs, exact_ones = pytorch(torch.bfloat16), pytorch(torch.float64)
    for name, ours, other, want in zip(names, (o, *grads), theirs, exact_ones):
        for whose, x in (("", ours.transpose(1, 2)), ("pytorch_", other)):
            found[whose + name] = ((x.double() - want).norm() / want.norm()).item()
    print(
        f"peaked   D={dim:<3} {'causal' if causal else 'full':6} scores of standard deviation {deviation:2}: "
        + ", ".join(
            f"{name} {found[name]:.2e} ({found[name] / found['pytorch_' + name]:.2f} x PyTorch's)"
            for name in names
        ),
        flush=True,
    )
    return {"head_dim": dim, "causal": causal, "deviation": deviation, **found}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lib", default=ROOT / "build/release/bench/libannulus_bench_c.so")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of a case (at least nine rounds)"
    )
    parser.add_argument(
        "--suite", nargs="+", default=["forward", "backward", "dilated", "longnet", "peaked"]
    )
    parser.add_argument("--commit", help="commit of the library, if there is no repository")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="JSON; suites that it has of the same machine and commit stay",
    )
    args = parser.parse_args()
    Annulus.load(args.lib)
    # Virtual machines hide the name of the CPU, but not its model.
    info = dict(x.split(":", 1) for x in open("/proc/cpuinfo", encoding="ascii") if ":" in x)
    facts = {key.strip(): value.strip() for key, value in info.items()}
    result = {
        "cpu": f"{cpu_name()} (family {facts['cpu family']}, model {facts['model']})",
        "threads": args.threads,
        "isa": Annulus.lib.annulus_bench_isa().decode(),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "timing": "short calls in bursts",
        "suites": {},
    }
    print(result, flush=True)
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        suites = before.pop("suites")
        if all(before.get(key) == result[key] for key in result if key != "suites"):
            result["suites"] = suites
    grid = [
        (tokens, dim, causal, threads)
        for threads in (args.threads, 1, 2)
        for tokens in (4096, 1024)
        for dim in (64, 128)
        for causal in (False, True)
        if threads == args.threads or (tokens == 4096 and not causal)
    ]
    cases = {
        "forward": [lambda c=c: quiet_forward_case(*c, args.threads, args.seconds) for c in grid],
        "backward": [
            lambda c=c: backward_case(*c, args.seconds)
            for c in grid
            if c[0] == 4096 and c[3] == args.threads
        ],
        "peaked": [
            lambda c=c: peaked_case(*c, args.threads)
            for c in itertools.product((64, 128), (False, True), (1, 2, 4, 10))
        ],
        "dilated": [lambda d=d: dilated_case(d, args.threads, args.seconds) for d in (64, 128)],
        "longnet": [
            lambda c=c: longnet_case(131072, 64, *c, args.threads, args.seconds)
            for c in itertools.product((False, True), (False, True))
        ],
    }
    for suite in args.suite:
        rows = result["suites"]["tiles_" + suite] = []
        for case in cases[suite]:
            rows.append(case())
            if args.out:  # keeps the results so far if the run is interrupted
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
