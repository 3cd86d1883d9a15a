"""Planning at scale:  python3 bench/planning.py

Runs `annulus plan --rank R` (one rank's view) a few times per case, in a process of its own each
time. Records the medians of wall and CPU time and the largest resident memory of the whole process.
Fails where a case is over its limit.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from machine import commit, cpu_name

LONGNET = "--pattern longnet --segments 2048,4096,8192,16384,32768 --dilations 1,2,4,8,16"
LONGER = "--pattern longnet --segments 2048,16384,131072,4194304,1000000000 --dilations 1,2,4,8,16"
BILLION = "--tokens 1000000000 --ranks 4096 --rank 1234"
SMALLER = "--tokens 67108864 --ranks 1024 --rank 345"

# (what, arguments, limit in seconds, limit in MB); 0: no limit
CASES = [
    ("LongNet, w 2,048 to 32,768", f"{BILLION} {LONGNET}", 2, 300),
    ("LongNet, causal, zigzag", f"{BILLION} {LONGNET} --causal --placement zigzag", 2, 300),
    ("LongNet, w 2,048 to all tokens", f"{BILLION} {LONGER}", 2, 300),
    ("LongNet, w 2,048 to all tokens, causal", f"{BILLION} {LONGER} --causal", 2, 300),
    ("dense", f"{BILLION} --pattern dense", 1, 100),
    ("dense, causal, zigzag", f"{BILLION} --pattern dense --causal --placement zigzag", 1, 100),
    ("dense, causal, striped", f"{SMALLER} --pattern dense --causal --placement striped", 2, 0),
    ("dense, causal, hilbert", f"{SMALLER} --pattern dense --causal --placement hilbert", 2, 0),
    ("LongNet, causal, striped", f"{SMALLER} {LONGNET} --causal --placement striped", 2, 0),
    ("LongNet, striped", f"{SMALLER} {LONGNET} --placement striped", 2, 0),
]


def run(command):
    """Wall seconds, peak resident bytes, output and CPU seconds of one process."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise SystemExit(f"planning: {' '.join(command)} failed with {process.returncode}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return seconds, usage.ru_maxrss * 1024, json.loads(output), cpu_seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", default="build/release/annulus")
    parser.add_argument("--out", default="bench/results/planning.json")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    load = os.getloadavg()[0]
    rows = []
    over = []
    for what, arguments, limit_seconds, limit_mb in CASES:
        command = [args.tool, "plan", *arguments.split(), "--heads", "8", "--json"]
        runs = [run(command) for _ in range(args.repeat)]
        seconds = [r[0] for r in runs]
        cpu_seconds = statistics.median(r[3] for r in runs)
        peak = max(r[1] for r in runs)
        plan = runs[0][2]
        row = {
            "case": what,
            "command": " ".join(command),
            "tokens": plan["parameters"]["tokens"],
            "ranks": plan["parameters"]["ranks"],
            "parcels_of_rank": plan["ranks"][0]["parcels"],
            "parcels": plan["parcels"],
            "seconds": {
                "median": statistics.median(seconds),
                "min": min(seconds),
                "max": max(seconds),
            },
            "cpu_seconds": cpu_seconds,
            "peak_bytes": peak,
            "limit_seconds": limit_seconds,
            "limit_bytes": limit_mb * 1_000_000,
        }
        rows.append(row)
        median = row["seconds"]["median"]
        print(
            f"{what:<43} {median:6.2f} s, CPU {cpu_seconds:5.2f} s {peak / 1e6:7.1f} MB", flush=True
        )
        if limit_seconds and median > limit_seconds:
            over.append(f"{what}: {median:.2f} s, expected {limit_seconds} s")
        if limit_mb and peak > limit_mb * 1e6:
            over.append(f"{what}: {peak / 1e6:.0f} MB, expected {limit_mb} MB")
    result = {
        "cpu": cpu_name(),
        "commit": commit(),
        "command": " ".join(["python3", *sys.argv]),
        "cores": os.cpu_count(),
        "load_before": load,  # beyond the number of cores, wall times are not ours alone
        "suites": {"planning": rows},
    }
    pathlib.Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if over:
        raise SystemExit("planning: over the limit\n  " + "\n  ".join(over))


if __name__ == "__main__":
    main()
