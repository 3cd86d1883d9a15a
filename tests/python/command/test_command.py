"""The annulus command that comes with the package."""

from __future__ import annotations

import json
import os
import subprocess

import annulus
from support import HANG


def run(*arguments: str) -> str:
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
        env=os.environ | {"ANNULUS_THREADS": "1"},
    ).stdout


def test_explains_itself_and_is_of_the_packages_version(command: str) -> None:
    assert "Usage: annulus" in run(command, "--help")
    assert annulus.__version__ in run(command, "--version")


def test_plans_as_the_package_does(command: str) -> None:
    arguments = "--pattern dense --causal --heads 2 --tokens 1000 --ranks 3 --schedule ring --json"
    told = json.loads(run(command, "plan", *arguments.split()))
    plan = annulus.Plan(
        annulus.Pattern.dense(2, causal=True),
        annulus.Placement.contiguous(1000, 3),
        schedule="ring",
    )
    assert told["digest"] == f"{plan.digest:016x}"
