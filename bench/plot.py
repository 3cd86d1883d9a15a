"""Draws docs/images/*.svg from the results of bench/peer/versus_pytorch.py, bench/cuda/gpu_bench.py or bench/simulator.py:

.venv/bin/python bench/plot.py bench/results/FILE.json
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
OURS, THEIRS, ROOF = "#1f6f8b", "#c9a227", "#999999"


def entitle(axis, title):
    """A title, and no frame above and on the right."""
    axis.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def save(figure, title, path):
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, metadata={"Date": None})


def bars(axis, rows, title):
    """GFLOP/s of both sides per case, the ratio above, the roof as a line."""
    labels = [
        "{}\nD{}".format(
            "{}k".format(r["tokens"] // 1024) if r["tokens"] >= 1024 else r["tokens"], r["head_dim"]
        )
        for r in rows
    ]
    x = range(len(rows))
    axis.bar(
        [i - 0.2 for i in x], [r["annulus_gflops"] for r in rows], 0.4, color=OURS, label="Annulus"
    )
    axis.bar(
        [i + 0.2 for i in x],
        [r["pytorch_gflops"] for r in rows],
        0.4,
        color=THEIRS,
        label="PyTorch SDPA",
    )
    axis.plot(
        [-0.6, len(rows) - 0.4],
        [max(r["peak_gflops"] for r in rows)] * 2,
        color=ROOF,
        linewidth=1,
        linestyle="--",
    )
    for i, r in enumerate(rows):
        axis.text(
            i - 0.2,
            r["annulus_gflops"] + 3,
            f"{r['ratio']:.1f}x",
            ha="center",
            va="bottom",
            fontsize=7,
            color=OURS,
        )
    axis.set_xticks(list(x), labels, fontsize=7)
    axis.set_ylim(0, 1.12 * max(r["peak_gflops"] for r in rows))
    entitle(axis, title)


def gpu_bars(axis, cases, title):
    """TFLOP/s of both sides per case, our time over the peer's above."""
    x = range(len(cases))
    ours = [c["tflops"] for c in cases]
    axis.bar([i - 0.2 for i in x], ours, 0.4, color=OURS, label="Annulus")
    theirs = [c["tflops"] * c["ratio"] for c in cases]
    axis.bar([i + 0.2 for i in x], theirs, 0.4, color=THEIRS, label="cuDNN")
    for i, c in enumerate(cases):
        axis.text(i - 0.2, ours[i] + 6, f"{c['ratio']:.2f}", ha="center", fontsize=7, color=OURS)
    labels = [c["name"].split("_d")[-1].replace("_", "\n").replace("interl", "inter-\nl") for c in cases]
    axis.set_xticks(list(x), [f"D{label}" for label in labels], fontsize=6.5)
    entitle(axis, title)


def draw_gpu(result, images):
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained", sharey=True)
    for line, direction in enumerate(("forward", "backward")):
        for column, pattern in enumerate(("longnet", "dense")):
            begin = f"{pattern}_{direction}_d"
            chosen = [c for c in result["cases"] if c["name"].startswith(begin) and "determ" not in c["name"]]
            gpu_bars(axes[line][column], chosen, f"{pattern.replace('longnet', 'LongNet')} {direction}")
        axes[line][0].set_ylabel("TFLOP/s over allowed pairs", fontsize=8)
    axes[0][1].legend(fontsize=8, frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.14))
    save(
        figure,
        f"{result['machine']['device']}, bf16, 16 heads (above the bars: our time over cuDNN's; its LongNet is without merge)",
        images / "h200.svg",
    )


def draw_sweep(result, images):
    """Time of a pass and how much of it is hidden over the number of ranks, by placement and schedule."""
    rows = result["sweep"]["rows"]
    colours = {"contiguous": "#c9a227", "zigzag": OURS, "striped": "#8b3a62"}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
    for placement, colour in colours.items():
        for schedule, style in (("ring", "-"), ("gather", ":")):
            line = [r for r in rows if r["placement"] == placement and r["schedule"] == schedule]
            ranks = [r["ranks"] for r in line]
            label = f"{placement}, {schedule}"
            total = [r["forward"]["seconds"] + r["backward"]["seconds"] for r in line]
            axes[0].plot(ranks, total, style, color=colour, marker="o", markersize=3, label=label)
            overlap = [100 * r["backward"]["overlap"] for r in line]
            axes[1].plot(ranks, overlap, style, color=colour, marker="o", markersize=3)
            memory = [r["memory"]["total_bytes"] / 1e9 for r in line]
            axes[2].plot(ranks, memory, style, color=colour, marker="o", markersize=3)
    first = [r for r in rows if r["placement"] == "zigzag" and r["schedule"] == "ring"]
    ideal = [
        sum(first[0][p]["compute_seconds"] for p in ("forward", "backward")) * first[0]["ranks"] / r["ranks"] for r in first
    ]
    axes[0].plot([r["ranks"] for r in first], ideal, color=ROOF, linewidth=1, linestyle="--", label="compute, shared evenly")
    titles = ("forward and backward, seconds", "backward: hidden of the shorter part, %", "memory of a rank, GB")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks([r["ranks"] for r in first], [r["ranks"] for r in first], fontsize=8)
        axis.set_xlabel("ranks", fontsize=8)
        entitle(axis, title)
    axes[0].set_yscale("log")
    axes[1].set_ylim(0, 105)
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=7, frameon=False)
    save(
        figure,
        f"Simulated: dense causal attention over 1M tokens, 16 heads of 128, bf16, on '{result['sweep']['cluster']['name']}'",
        images / "simulated_sweep.svg",
    )


def main():
    result = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    images = ROOT / "docs/images"
    images.mkdir(parents=True, exist_ok=True)
    if "cases" in result:
        draw_gpu(result, images)
        return
    if "sweep" in result:
        draw_sweep(result, images)
        return
    for direction in ("forward", "backward"):
        rows = result["suites"].get(direction)
        if not rows:
            continue
        figure, axes = plt.subplots(2, 2, figsize=(9.5, 5.6), layout="constrained")
        for line, dtype in enumerate(("fp32", "bf16")):
            for column, causal in enumerate((False, True)):
                chosen = [r for r in rows if r["dtype"] == dtype and r["causal"] == causal]
                if chosen:
                    bars(axes[line][column], chosen, f"{dtype}, {'causal' if causal else 'full'}")
        axes[0][0].set_ylabel("GFLOP/s over allowed pairs", fontsize=8)
        axes[1][0].set_ylabel("GFLOP/s over allowed pairs", fontsize=8)
        axes[0][1].legend(
            fontsize=8, frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.2)
        )
        save(
            figure,
            f"Attention {direction}, 8 heads, {result['cpu']}, {result['threads']} threads (dashed: measured multiply-add peak)",
            images / f"versus_pytorch_{direction}.svg",
        )


if __name__ == "__main__":
    main()
