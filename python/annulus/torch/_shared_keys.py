"""Keys and values that every rank holds: operators that merge attention to them with attention to the sequence.

Every query attends to the shared keys once, whatever the pattern. Each rank computes them for its own queries, without
messages, and merges: L' = log(exp(L) + exp(S)), O' = exp(L - L') O + exp(S - L') R, with O, L of the sequence and R, S
of the shared keys. Backward of both parts takes O' and L', so that exp(score - L') are the weights of the whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from annulus.torch._config import call_of, config_of
from annulus.torch._memory import with_room
from annulus.torch._operator import (
    attended,
    dsinks_like,
    errors_of_all,
    gradients_like,
    gradients_of,
    one_side_is_empty,
    refuse_second_derivative,
    refuse_sparse_gradient,
    results_like,
)
from annulus.torch._tensor_checks import DEVICES
from annulus.torch.ring._messages import exchange
from annulus.torch.ring._process_groups import rank_in
from annulus.torch.ring._registry import ring_of_group

GRADIENTS = ("whole", "own")


def shared_complaint(
    shared_k: object, shared_v: object, k: torch.Tensor, mix_gradient: object, drops: bool
) -> str | None:
    """What is wrong with shared keys and values for these keys; None: nothing."""
    if (shared_k is None) != (shared_v is None):
        return "shared_k and shared_v: both or none were expected"
    batch, _, heads, head_dim = k.shape
    for name, x in (("shared_k", shared_k), ("shared_v", shared_v)):
        if not isinstance(x, torch.Tensor):
            return f"{name} is a {type(x).__name__}: a torch.Tensor was expected"
        if x.is_nested or x.layout != torch.strided:
            return f"{name} is a nested or sparse tensor: a dense one was expected"
        if x.dim() != 4 or x.shape != (batch, x.shape[1], heads, head_dim):
            return (
                f"{name} is {list(x.shape)}: [{batch}, shared tokens, {heads}, {head_dim}] was expected, with the "
                "batch, heads and head_dim of k"
            )
        if x.device != k.device or x.dtype != k.dtype:
            return f"{name} is {x.dtype} on {x.device}, but k is {k.dtype} on {k.device}: the same was expected"
    if shared_k.shape != shared_v.shape:
        return f"shared_k has {shared_k.shape[1]} tokens, shared_v {shared_v.shape[1]}: as many were expected"
    if shared_k.shape[1] == 0:
        return "shared_k has no tokens: pass None instead"
    if mix_gradient == "detached":
        return (
            "shared_k cannot be used with mix_gradient 'detached', which holds the weights of single branches "
            "constant: shared keys belong to no branch"
        )
    if drops:
        return (
            "shared_k cannot be used with dropout_p: which weights are dropped follows from the tokens of the sequence, "
            "and shared keys are none"
        )
    return None


def _merged(
    o: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shared keys make log-sum-exps finite, so there is no difference of infinities."""
    whole = torch.logaddexp(lse, other_lse)
    wide = torch.promote_types(o.dtype, torch.float32)
    weight, other_weight = ((x - whole).exp()[..., None] for x in (lse, other_lse))
    result = (o.to(wide) * weight).addcmul_(other.to(wide), other_weight)
    return o.copy_(result), whole


