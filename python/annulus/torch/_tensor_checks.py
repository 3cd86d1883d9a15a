"""Checks of the tensors of ring_attention."""

from __future__ import annotations

import torch

import annulus
from annulus.torch._options import MOST_HEAD_DIM, whole_complaint

DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_complaints: list[str] = []  # the result of annulus.cuda_complaint, which is called once


@torch.compiler.assume_constant_result
def _cuda_complaint() -> str:
    if not _complaints:
        _complaints.append(annulus.cuda_complaint())
    return _complaints[0]


def sinks_complaint(sinks: torch.Tensor, q: torch.Tensor) -> str | None:
    """What is wrong with the sinks of a call whose q is valid; None: nothing."""
    if not isinstance(sinks, torch.Tensor):
        return f"sinks is a {type(sinks).__name__}: a torch.Tensor was expected"
    if sinks.is_nested or sinks.layout != torch.strided:
        return "sinks is a nested or sparse tensor: a dense one was expected"
    if sinks.shape != q.shape[2:3]:
        return f"sinks is {list(sinks.shape)}: one number per head of q, [{q.shape[2]}], was expected"
    if not sinks.is_floating_point():
        return f"sinks is {sinks.dtype}: floating point was expected"
    if sinks.device != q.device:
        return f"sinks is on {sinks.device}, but q is on {q.device}: one device was expected"
    return None


def seed_complaint(seed: object) -> str | None:
    """What is wrong with a dropout_seed; None: nothing. A tensor's number is not read."""
    if isinstance(seed, torch.Tensor):
        whole = not (seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool)
        if whole and seed.numel() == 1:
            return None
        return f"dropout_seed is a tensor {list(seed.shape)} of {seed.dtype}: one whole number was expected"
    return whole_complaint("dropout_seed", seed)


def tensor_complaint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: object) -> str | None:
    """What is wrong with the tensors of a call; None: nothing."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            return f"{name} is a {type(x).__name__}: a torch.Tensor was expected"
        if x.dim() != 4:
            return f"{name} has {x.dim()} axes: [batch, local tokens, heads, head_dim] was expected"
        if x.is_nested:
            return f"{name} is a nested tensor: a padded one was expected"
        if x.layout != torch.strided:
            return f"{name} is a {x.layout} tensor: a dense one was expected (x.to_dense())"
        if x is q:
            continue
        if x.device != q.device:
            return f"{name} is on {x.device}, but q is on {q.device}: one device was expected"
        if x.dtype != q.dtype:
            return f"{name} is {x.dtype}, but q is {q.dtype}: one dtype was expected"
    if q.device.type not in DEVICES:
        return f"q is on {q.device}: there are kernels for the CPU and for CUDA devices"
    if q.is_cuda and _cuda_complaint() != "":
        return f"q is on {q.device}: {_cuda_complaint()}"
    shape = k.shape
    if shape != q.shape:
        batch, _, _, head_dim = q.shape
        shape = (batch, shape[1], shape[2], head_dim)  # k and v may have other tokens and fewer heads
    if k.shape != shape or v.shape != shape:
        return (
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: equal shapes were expected, except "
            "that k and v may have fewer heads and another number of tokens"
        )
    heads, head_dim = q.shape[2:]
    if k.shape[2] == 0 or heads % k.shape[2] != 0:
        return f"k has {k.shape[2]} heads, expected a divisor of q's {heads}"
    exact = q.dtype == torch.float64
    if head_dim == 0 or (head_dim > MOST_HEAD_DIM and not exact):
        return f"head_dim is {head_dim}, expected 1 to {MOST_HEAD_DIM}"
    if exact:
        if group is not None:
            return "q is float64, which runs in one process only: use float32 with a group"
    elif q.dtype not in DTYPES:
        return f"q is {q.dtype}: float32, bfloat16 or float16 was expected"
    return None
