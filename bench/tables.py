"""Fills the tables of docs/performance.md and README.md from bench/results:  python3 bench/tables.py

A table follows a line `<!-- table: NAME -->`, where NAME is a suite. The line after `<!-- machine: FILE -->` names the machine and the
commit of a result.
"""

import json
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
KIND = {False: "full", True: "causal"}


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def full_and_causal(rows, keys, columns, cells):
    """One line per value of the keys: full and causal side by side, empty where one was not measured."""
    by_key = {tuple(r[key] for key in (*keys.values(), "causal")): r for r in rows}
    lines = []
    for key in dict.fromkeys(key[:-1] for key in by_key):
        sides = [by_key.get((*key, causal)) for causal in KIND]
        lines.append([*key, *(cell for r in sides for cell in (cells(r) if r else [""] * len(columns)))])
    sides = [[f"{kind} {columns[0]}", *columns[1:]] for kind in KIND.values()]
    return table([*keys, *sides[0], *sides[1]], lines)


def dense(rows):
    return full_and_causal(
        rows,
        {"dtype": "dtype", "D": "head_dim", "tokens": "tokens"},
        ["GFLOP/s", "of peak", "PyTorch", "ratio"],
        lambda r: [
            f"{r['annulus_gflops']:.0f}",
            f"{100 * r['share_of_peak']:.0f} %",
            f"{r['pytorch_gflops']:.0f}",
            f"**{r['ratio']:.2f}x**",
        ],
    )


def longnet(rows):
    return table(
        ["dtype", "mask", "Annulus s", "PyTorch s", "ratio"],
        [
            [
                r["dtype"],
                KIND[r["causal"]],
                f"{r['annulus']['median']:.2f}",
                f"{r['pytorch']['median']:.2f}",
                f"**{r['ratio']:.2f}x**",
            ]
            for r in rows
        ],
    )


def training(rows):
    def figures(side):
        return [f"{side['seconds']['median']:.2f}", f"{side['peak_bytes'] / 2**30:.2f}"]

    return table(
        ["dtype", "mask"]
        + ["Annulus s", "peak GiB", "exact gradient s", "peak GiB", "PyTorch s", "peak GiB"]
        + ["time", "memory"],
        [
            [r["dtype"], KIND[r["causal"]]]
            + [f for side in ("detached", "full", "pytorch") for f in figures(r[side])]
            + [
                f"**{r['pytorch']['seconds']['median'] / r['detached']['seconds']['median']:.2f}x**",
                f"**{r['pytorch']['peak_bytes'] / r['detached']['peak_bytes']:.1f}x**",
            ]
            for r in rows
        ],
    )


def masks(rows):
    """Times of PyTorch over ours; empty where one was not measured."""

    def cell(r, peer):
        return f"**{r['ratios'][peer]:.2f}x**" if peer in r["ratios"] else ""

    return table(
        ["dtype", "tokens", "direction", "Annulus s", "over FlexAttention", "over SDPA"],
        [
            [
                r["dtype"],
                f"{r['tokens']:,}",
                r["direction"],
                f"{r['seconds']['annulus']['median']:.3f}",
                cell(r, "flex"),
                cell(r, "sdpa"),
            ]
            for r in rows
        ],
    )


def overhead(rows):
    return table(
        ["tokens", "heads", "what", "C++ ms", "Python ms", "Python over C++", "more per call"],
        [
            [
                f"{r['tokens']:,}",
                r["heads"],
                r["what"],
                f"{1e3 * r['core']['median']:.3f}",
                f"{1e3 * r['python']['median']:.3f}",
                f"{r['ratio']:.3f}",
                f"{r['microseconds_per_call']:.0f} us",
            ]
            for r in rows
        ],
    )


def dilated(rows):
    """One line per (dtype, mask), a column per dilation."""
    rates = sorted({r["dilation"] for r in rows})
    found = {(r["dtype"], KIND[r["causal"]], r["dilation"]): f"{r['ratio']:.3f}" for r in rows}
    return table(
        ["dtype", "mask", *(f"r = {rate}" for rate in rates)],
        [[*key, *(found[(*key, r)] for r in rates)] for key in dict.fromkeys(k[:2] for k in found)],
    )


def peaky(rows):
    return table(
        ["D", "time over ordinary logits"], [[r["head_dim"], f"{r['ratio']:.3f}"] for r in rows]
    )


def one_head(rows):
    return table(
        ["direction", "mask", "speed-up"],
        [[r["direction"], KIND[r["causal"]], f"{r['speedup']:.2f}x"] for r in rows],
    )


