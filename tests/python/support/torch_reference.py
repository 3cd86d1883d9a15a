"""Dilated attention in plain differentiable PyTorch, any dtype: one softmax over the multiset of keys."""

from __future__ import annotations

import annulus
import numpy as np
import torch

from support.reference import counts


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: annulus.Pattern,
    scale: float | None = None,
) -> torch.Tensor:
    """q, k, v: [batch, tokens, heads, head_dim], whole; k and v may have fewer heads."""
    heads, dim = q.shape[2:]
    k, v = (x.repeat_interleave(heads // k.shape[2], 2) for x in (k, v))
    times = torch.from_numpy(np.stack([counts(pattern, h, q.shape[1]) for h in range(heads)])).to(
        q.dtype
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (dim**-0.5 if scale is None else scale)
    scores = scores.masked_fill(times == 0, -1e300)
    weights = times * (scores - scores.detach().amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)  # a row that sees nothing gives zeros
    return pattern.output_scale * torch.einsum("bhqk,bkhd->bqhd", weights, v)
