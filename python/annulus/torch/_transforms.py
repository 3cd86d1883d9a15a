"""Refuses calls inside torch.func transforms and forward-mode derivatives, which would give wrong derivatives."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def refuse_transforms(call: str, *tensors: torch.Tensor) -> bool:
    """Raises if the result would lack forward-mode or functional derivatives. Returns whether vmap is active."""
    if forward_ad._current_level >= 0:
        for x in tensors:
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"annulus: {call} has no forward-mode derivative; use backward"
                )
    inner = torch._C._functorch.peek_interpreter_stack()
    if inner is not None and inner.key() != torch._C._functorch.TransformType.Vmap:
        raise NotImplementedError(
            f"annulus: {call} does not work inside torch.func.grad, vjp or jvp; use torch.autograd"
        )
    return inner is not None