def ring(rows):
    return table(
        ["pattern", "schedule", "direction", "P = 4 over P = 1"],
        [[r["pattern"], r["schedule"], r["direction"], f"{r['ratio']:.3f}"] for r in rows],
    )


def scaling(rows):
    return table(
        ["tokens", "seconds", "over half the tokens"],
        [
            [
                f"{r['tokens']:,}",
                f"{r['seconds']['median']:.2f}",
                f"{r['ratio_to_half']:.2f}" if r["ratio_to_half"] else "",
            ]
            for r in rows
        ],
    )


def planning(rows):
    return table(
        ["plan", "tokens", "ranks", "parcels of the rank, of all", "seconds", "CPU s", "MB"],
        [
            [
                r["case"],
                f"{r['tokens']:,}",
                f"{r['ranks']:,}",
                f"{r['parcels_of_rank']:,}, {r['parcels']:,}",
                f"{r['seconds']['median']:.2f}",
                f"{r['cpu_seconds']:.2f}",
                f"{r['peak_bytes'] / 1e6:.0f}",
            ]
            for r in rows
        ],
    )


def simulator(rows):
    """One line per ring and pass, a column per speed of the links."""
    speeds = sorted({r["transfer_over_compute"] for r in rows})
    found = {}
    for r in rows:
        key = (r["pattern"], r["ranks"], r["schedule"], r["pass"])
        found.setdefault(key, {})[r["transfer_over_compute"]] = (
            f"{1e3 * r['measured_seconds']:.0f} / {1e3 * r['predicted_seconds']:.0f}: {100 * (r['ratio'] - 1):+.1f} %"
        )
    return table(
        [
            "pattern",
            "ranks",
            "schedule",
            "pass",
            *(f"transfers {speed:g} x compute" for speed in speeds),
        ],
        [[*key, *(line[speed] for speed in speeds)] for key, line in found.items()],
    )


def simulated(rows):
    def seconds(value):
        return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.2f} ms"

    return table(
        [
            "plan",
            "steps",
            "forward",
            "overlap",
            "backward",
            "overlap",
            "memory GB",
            "busiest link of backward",
            "CPU s",
            "MB",
        ],
        [
            [
                r["case"],
                f"{r['steps']:,}",
                seconds(r["forward"]["seconds"]),
                f"{100 * r['forward']['overlap']:.1f} %",
                seconds(r["backward"]["seconds"]),
                f"{100 * r['backward']['overlap']:.1f} %",
                f"{r['memory']['total_bytes'] / 1e9:.1f}",
                f"{r['backward']['busiest_link']}, {100 * r['backward']['busiest_link_seconds'] / r['backward']['seconds']:.0f} %",
                f"{r['cpu_seconds']:.1f}",
                f"{r['peak_bytes'] / 1e6:.0f}",
            ]
            for r in rows
        ],
    )


def gpu(rows):
    return table(
        ["case", "ours ms", "peer ms", "peer", "ours / peer", "TFLOP/s"],
        [
            [
                f"`{r['name']}`",
                f"{r['ours_ms']:.2f}",
                f"{r['peer_ms']:.2f}",
                r["peer"],
                f"**{r['ratio']:.3f}**",
                f"{r['tflops']:.0f}" if "tflops" in r else "",
            ]
            for r in rows
        ],
    )


def gpu_facts(facts):
    """Errors beside cuDNN's, the host's share and memory."""
    rows = [
        [
            f"{r['dtype']}, {r['mask']}: largest of o, dq, dk, dv over cuDNN's error; lse",
            f"{r['worst_ratio']:.3f}; {max(r[f'ranks_{p}']['lse_absolute'] for p in (1, 4)):.1e}",
        ]
        for r in facts["errors"]
    ]
    host, memory = facts["host_cost"], facts["forward_memory"]
    rows.append(
        [
            f"host time of a forward call from PyTorch, {host['tokens']:,} tokens; allocated in 100 more calls",
            f"{host['annulus_us']:.0f} us (SDPA {host['sdpa_us']:.0f} us); {host['allocated_bytes_after_100_calls']} bytes",
        ]
    )
    rows.append(
        [
            f"LongNet forward, {memory['tokens']:,} tokens, {memory['heads']} heads of {memory['head_dim']}, {memory['dtype']}: "
            "all memory, its tensors included",
            f"{memory['bytes'] / 1e9:.2f} GB, {memory['forward_ms']:.2f} ms",
        ]
    )
    return table(["what", "figure"], rows)


