"""Dropout and softcap by a plain formula: the definition of the pairs' numbers, written again in NumPy."""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _draw(stream: np.ndarray, n: np.ndarray) -> np.ndarray:
    return _mix64(stream + _GOLDEN * (n.astype(np.uint64) + np.uint64(1)))


def kept(
    seed: int, p: float, batch: int, heads: int, queries: int, keys: int, query_start: int = 0
) -> torch.Tensor:
    """[batch, heads, queries, keys]: 0 where a pair is dropped, else 1 / (1 - p), in float64.

    The queries are those from token `query_start` of the query tensor on.
    """
    with np.errstate(over="ignore"):
        entries = _draw(_mix64(np.uint64(seed)), np.arange(batch))[:, None]
        words = _draw(entries, np.arange(heads))  # [batch, heads]
        rows = _draw(words[..., None], np.arange(query_start, query_start + queries))
        flip = rows.astype(np.uint32)[..., None]
        factor = (rows >> np.uint64(32)).astype(np.uint32)[..., None] | np.uint32(1)
        salt = _mix64(words).astype(np.uint32)[..., None]
        key = _mix32(np.arange(keys, dtype=np.uint32) ^ salt)[:, :, None, :]
        x = (key ^ flip) * factor
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x9E3779B1)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    keeps = x.view(np.int32) >= threshold
    return torch.from_numpy(keeps / (1 - p))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softcap: float = 0.0,
    factors: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Dense attention in plain differentiable PyTorch; `factors` is the result of `kept`."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    if factors is not None:
        weights = weights * factors.to(weights.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
