"""Timing for the GPU benchmarks, and cuDNN through PyTorch as their peer. Does not import annulus."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

SEGMENTS, DILATIONS = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]
Function = Callable[[], Any]


def reading(function: Function, calls: int) -> float:
    """Milliseconds of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)  # the host gets ahead
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def medians(functions: dict[str, Function], rounds: int, least_ms: float = 80.0) -> dict[str, float]:
    """Median milliseconds of a call; each round in an order of its own."""
    for function in functions.values():
        function()
    torch.cuda.synchronize()
    calls = {n: max(1, math.ceil(least_ms / reading(f, 2))) for n, f in functions.items()}
    found: dict[str, list[float]] = {n: [] for n in functions}
    for _ in range(rounds):
        order = list(functions)
        random.shuffle(order)
        for name in order:
            found[name].append(reading(functions[name], calls[name]))
    return {n: statistics.median(t) for n, t in found.items()}


def views(tensors: list[torch.Tensor], segment: int, dilation: int, offset: int) -> list[torch.Tensor]:
    """Rows and heads of one offset, [segments, heads, rows, dim], blocked offsets; nothing is copied."""
    _, tokens, heads, dim = tensors[0].shape
    each = heads // dilation
    return [t.view(tokens // segment, segment // dilation, dilation, heads, dim)[:, :, offset, offset * each:(offset + 1) * each]
            .transpose(1, 2) for t in tensors]


def cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)


def cudnn_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: Any, causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, x[0], x[1], x[6], x[7], None, x[2], x[3], x[4], x[5], 0.0, causal)