def _parts_of_ranks(group: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Memory for these tensors of every rank, in fp32, that has those of this rank."""
    ranks = dist.distributed_c10d._resolve_process_group(group).size()
    of_ranks = parts[0].new_empty((ranks, len(parts), *parts[0].shape), dtype=torch.float32)
    for own, part in zip(of_ranks[rank_in(group)], parts):
        own.copy_(part)
    return of_ranks


def _add_over_ranks(
    group: str, timeout: float | None, of_ranks: torch.Tensor, results: list[torch.Tensor]
) -> None:
    """Writes the sum over the ranks, added in the order of the ranks: the same bits on all ranks."""
    with ring_of_group(group, timeout) as ring:
        ring.set_timeout(timeout)
        rank = ring.transport.rank()
        others = [r for r in range(len(of_ranks)) if r != rank]
        own = of_ranks[rank]
        exchange(ring.transport, [(r, own) for r in others], [(r, of_ranks[r]) for r in others])
    total = of_ranks[0]
    for x in of_ranks[1:]:
        total += x
    for result, x in zip(results, total):
        result.copy_(x)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    shared_k: torch.Tensor,
    shared_v: torch.Tensor,
    config: str,
    shared_config: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = call_of(config_of(config), q, k)
    # First, so that the other ranks hear of its errors before rows move.
    with errors_of_all(call.config):
        shared_call = call_of(config_of(shared_config), q, shared_k)
        other, other_lse = attended(shared_call, q, shared_k, shared_v, None, None)[:2]
    o, lse = attended(call, q, k, v, sinks, None)[:2]
    return _merged(o, lse, other, other_lse)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    shared_k: torch.Tensor,
    shared_v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    config: str,
    shared_config: str,
) -> tuple[torch.Tensor, ...]:
    call = call_of(config_of(config), q, k)
    c = call.config
    # Without keys in the sequence nothing is computed for it, and the gradient of sinks is computed with shared keys.
    lone = one_side_is_empty(c, q, k)
    of_sequence, of_shared = (None, sinks) if lone else (sinks, None)
    with errors_of_all(c):
        shared_call = call_of(config_of(shared_config), q, shared_k)
        saved = (q, shared_k, shared_v, of_shared, None, o, lse)
        other_dq, *shared_grads = gradients_of(shared_call, saved, grad)
        # Before the pass, whose agreement tells the other ranks of a lack of memory.
        whole = c.group is not None and c.shared_gradient == "whole"
        of_ranks = with_room(_parts_of_ranks, c.group, shared_grads) if whole else None
    dq, dk, dv, *dsinks = gradients_of(call, (q, k, v, of_sequence, None, o, lse), grad)
    if lone and sinks is not None:
        dsinks = [shared_grads.pop()]
    dq += other_dq  # 16-bit numbers are added in fp32 and rounded once
    if of_ranks is not None:
        _add_over_ranks(c.group, c.timeout, of_ranks, shared_grads)
    return dq, dk, dv, dsinks[0] if dsinks else q.new_empty(0), *shared_grads


_arguments = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor shared_k, Tensor shared_v, "
_forward_operator = torch.library.custom_op(
    "annulus::attend_shared",
    _forward,
    mutates_args=(),
    device_types=DEVICES,
    schema=f"({_arguments}str config, str shared_config) -> (Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "annulus::attend_shared_backward",
    _backward,
    mutates_args=(),
    device_types=DEVICES,
    schema=f"({_arguments}Tensor o, Tensor lse, Tensor grad, str config, str shared_config) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_forward_operator.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return results_like(q)


@_backward_operator.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    shared_k: torch.Tensor,
    shared_v: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    return *gradients_like(q, k, v), dsinks_like(q, sinks), *gradients_like(shared_k, shared_v)


def _save(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.config, ctx.shared_config = inputs
    o, lse = output
    ctx.save_for_backward(*tensors, o, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad: torch.Tensor | None, *_: None) -> tuple:
    texts = ctx.config, ctx.shared_config
    if grad is None:
        return (None,) * 8
    refuse_sparse_gradient(grad, ctx.config)
    saved = ctx.saved_tensors
    dq, dk, dv, dsinks, *shared_grads = torch.ops.annulus.attend_shared_backward(*saved, grad, *texts)
    return dq, dk, dv, None if saved[3] is None else dsinks, *shared_grads, None, None


_forward_operator.register_autograd(_differentiate, setup_context=_save)
_backward_operator.register_autograd(refuse_second_derivative)


def attend_shared(*arguments: torch.Tensor | str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse. The arguments are q, k, v, sinks, shared_k, shared_v, and the texts of the Configs of the sequence and of
    the shared keys."""
    return torch.ops.annulus.attend_shared(*arguments)
