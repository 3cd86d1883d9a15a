"""What several tests use."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import annulus


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
    """body(transport) on one thread per rank: results, or the exceptions that ended them."""

    def run(transport: annulus.Transport) -> Any:
        try:
            return body(transport)
        except Exception as error:  # noqa: BLE001: whatever a rank raises is what the test looks at
            return error

    with concurrent.futures.ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(run, transports))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
