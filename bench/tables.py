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
        pair = {r["causal"]: r for r in rows if (r["dtype"] != "fp32", r["head_dim"], r["tokens"]) == (is_16, dim, tokens)}
        line = ["bf16" if is_16 else "fp32", dim, tokens]
        for causal in (False, True):
            r = pair[causal]
            line += [f"{r['annulus_gflops']:.0f}", f"{100 * r['share_of_peak']:.0f} %", f"{r['pytorch_gflops']:.0f}", f"**{r['ratio']:.2f}x**"]
        lines.append(line)
    table(["dtype", "D", "tokens", "full GFLOP/s", "of peak", "PyTorch", "ratio", "causal GFLOP/s", "of peak", "PyTorch", "ratio"], lines)


def main():
    result = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    suites = result["suites"]
    kind = {False: "full", True: "causal"}
    print(f"{result['cpu']}, {result['threads']} threads, `{result['isa']}`, PyTorch {result['torch']}, commit {result['commit']}\n")
    for direction in ("forward", "backward"):
        if direction in suites:
            print(f"### {direction}\n")
            dense(suites[direction])
    if "longnet" in suites:
        print("### LongNet pattern, forward\n")
        table(["dtype", "mask", "Annulus s", "PyTorch s", "ratio"],
              [[r["dtype"], kind[r["causal"]], f"{r['annulus']['median']:.2f}", f"{r['pytorch']['median']:.2f}", f"**{r['ratio']:.2f}x**"]
               for r in suites["longnet"]])
    if "dilated" in suites:
        print("### dilated\n")
        table(["dtype", "mask", "r", "time over r = 1"],
              [[r["dtype"], kind[r["causal"]], r["dilation"], f"{r['ratio']:.3f}"] for r in suites["dilated"]])
    if "peaky" in suites:
        print("### peaky\n")
        table(["D", "time over ordinary logits"], [[r["head_dim"], f"{r['ratio']:.3f}"] for r in suites["peaky"]])
    if "one_head" in suites:
        print("### one head\n")
        table(["direction", "mask", "speed-up"], [[r["direction"], kind[r["causal"]], f"{r['speedup']:.2f}x"] for r in suites["one_head"]])
    if "ring" in suites:
        print("### ring\n")
        table(["pattern", "schedule", "direction", "P = 4 over P = 1"],
              [[r["pattern"], r["schedule"], r["direction"], f"{r['ratio']:.3f}"] for r in suites["ring"]])
    if "scaling" in suites:
        print("### scaling\n")
        table(["tokens", "seconds", "over half the tokens"],
              [[r["tokens"], f"{r['seconds']['median']:.2f}", f"{r['ratio_to_half']:.2f}" if r["ratio_to_half"] else ""]
               for r in suites["scaling"]])


if __name__ == "__main__":
    main()
