"""Losses that workers and examples print."""

from __future__ import annotations

import re

import pytest


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)", text)]


def assert_as_alone(out: str, cases: list[str], alone: list[float]) -> None:
    losses = losses_of(out)
    assert len(losses) == 20 * len(cases), out
    for number, case in enumerate(cases):
        assert losses[20 * number :][:20] == pytest.approx(alone, rel=0, abs=1e-5), case