def tiles(rows):
    names = ("error", "dq_error", "dk_error", "dv_error")
    return full_and_causal(
        rows,
        {"threads": "threads", "D": "head_dim", "tokens": "tokens"},
        ["GFLOP/s", "PyTorch", "ratio", "error"],
        lambda r: [
            f"{r['annulus_gflops']:.0f}",
            f"{r['pytorch_gflops']:.0f}",
            f"**{r['ratio']:.2f}x**",
            f"{max(r[name] / r['pytorch_' + name] for name in names if name in r):.2f}",
        ],
    )


def tiles_longnet(rows):
    return table(
        ["D", "mask", "Annulus s", "PyTorch s", "ratio"],
        [
            [
                r["head_dim"],
                KIND[r["causal"]] + (", and backward" if r.get("backward") else ""),
                f"{r['annulus']['median']:.3f}",
                f"{r['pytorch']['median']:.3f}",
                f"**{r['ratio']:.2f}x**",
            ]
            for r in rows
        ],
    )


def tiles_dilated(rows):
    return table(
        ["D", "dilation 4 over dilation 1"],
        [[r["head_dim"], f"{r['time_over_dilation_1']:.3f}"] for r in rows],
    )


def tiles_peaked(rows):
    """Errors over PyTorch's."""
    names = ("error", "dq_error", "dk_error", "dv_error")
    return table(
        ["D", "mask", "standard deviation", "O", "dQ", "dK", "dV"],
        [
            [
                r["head_dim"],
                KIND[r["causal"]],
                r["deviation"],
                *[f"{r[name] / r['pytorch_' + name]:.2f}" for name in names],
            ]
            for r in rows
        ],
    )


def decode(rows):
    return table(
        ["dtype", "ranks", "cached keys", "plain read ms", "a token ms", "share of the read's bandwidth"],
        [
            [
                r["dtype"],
                str(r["ranks"]),
                f"{r['keys']:,}",
                f"{r['read_seconds'] * 1e3:.1f}",
                f"{r['attend_seconds'] * 1e3:.1f}",
                f"**{r['share']:.0%}**",
            ]
            for r in rows
        ],
    )


def gpu_decode(rows):
    """Times of ours over those of the fastest that PyTorch has."""

    def name(peer):
        return peer.removeprefix("sdpa ").removesuffix(" gqa").removesuffix(" grouped")

    return table(
        ["dtype", "batch", "cached keys", "a token us", "TB/s", "of a plain read", "over SDPA's best", "which"],
        [
            [
                r["dtype"],
                str(r["batch"]),
                f"{r['keys']:,}",
                f"{r['milliseconds']['ours'] * 1e3:.0f}",
                f"{r['terabytes_per_second']:.2f}",
                f"{r['share_of_read']:.0%}",
                f"**{r['over_best_peer']:.2f}**",
                name(r["best_peer"]),
            ]
            for r in rows
        ],
    )


TABLES = {
    "decode": decode,
    "gpu_decode": gpu_decode,
    "tiles_forward": tiles,
    "tiles_backward": tiles,
    "tiles_longnet": tiles_longnet,
    "tiles_dilated": tiles_dilated,
    "tiles_peaked": tiles_peaked,
    "forward": dense,
    "backward": dense,
    "longnet": longnet,
    "training": training,
    "overhead": overhead,
    "dilated": dilated,
    "window": masks,
    "dilated_window": masks,
    "documents": masks,
    "peaky": peaky,
    "one_head": one_head,
    "ring": ring,
    "scaling": scaling,
    "planning": planning,
    "simulator": simulator,
    "simulated": simulated,
}


def span(ratios):
    """The range of some ratios."""
    least, most = f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"
    return least if least == most else f"{least} to {most}"


