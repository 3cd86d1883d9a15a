"""The definition of dilated attention in fp64 NumPy, written to be read: the oracle of these tests.

It shares nothing with the library: allowed pairs are evaluated one by one, and branches are merged as what they
are, one softmax over the multiset of their keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import annulus
import numpy as np

Array = np.ndarray


def counts(pattern: annulus.Pattern, head: int, tokens: int) -> Array:
    """How many branches allow each (query, key) pair."""
    total = np.zeros((tokens, tokens))
    before, after = (tokens if n < 0 else n for n in pattern.window or (-1, -1))
    for branch in pattern.branches:
        length = branch.segment_length or tokens
        offset = branch.offset[head]
        for query in range(tokens):
            for key in range(tokens):
                selected = offset >= 0 and all(
                    t % length % branch.dilation == offset for t in (query, key)
                )
                same_segment = query // length == key // length
                near = query - before <= key <= query + after
                if selected and same_segment and near and (key <= query or not pattern.causal):
                    total[query, key] += 1
    return total


@dataclass
class Results:
    o: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


def attention(
    pattern: annulus.Pattern, q: Array, k: Array, v: Array, do: Array, scale: float | None = None
) -> Results:
    """Output, log-sum-exp and gradients; arrays are [batch, tokens, heads, head_dim]."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    batch, tokens, heads, dim = q.shape
    scale = scale or 1 / np.sqrt(dim)
    shared = heads // k.shape[2]  # query heads per key/value head
    found = Results(
        np.zeros_like(q),
        np.full(q.shape[:3], -np.inf),
        np.zeros_like(q),
        np.zeros_like(k),
        np.zeros_like(v),
    )
    for head in range(heads):
        allowed = counts(pattern, head, tokens)
        kv = head // shared
        for b in range(batch):
            query, key, value, grad = q[b, :, head], k[b, :, kv], v[b, :, kv], do[b, :, head]
            score = scale * query @ key.T
            largest = np.where(allowed > 0, score, -np.inf).max(
                axis=1, initial=-np.inf, keepdims=True
            )
            largest[np.isinf(largest)] = 0
            weight = allowed * np.exp(np.where(allowed > 0, score - largest, 0))
            total = weight.sum(axis=1, keepdims=True)
            p = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
            with np.errstate(divide="ignore"):
                found.lse[b, :, head] = (np.log(total) + largest)[:, 0]
            found.o[b, :, head] = pattern.output_scale * p @ value
            dp = pattern.output_scale * grad @ value.T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
            found.dq[b, :, head] = scale * ds @ key
            found.dk[b, :, kv] += scale * ds.T @ query
            found.dv[b, :, kv] += pattern.output_scale * p.T @ grad
    return found


def relative_rms(found: Any, expected: Any) -> float:
    """Root mean square of the difference over that of the expected values, arrays or tensors (test::relative_rms in
    C++).

    Only for results that are large compared with the rounding errors of their terms.
    """

    def exact(x: Any) -> Array:
        return np.asarray(x.detach().double().cpu() if hasattr(x, "detach") else x, np.float64)

    expected = exact(expected)
    return float(np.sqrt(np.mean((exact(found) - expected) ** 2) / np.mean(expected**2)))
