"""PyTorch's attention under dense boolean masks as a judge of ours."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from support.reference import relative_rms


def tensors(
    tokens: int, dtype: torch.dtype, kv_heads: int = 2, dim: int = 24, keys: int | None = None
) -> list[torch.Tensor]:
    """q, k, v and the gradient of o; as many keys as queries unless `keys` says otherwise."""
    generator = torch.Generator().manual_seed(tokens)
    keys = tokens if keys is None else keys
    sizes = ((tokens, 4), (keys, kv_heads), (keys, kv_heads), (tokens, 4))
    shapes = [(2, n, h, dim) for n, h in sizes]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def by_sdpa(inputs, mask: torch.Tensor) -> list[torch.Tensor]:
    """o, dq, dk and dv."""
    *qkv, do = inputs
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in qkv]
    o = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    found = (o, *torch.autograd.grad(o, leaves, do.transpose(1, 2)))
    return [x.transpose(1, 2).detach() for x in found]


def check(found, inputs, mask: torch.Tensor) -> None:
    """float32: within 2e-6. 16 bits: within twice the error of PyTorch's attention of the same dtype."""
    exact = by_sdpa([x.double() for x in inputs], mask)
    theirs = by_sdpa(inputs, mask)
    for name, f, e, other in zip(("o", "dq", "dk", "dv"), found, exact, theirs):
        if e.abs().max() < 1e-12:  # with one key, dq and dk are 0 but for rounding
            assert f.abs().max() < (1e-5 if f.dtype == torch.float32 else 0.1), name
            continue
        limit = 2e-6 if f.dtype == torch.float32 else 2 * relative_rms(other, e)
        assert relative_rms(f, e) <= limit, name
