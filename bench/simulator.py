"""The simulator against measurements, and what it says of large clusters:  python3 bench/simulator.py

Runs simulator_bench (in-process rings with limited links; or takes its output with --measured), the
tool on a billion tokens, timed, and a sweep that bench/plot.py draws. Writes
bench/results/simulator.json. Fails where a prediction is off by more than 10 % or a simulation
takes more than 10 s of CPU time.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

from planning import cpu_name, run

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADS = "--heads 16 --head-dim 128 --dtype bf16"
LONGNET = "--pattern longnet --segments 2048,4096,8192,16384,32768 --dilations 1,2,4,8,16"
LONGER = "--pattern longnet --segments 2048,16384,131072,4194304,1000000000 --dilations 1,2,4,8,16"
BILLION = f"--tokens 1000000000 --ranks 1024 {HEADS} --schedule ring"

# (what, arguments)
LARGE = [
    ("LongNet, w 2,048 to 32,768", f"{BILLION} {LONGNET}"),
    ("LongNet, causal, zigzag", f"{BILLION} {LONGNET} --causal --placement zigzag"),
    ("LongNet, w 2,048 to all tokens", f"{BILLION} {LONGER}"),
    ("dense", f"{BILLION} --pattern dense"),
    ("dense, causal", f"{BILLION} --pattern dense --causal"),
    ("dense, causal, zigzag", f"{BILLION} --pattern dense --causal --placement zigzag"),
    ("dense, causal, zigzag, one port", f"{BILLION} --pattern dense --causal --placement zigzag --cluster h200-one-port"),
]
SWEEP = (
    f"--tokens 1M {HEADS} --pattern dense --causal --sweep-ranks 8,16,32,64,128,256,512,1024 "
    "--sweep-placements contiguous,zigzag,striped --sweep-schedules ring,gather"
)
MOST_SECONDS = 10
MOST_ERROR = 0.10


def large(tool, what, arguments):
    command = [tool, "simulate", *arguments.split(), "--json"]
    seconds, peak, forecast, cpu_seconds = run(command)
    print(f"{what:<34} CPU {cpu_seconds:5.2f} s {peak / 1e6:7.1f} MB", flush=True)
    return {
        "case": what,
        "command": " ".join(command),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
        **{key: forecast[key] for key in ("ranks", "steps", "counted", "forward", "backward", "memory")},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", default="build/release/annulus")
    parser.add_argument("--bench", default="build/release/bench/simulator_bench")
    parser.add_argument("--measured", nargs="+", help="files that the bench has printed, instead of running it")
    parser.add_argument("--measured-on", default=cpu_name(), help="... and the CPU that it ran on")
    parser.add_argument("--out", default="bench/results/simulator.json")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    load = os.getloadavg()[0]
    if args.measured:
        parts = [json.loads(pathlib.Path(file).read_text(encoding="utf-8")) for file in args.measured]
        measured = {**parts[0], "rows": [row for part in parts for row in part["rows"]]}
    else:
        measured = json.loads(subprocess.run([args.bench, str(args.rounds)], capture_output=True, check=True).stdout)
    rows = [large(args.tool, what, arguments) for what, arguments in LARGE]
    sweep_command = [args.tool, "simulate", *SWEEP.split(), "--json"]
    sweep = run(sweep_command)[2]
    result = {
        "cpu": args.measured_on,
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "command": " ".join(["python3", *sys.argv]),
        "cores": os.cpu_count(),
        "load_before": load,
        "bench": {key: value for key, value in measured.items() if key != "rows"},
        "suites": {"simulator": measured["rows"], "simulated": rows},
        "sweep": {"command": " ".join(sweep_command), "cluster": sweep["cluster"], "rows": sweep["sweep"]},
    }
    pathlib.Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = [
        f"{r['pattern']}, {r['ranks']} ranks, {r['schedule']}, {r['pass']}, {r['link_over_step']}: {r['ratio']:.3f}"
        for r in measured["rows"]
        if abs(r["ratio"] - 1) > MOST_ERROR
    ]
    wrong += [
        f"{r['case']}: {r['cpu_seconds']:.1f} s, expected {MOST_SECONDS} s"
        for r in rows
        if r["cpu_seconds"] > MOST_SECONDS
    ]
    if wrong:
        raise SystemExit("simulator: over the limit\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
