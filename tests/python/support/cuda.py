"""Helpers of tests with a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PATTERNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "longnet": {"segment_lengths": [64, 160], "dilation_rates": [1, 2]},
    "longnet_causal": {
        "segment_lengths": [64, 160],
        "dilation_rates": [1, 2],
        "is_causal": True,
        "offsets": "interleaved",
    },
    "window": {"is_causal": True, "window": (70, -1)},
    "window_longnet": {"segment_lengths": [64, 320], "dilation_rates": [1, 2], "window": (90, 33)},
    "dilated_window": {
        "segment_lengths": [2**40],
        "dilation_rates": [5],
        "offsets": "all",
        "window": (150, 0),
    },
    "head_groups": {
        "segment_lengths": [64, 160],
        "dilation_rates": [1, 2],
        "pattern": "head_groups",
        "group_scale": True,
    },
}
# Relative errors of outputs and gradients computed in one piece. Tests allow twice as much.
LIMITS = {"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 2e-3}


def tensors(torch: Any, tokens: int, heads: int = 4, kv_heads: int = 4, dim: int = 64) -> list[Any]:
    """q, k, v and the gradient of the output, float32."""
    make = torch.Generator("cuda").manual_seed(3)
    shapes = [(2, tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, device="cuda", generator=make) for s in shapes]


def results(attend: Callable[..., Any], q: Any, k: Any, v: Any, do: Any, **options: Any) -> list[Any]:
    """The output and the three gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves, **options)
    o.backward(do.to(o.dtype))
    return [o, *(x.grad for x in leaves)]
