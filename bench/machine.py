"""The CPU and the commit that results were measured with, for the scripts in bench/."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]


def cpu_name():
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
        for line in info:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown"


def commit():
    """Of this checkout; empty where there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
