"""Compares the simulator with measurements, and simulates large clusters:

python3 bench/simulator.py measured     # bench/results/simulator.json
python3 bench/simulator.py simulated    # bench/results/simulated.json

`measured` runs simulator_bench (in-process rings with limited links). --cpus runs several of its parts at the same
time, --pattern only one pattern (rows of other patterns are kept). It fails if a prediction is off by more than 10 %.
`simulated` runs the tool on a billion tokens and fails if that takes more than 10 s of CPU time. bench/plot.py draws
its sweep.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import queue
import subprocess
import sys

from machine import ROOT, commit, cpu_name
from planning import LONGER, LONGNET, run

HEADS = "--heads 16 --head-dim 128 --dtype bf16"
BILLION = f"--tokens 1000000000 --ranks 1024 {HEADS} --schedule ring"

# (what, arguments)
LARGE = [
    ("LongNet, w 2,048 to 32,768", f"{BILLION} {LONGNET}"),
    ("LongNet, causal, zigzag", f"{BILLION} {LONGNET} --causal --placement zigzag"),
    ("LongNet, w 2,048 to all tokens", f"{BILLION} {LONGER}"),
    ("dense", f"{BILLION} --pattern dense"),
    ("dense, causal, zigzag", f"{BILLION} --pattern dense --causal --placement zigzag"),
]
SWEEP = (
    f"--tokens 1M {HEADS} --pattern dense --causal --sweep-ranks 8,16,32,64,128,256 "
    "--sweep-placements contiguous,zigzag,striped --sweep-schedules ring,gather"
)
PATTERNS = ["dense", "dense causal", "LongNet"]  # the problems of simulator_bench
RESULTS = {
    "measured": ROOT / "bench" / "results" / "simulator.json",
    "simulated": ROOT / "bench" / "results" / "simulated.json",
}
MOST_SECONDS = 10
MOST_ERROR = 0.10


def facts(args):
    return {
        "cpu": cpu_name(),
        "commit": args.commit or commit(),
        "command": " ".join(["python3", *sys.argv]),
        "cores": os.cpu_count(),
        "load_before": args.load,
    }


def kept(about, patterns):
    """Rows of other patterns, which the same machine has measured at the same commit."""
    if len(patterns) == len(PATTERNS) or not RESULTS["measured"].exists():
        return []
    old = json.loads(RESULTS["measured"].read_text(encoding="utf-8"))
    for key in ("cpu", "cores", "commit"):
        if old[key] != about[key]:
            raise SystemExit(f"simulator: {RESULTS['measured']} has {key} {old[key]}, not {about[key]}: remove it")
    about["load_before"] = max(about["load_before"], old["load_before"])
    return [row for row in old["suites"]["simulator"] if row["pattern"] not in patterns]


def measured(args):
    patterns = [args.pattern] if args.pattern else PATTERNS
    about = facts(args)
    rows = kept(about, patterns)
    shares = queue.SimpleQueue()
    for share in args.cpus or [sorted(os.sched_getaffinity(0))]:
        shares.put(share)
    jobs = shares.qsize()

    def run_part(part):
        command = [args.bench, str(args.seconds), *map(str, part)]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    # A thread's CPUs are those of the processes that it starts.
    problems = [PATTERNS.index(pattern) for pattern in patterns]
    with concurrent.futures.ThreadPoolExecutor(
        jobs, initializer=lambda: os.sched_setaffinity(0, shares.get())
    ) as pool:
        parts = list(pool.map(run_part, itertools.product(problems, (2, 4, 8), ("ring", "gather"))))
    rows += [row for part in parts for row in part["rows"]]
    rows.sort(key=lambda row: PATTERNS.index(row["pattern"]))
    bench = {key: value for key, value in parts[0].items() if key != "rows"}
    return {**about, "bench": bench, "suites": {"simulator": rows}}, [
        f"{r['pattern']}, {r['ranks']} ranks, {r['schedule']}, {r['pass']}, "
        f"transfers {r['transfer_over_compute']:g} of compute: {r['ratio']:.3f}"
        for r in rows
        if abs(r["ratio"] - 1) > MOST_ERROR
    ]


def large(tool, what, arguments):
    command = [tool, "simulate", *arguments.split(), "--json"]
    seconds, peak, forecast, cpu_seconds = run(command)
    print(f"{what:<34} CPU {cpu_seconds:5.2f} s {peak / 1e6:7.1f} MB", flush=True)
    keys = ("ranks", "steps", "counted", "forward", "backward", "memory")
    return {
        "case": what,
        "command": " ".join(["annulus", *command[1:]]),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
        **{key: forecast[key] for key in keys},
    }


def simulated(args):
    result = facts(args)
    sweep = run([args.tool, "simulate", *SWEEP.split(), "--json"])[2]
    rows = [large(args.tool, what, arguments) for what, arguments in LARGE]
    result["suites"] = {"simulated": rows}
    result["sweep"] = {
        "command": f"annulus simulate {SWEEP} --json",
        "cluster": sweep["cluster"],
        "rows": sweep["sweep"],
    }
    return result, [
        f"{r['case']}: {r['cpu_seconds']:.1f} s, expected {MOST_SECONDS} s"
        for r in rows
        if r["cpu_seconds"] > MOST_SECONDS
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measured", "simulated"])
    parser.add_argument("--tool", default="build/release/annulus")
    parser.add_argument("--bench", default="build/release/bench/simulator_bench")
    parser.add_argument("--commit", help="commit of the measured build (default: that of the checkout)")
    parser.add_argument("--seconds", type=float, default=20, help="for which each ring is measured (default: 20)")
    parser.add_argument("--pattern", choices=PATTERNS, help="measure rings of this one (default: all)")
    # A ring computes with one thread, and the other ranks see to their messages meanwhile: both
    # hardware threads of a core are a good share. Rings on two threads of one core slow each other.
    parser.add_argument(
        "--cpus",
        nargs="+",
        type=lambda text: [int(cpu) for cpu in text.split(",")],
        help="measure several rings at once, each on CPUs of its own: '--cpus 0,8 1,9' (default: one, on all)",
    )
    args = parser.parse_args()
    args.load = os.getloadavg()[0]

    result, wrong = measured(args) if args.what == "measured" else simulated(args)
    RESULTS[args.what].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit("simulator: over the limit\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
