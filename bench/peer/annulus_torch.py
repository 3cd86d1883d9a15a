"""Compares the Python package with the C++ library and with plain PyTorch code. Needs the package ('make python').

    make pytorch-bench                       this and versus_pytorch.py
    .venv/bin/python bench/peer/annulus_torch.py --suite training --out FILE.json

Suites: overhead (annulus.torch.ring_attention over the same call from C++, large and small), training (LongNet attention
forward and backward against index + SDPA + scatter + merge: time, and peak memory of each side in its own process).
"""

import json
import multiprocessing
import pathlib
import re
import statistics

import annulus.torch as at
import torch
from measure import DILATIONS, SEGMENTS, Annulus, alternate, commit, make, parser_of, run_suites, summary
from versus_pytorch import check, longnet_pytorch

BRANCHES = {"segment_lengths": SEGMENTS, "dilation_rates": DILATIONS}
SIDES = ("detached", "full", "pytorch")  # of the training suite


def suite_overhead(args):
    """Medians of alternating runs; the difference is the cost of Python, autograd and allocation."""
    rows = []
    for tokens, branches, count in (
        (16384, list(zip(SEGMENTS, DILATIONS)), args.repeat),
        (64, [], 200 * args.repeat),
    ):
        shape = (1, tokens, 8 if tokens > 64 else 1, 64)
        q, k, v, dout = make(shape, "fp32", 4)
        o, lse = torch.empty_like(q), torch.empty(shape[:3])
        grads = [torch.empty_like(q) for _ in range(3)]
        options = BRANCHES if branches else {}
        core = Annulus(shape, "fp32", False, branches=branches, threads=args.threads)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def python_forward():
            with torch.no_grad():
                at.ring_attention(q, k, v, **options)

        def core_both():
            return core.forward(q, k, v, o, lse) + core.backward(q, k, v, o, lse, dout, *grads)

        def python_both():
            torch.autograd.grad(at.ring_attention(*leaves, **options), leaves, dout)

        bodies = [lambda: core.forward(q, k, v, o, lse), python_forward, core_both, python_both]
        seconds = alternate(bodies, count, pause=0.02 if tokens > 64 else 0)
        for name, calls, ours, theirs in (
            ("forward", 1, seconds[1], seconds[0]),
            ("forward and backward", 2, seconds[3], seconds[2]),
        ):
            a, b = statistics.median(ours), statistics.median(theirs)
            rows.append(
                {
                    "tokens": tokens,
                    "heads": shape[2],
                    "what": name,
                    "python": summary(ours),
                    "core": summary(theirs),
                    "ratio": a / b,
                    "microseconds_per_call": 1e6 * (a - b) / calls,
                }
            )
            print(
                f"overhead {name:20} {tokens:6} tokens: C++ {1e3 * b:.3f} ms, Python {1e3 * a:.3f} ms: {a / b:.3f}x, "
                f"{rows[-1]['microseconds_per_call']:.0f} us per call",
                flush=True,
            )
    return rows


def both_ways(side, dtype, causal, tokens):
    shape = (1, tokens, 8, 64)
    q, k, v, dout = make(shape, dtype, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run():
        if side == "pytorch":
            o, _ = longnet_pytorch(*leaves, causal, 8)
        else:
            o = at.ring_attention(*leaves, is_causal=causal, mix_gradient=side, **BRANCHES)
        return o.detach(), *torch.autograd.grad(o, leaves, dout)

    return run


def resident_bytes(name):
    """VmRSS or VmHWM (its highest value) of this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])


def peak_of(side, dtype, causal, tokens, threads, pipe):
    torch.set_num_threads(threads)
    run = both_ways(side, dtype, causal, tokens)
    # The highest value is inherited from the process that started this one.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    run()
    pipe.send(resident_bytes("VmHWM") - before)


def peak_in_a_process(side, dtype, causal, tokens, threads):
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    child = spawn.Process(target=peak_of, args=(side, dtype, causal, tokens, threads, far))
    child.start()
    peak = near.recv()
    child.join()
    return peak


def remeasure_memory(args):
    """Measures only the peaks of the training suite again and puts them into --out: memory needs no quiet machine."""
    result = json.loads(args.out.read_text())
    for row in result["suites"]["training"]:
        for side in args.memory:
            peak = peak_in_a_process(side, row["dtype"], row["causal"], row["tokens"], args.threads)
            print(
                f"{row['dtype']} causal={row['causal']} {side}: {peak / 2**30:.2f} GiB", flush=True
            )
            row[side]["peak_bytes"] = peak
    for side in args.memory:
        result.setdefault("memory_commits", {})[side] = commit()
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def suite_training(args):
    """Both with the gradient that SDPA's log-sum-exp allows ("detached"), and ours with the exact one ("full")."""
    rows = []
    tokens = 65536
    for dtype in ("fp32", "bf16"):
        for causal in (False, True):
            runs = [both_ways(side, dtype, causal, tokens) for side in SIDES]
            found, expected = runs[0](), runs[2]()
            for name, f, e in zip(("o", "dq", "dk", "dv"), found, expected):
                check(f"training {dtype} {name}", f, e, 1e-5 if dtype == "fp32" else 3e-2)
            del found, expected
            seconds = alternate(
                [lambda run=run: (run(), None)[1] for run in runs], max(3, args.repeat // 3)
            )
            peaks = [
                peak_in_a_process(side, dtype, causal, tokens, args.threads) for side in SIDES
            ]
            row = {"dtype": dtype, "causal": causal, "tokens": tokens}
            for side, s, peak in zip(SIDES, seconds, peaks):
                row[side] = {"seconds": summary(s), "peak_bytes": peak}
            rows.append(row)
            times = {side: statistics.median(s) for side, s in zip(SIDES, seconds)}
            print(
                f"training {dtype} {'causal' if causal else 'full':6} {tokens} tokens: "
                + ", ".join(
                    f"{side} {times[side]:.2f} s {peak / 2**30:.2f} GiB"
                    for side, peak in zip(SIDES, peaks)
                )
                + f": {times['pytorch'] / times['detached']:.2f}x, {times['pytorch'] / times['full']:.2f}x",
                flush=True,
            )
    return rows


def main():
    suites = {"overhead": suite_overhead, "training": suite_training}
    parser = parser_of(__doc__, suites)
    parser.add_argument(
        "--memory",
        nargs="+",
        choices=SIDES,
        help="measure only the memory of these sides of the training suite, and put it into --out",
    )
    args = parser.parse_args()
    if args.memory:
        remeasure_memory(args)
        return
    run_suites(suites, args)


if __name__ == "__main__":
    main()
