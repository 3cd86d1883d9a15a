"""Prints the tables of docs/PERFORMANCE.md from a result of bench/peer/versus_pytorch.py:  python3 bench/tables.py bench/results/FILE.json"""

import json
import pathlib
import sys


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def dense(rows):
    """One line per (dtype, head_dim, tokens): full and causal side by side."""
    keys = sorted({(r["dtype"] != "fp32", r["head_dim"], r["tokens"]) for r in rows})
    lines = []
    for is_16, dim, tokens in keys:
        pair = {
            r["causal"]: r
            for r in rows
            if (r["dtype"] != "fp32", r["head_dim"], r["tokens"]) == (is_16, dim, tokens)
        }
        line = ["bf16" if is_16 else "fp32", dim, tokens]
        for causal in (False, True):
            r = pair[causal]
            line += [
                f"{r['annulus_gflops']:.0f}",
                f"{100 * r['share_of_peak']:.0f} %",
                f"{r['pytorch_gflops']:.0f}",
                f"**{r['ratio']:.2f}x**",
            ]
        lines.append(line)
    table(
        [
            "dtype",
            "D",
            "tokens",
            "full GFLOP/s",
            "of peak",
            "PyTorch",
            "ratio",
            "causal GFLOP/s",
            "of peak",
            "PyTorch",
            "ratio",
        ],
        lines,
    )


def main():
    result = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    suites = result["suites"]
    kind = {False: "full", True: "causal"}
    print(
        f"{result['cpu']}, {result['threads']} threads, `{result['isa']}`, PyTorch {result['torch']}, commit {result['commit']}\n"
    )
    for direction in ("forward", "backward"):
        if direction in suites:
            print(f"### {direction}\n")
            dense(suites[direction])
    if "longnet" in suites:
        print("### LongNet pattern, forward\n")
        table(
            ["dtype", "mask", "Annulus s", "PyTorch s", "ratio"],
            [
                [
                    r["dtype"],
                    kind[r["causal"]],
                    f"{r['annulus']['median']:.2f}",
                    f"{r['pytorch']['median']:.2f}",
                    f"**{r['ratio']:.2f}x**",
                ]
                for r in suites["longnet"]
            ],
        )
    if "training" in suites:
        print("### LongNet pattern, forward and backward from PyTorch\n")
        gib = 2**30
        table(
            [
                "dtype",
                "mask",
                "Annulus s",
                "peak GiB",
                "exact gradient s",
                "peak GiB",
                "PyTorch s",
                "peak GiB",
                "time",
                "memory",
            ],
            [
                [r["dtype"], kind[r["causal"]]]
                + [
                    (
                        f"{r[side][what]['median']:.2f}"
                        if what == "seconds"
                        else f"{r[side][what] / gib:.2f}"
                    )
                    for side in ("detached", "full", "pytorch")
                    for what in ("seconds", "peak_bytes")
                ]
                + [
                    f"**{r['pytorch']['seconds']['median'] / r['detached']['seconds']['median']:.2f}x**",
                    f"**{r['pytorch']['peak_bytes'] / r['detached']['peak_bytes']:.1f}x**",
                ]
                for r in suites["training"]
            ],
        )
    if "overhead" in suites:
        print("### overhead of Python\n")
        table(
            ["tokens", "heads", "what", "C++ ms", "Python ms", "Python over C++", "per call"],
            [
                [
                    r["tokens"],
                    r["heads"],
                    r["what"],
                    f"{1e3 * r['core']['median']:.3f}",
                    f"{1e3 * r['python']['median']:.3f}",
                    f"{r['ratio']:.3f}",
                    f"{r['microseconds_per_call']:.0f} us",
                ]
                for r in suites["overhead"]
            ],
        )
    if "dilated" in suites:
        print("### dilated\n")
        table(
            ["dtype", "mask", "r", "time over r = 1"],
            [
                [r["dtype"], kind[r["causal"]], r["dilation"], f"{r['ratio']:.3f}"]
                for r in suites["dilated"]
            ],
        )
    if "peaky" in suites:
        print("### peaky\n")
        table(
            ["D", "time over ordinary logits"],
            [[r["head_dim"], f"{r['ratio']:.3f}"] for r in suites["peaky"]],
        )
    if "one_head" in suites:
        print("### one head\n")
        table(
            ["direction", "mask", "speed-up"],
            [
                [r["direction"], kind[r["causal"]], f"{r['speedup']:.2f}x"]
                for r in suites["one_head"]
            ],
        )
    if "ring" in suites:
        print("### ring\n")
        table(
            ["pattern", "schedule", "direction", "P = 4 over P = 1"],
            [
                [r["pattern"], r["schedule"], r["direction"], f"{r['ratio']:.3f}"]
                for r in suites["ring"]
            ],
        )
    if "scaling" in suites:
        print("### scaling\n")
        table(
            ["tokens", "seconds", "over half the tokens"],
            [
                [
                    r["tokens"],
                    f"{r['seconds']['median']:.2f}",
                    f"{r['ratio_to_half']:.2f}" if r["ratio_to_half"] else "",
                ]
                for r in suites["scaling"]
            ],
        )


if __name__ == "__main__":
    main()
