"""The simulator against measurements, and what it says of large clusters:

python3 bench/simulator.py measured     # bench/results/simulator.json
python3 bench/simulator.py simulated    # bench/results/simulated.json

`measured` runs simulator_bench (in-process rings with limited links), or takes what several runs of it
have printed, and fails where a prediction is off by more than 10 %. `simulated` runs the tool on a
billion tokens, and fails where that takes more than 10 s of CPU time; its sweep is drawn by
bench/plot.py.
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
    ("dense, causal, zigzag", f"{BILLION} --pattern dense --causal --placement zigzag"),
]
SWEEP = (
    f"--tokens 1M {HEADS} --pattern dense --causal --sweep-ranks 8,16,32,64,128,256 "
    "--sweep-placements contiguous,zigzag,striped --sweep-schedules ring,gather"
)
MOST_SECONDS = 10
MOST_ERROR = 0.10


def facts(args):
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return {
        "cpu": args.cpu,
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "command": " ".join(["python3", *sys.argv]),
        "cores": args.cores,
        "load_before": args.load,
    }


def objects(text):
    """The JSON objects of a text that has other lines, too."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        found, end = decoder.raw_decode(text, at)
        yield found
        at = text.find("{", end)


def measured(args):
    if args.printed:
        text = pathlib.Path(args.printed).read_text(encoding="utf-8")
    else:
        command = [args.bench, str(args.rounds)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = list(objects(text))
    rows = [row for part in parts for row in part["rows"]]
    about = {key: value for key, value in parts[0].items() if key != "rows"}
    result = {**facts(args), "bench": about, "suites": {"simulator": rows}}
    return result, [
        f"{r['pattern']}, {r['ranks']} ranks, {r['schedule']}, {r['pass']}, link {r['link_over_step']}: {r['ratio']:.3f}"
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
    parser.add_argument("--printed", help="a file with what the bench has printed, instead of running it")
    parser.add_argument("--cpu", default=cpu_name(), help="what it ran on (default: this machine's)")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--load", type=float, default=os.getloadavg()[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    result, wrong = measured(args) if args.what == "measured" else simulated(args)
    name = "simulator.json" if args.what == "measured" else "simulated.json"
    out = ROOT / "bench" / "results" / name
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit("simulator: over the limit\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