def summary(results):
    """The table of README.md: how many times as fast as the peer, with full and causal masks."""

    def cpu(suite, **wanted):
        rows = [r for r in suite if all(r.get(key) == value for key, value in wanted.items())]
        return [span([r["ratio"] for r in rows if r["causal"] == causal]) for causal in KIND]

    def gpu(*names):
        ratios = {case["name"]: case["ratio"] for case in results["h200.json"]["cases"]}
        return [span([1 / ratios[name.format(kind)] for name in names]) for kind in KIND.values()]

    plain, tiles = results["versus_pytorch.json"]["suites"], results["tiles.json"]["suites"]
    forward, backward = (
        [r for r in plain[way] if r["tokens"] >= 1024] for way in ("forward", "backward")
    )
    dense_gpu = [
        "dense_{way}_d128_2k_{{}}",
        "dense_{way}_d128_4k_{{}}",
        "dense_{way}_d128_16k_{{}}",
    ]
    dense_forward, dense_backward = (
        [n.format(way=way) for n in dense_gpu] for way in ("forward", "backward")
    )
    longnet_gpu = "longnet_{}_d128_256k_{{}}_blocked"
    groups = {
        ("Zen 4, 2 threads", "PyTorch SDPA"): {
            "dense forward, fp32, 1,024 to 4,096 tokens": cpu(forward, dtype="fp32"),
            "dense backward, fp32": cpu(backward, dtype="fp32"),
            "dense forward, bf16": cpu(forward, dtype="bf16"),
            "dense backward, bf16": cpu(backward, dtype="bf16"),
            "LongNet forward, bf16, 131,072 tokens": cpu(plain["longnet"], dtype="bf16"),
        },
        ("Emerald Rapids, 16 threads", "PyTorch SDPA"): {
            "dense forward, bf16, 1,024 and 4,096 tokens": cpu(tiles["tiles_forward"], threads=16),
            "dense backward, bf16, 4,096 tokens": cpu(tiles["tiles_backward"], threads=16),
            "LongNet forward and backward, 131,072 tokens": cpu(
                tiles["tiles_longnet"], backward=True
            ),
        },
        ("H200", "cuDNN"): {
            "dense forward, bf16, 2,048 to 16,384 tokens": gpu(*dense_forward),
            "dense backward, bf16": gpu(*dense_backward),
        },
        ("H200", "cuDNN without merging branches"): {
            "LongNet forward, bf16, 262,144 tokens": gpu(longnet_gpu.format("forward")),
            "LongNet backward, bf16, 262,144 tokens": gpu(longnet_gpu.format("backward")),
        },
    }
    rows = [
        [*group, case, *ratios] for group, cases in groups.items() for case, ratios in cases.items()
    ]
    return table(["hardware", "compared with", "case", "full", "causal"], rows)


MEMORY = {"detached": "detached mixing", "full": "the exact gradient", "pytorch": "PyTorch"}


def machine(result):
    if "machine" in result:
        m = result["machine"]
        smi = m["nvidia_smi"].splitlines()[-1]
        return (
            f"Measured with {m['device']}, PyTorch {m['torch']}, cuDNN {m['cudnn']}; driver, clocks at the end and power limit: {smi}; "
            f"commit {m['commit'][:7]}.\n"
        )
    if "torch" not in result:
        return (
            f"Measured with {result['cpu']}, {result['cores']} cores at a load of {result['load_before']:.1f} by others, "
            f"commit {result['commit']}.\n"
        )
    return (
        f"Measured with {result['cpu']}, {result['threads']} thread{'s' * (result['threads'] > 1)}, `{result['isa']}`, PyTorch {result['torch']}, "
        f"commit {result['commit']}"
        + "".join(
            f", memory of {MEMORY[side]} at commit {commit}"
            for side, commit in result.get("memory_commits", {}).items()
        )
        + (f"; {result['timing']}" if "timing" in result else "")
        + ".\n"
    )


def replaced(page, mark, text, name):
    """The page with this table or line below its mark."""
    page, count = re.subn(
        rf"(<!-- {re.escape(mark)} -->\n\n)(?:.+\n)*", lambda match: match[1] + text, page
    )
    if count != 1:
        raise SystemExit(f"tables: {name} has {count} places for '{mark}', expected one")
    return page


def filled():
    """The text of each page, with its tables as the results say."""
    files = sorted((ROOT / "bench" / "results").glob("*.json"))
    results = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    page = PAGE.read_text(encoding="utf-8")
    for name, result in results.items():
        if "facts" in result:
            parts = {"gpu": gpu(result["cases"]), "gpu_facts": gpu_facts(result["facts"])}
        elif "cases" in result:
            parts = {"gpu_masks": gpu(result["cases"])}
        else:
            parts = {suite: TABLES[suite](rows) for suite, rows in result["suites"].items()}
        for part, text in parts.items():
            page = replaced(page, f"table: {part}", text, PAGE.name)
        line = textwrap.fill(machine(result), 120, break_long_words=False, break_on_hyphens=False)
        page = replaced(page, f"machine: {name}", f"{line}\n", PAGE.name)
    readme = README.read_text(encoding="utf-8")
    return {PAGE: page, README: replaced(readme, "table: summary", summary(results), README.name)}


def main():
    for page, text in filled().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
