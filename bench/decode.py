"""Decoding on the CPU:  python3 bench/decode.py [--out FILE]

Runs build/release/bench/perf/decode, a token against a long cache beside a plain read of as many bytes, and
records its figures with the machine.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from machine import ROOT, commit, cpu_name


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench/results/decode.json")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        program = ROOT / "build/release/bench/perf/decode"
        status = subprocess.run([program, file.name], check=False).returncode
        rows = json.loads(pathlib.Path(file.name).read_text(encoding="utf-8"))
    result = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_before": load,
        "commit": commit(),
        "command": "python3 bench/decode.py",
        "suites": {"decode": rows},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
