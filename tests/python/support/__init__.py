"""Helpers of several tests. Each module of this package is for one kind of test."""

from __future__ import annotations

import concurrent.futures
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import annulus
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Seconds. What takes longer hangs, however busy the machine is: no test fails because it is slow.
HANG = 1800.0


def comes_true(question: Callable[[], object]) -> bool:
    """Waits until the answer is true. Returns False if it stays false for two minutes."""
    until = time.monotonic() + 120
    while not question():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def python_calls(call: Callable[[], object]) -> list[str]:
    """Names of the Python and C functions that a call calls on this thread, as far as Python sees them."""
    names: list[str] = []

    def see(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(f"{pathlib.Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        elif event == "c_call":
            names.append(argument.__name__)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names[:-1]  # the last is setprofile


def executors_missed(call: Callable[[], object]) -> int:
    """How often a call found no executor in the cache and made one; -1: it did not look into the cache."""
    from annulus import monitor

    monitor.clear()
    monitor.start()
    try:
        call()
        looked = [event.name for event in monitor.read()[0] if event.kind == "cache"]
    finally:
        monitor.stop()
        monitor.clear()
    return looked.count("miss") if looked else -1


def normal(*shape: int, seed: int = 1, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def problem(
    tokens: int = 70,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    batch: int = 2,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v and the gradient of the output."""
    q, do = (normal(batch, tokens, heads, dim, seed=s, dtype=dtype) for s in (1, 4))
    k, v = (normal(batch, tokens, kv_heads, dim, seed=s, dtype=dtype) for s in (2, 3))
    return q, k, v, do


def make_ring(tokens: int, heads: int, dim: int, **options: Any) -> annulus.RingAttention:
    """Dense attention on a ring of one rank."""
    return annulus.RingAttention(
        annulus.Pattern.dense(heads),
        annulus.Placement.contiguous(tokens, 1),
        transport=annulus.make_in_process_ring(1)[0],
        head_dim=dim,
        **options,
    )


def on_ranks(
    transports: Sequence[annulus.Transport], body: Callable[[annulus.Transport], Any]
) -> list[Any]:
    """Runs body(transport) on one thread per rank. Returns results, or the exceptions that ended them."""

    def run(transport: annulus.Transport) -> Any:
        try:
            return body(transport)
        except Exception as error:  # noqa: BLE001 (whatever a rank raises is what the test looks at)
            return error

    with concurrent.futures.ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(run, transports))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
