"""Ring attention as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import annulus
from annulus import ConfigError
from annulus.torch import _rings
from annulus.torch._rings import Config, config_of, ring_of

_MOST_TEXTS = 1000
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x itself wherever the kernels can read it: any strides, as long as the last axis is dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _result_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result of x's shape, in x's layout where the kernels can write to it."""
    if x.stride(-1) == 1:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _is_nothing(q: torch.Tensor, config: Config) -> bool:
    """No sequences, or one process's sequence without tokens: a plan needs at least one of each."""
    return config.group is None and q.shape[0] * q.shape[1] == 0


# Two operators with plain tensors in and out: torch.compile, checkpointing and autograd take them as
# they are. The two states are empty unless detached mixing needs them.


@torch.library.custom_op("annulus::attend", mutates_args=(), device_types="cpu")
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    c = config_of(config)
    o = _result_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    nothing = torch.empty(0)
    if _is_nothing(q, c):
        return o, lse, nothing, nothing.clone()
    if q.dtype == torch.float64:
        pattern = _rings.pattern_of(c, q.shape[2])
        o64, lse64 = annulus.reference_forward(
            q.numpy(), k.numpy(), v.numpy(), pattern, scale=c.scale
        )
        o.copy_(torch.from_numpy(o64))
        return o, torch.from_numpy(lse64).float(), nothing, nothing.clone()
    with ring_of(c).take(config, q, k) as executor:
        if c.mix_gradient == "detached" and c.backward:
            rows = executor.branch_state_rows
            # Rows that a branch does not select are never written: zeros, not what was there.
            state_o, state_lse = torch.zeros(rows, q.shape[3]), torch.empty(rows)
            state = executor.make_branch_state(o=state_o, lse=state_lse)
        else:
            state_o, state_lse, state = nothing, nothing.clone(), None
        executor.forward(_readable(q), _readable(k), _readable(v), o, lse, state)
    return o, lse, state_o, state_lse


@_attend.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    c = config_of(config)
    o, lse = _result_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    rows = 0
    if (
        c.mix_gradient == "detached"
        and c.backward
        and q.dtype != torch.float64
        and not _is_nothing(q, c)
    ):
        rows = max(1, len(c.segment_lengths)) * q.shape[0] * q.shape[1] * q.shape[2]
    empty = q.new_empty(0, dtype=torch.float32)
    if rows == 0:
        return o, lse, empty, empty.clone()
    return (
        o,
        lse,
        q.new_empty((rows, q.shape[3]), dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
    )


@torch.library.custom_op("annulus::attend_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    state_o: torch.Tensor,
    state_lse: torch.Tensor,
    grad: torch.Tensor,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = config_of(config)
    grads = _result_like(q), _result_like(k), _result_like(v)
    if _is_nothing(q, c):
        return grads
    if q.dtype == torch.float64:
        pattern = _rings.pattern_of(c, q.shape[2])
        arrays = [x.numpy() for x in (q, k, v, grad)]
        exact = annulus.reference_backward(
            *arrays, pattern, scale=c.scale, mix_gradient=c.mix_gradient
        )
        return tuple(g.copy_(torch.from_numpy(e)) for g, e in zip(grads, exact))
    with ring_of(c).take(config, q, k) as executor:
        state = None
        if c.mix_gradient == "detached":
            state = executor.make_branch_state(o=state_o, lse=state_lse, filled=True)
        inputs = [_readable(x) for x in (q, k, v, o)]
        executor.backward(*inputs, lse, _readable(grad), *grads, state)
    return grads


@_attend_backward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    state_o: torch.Tensor,
    state_lse: torch.Tensor,
    grad: torch.Tensor,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _result_like(q), _result_like(k), _result_like(v)


def _save(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.config = inputs
    o, lse, state_o, state_lse = output
    ctx.save_for_backward(q, k, v, o, lse, state_o, state_lse)
    ctx.mark_non_differentiable(lse, state_o, state_lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad: torch.Tensor | None, *_: None) -> tuple:
    if grad is None:
        return None, None, None, None
    dq, dk, dv = torch.ops.annulus.attend_backward(*ctx.saved_tensors, grad, ctx.config)
    return dq, dk, dv, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivative(ctx, *_: torch.Tensor | None) -> tuple:
    raise NotImplementedError(
        "annulus: ring_attention has no second derivative; its gradient cannot be differentiated again"
    )


_attend_backward.register_autograd(_refuse_second_derivative)


def _complaint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: object) -> str | None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            return f"{name} is a {type(x).__name__}: a torch.Tensor was expected"
        if x.dim() != 4:
            return f"{name} has {x.dim()} axes: [batch, local tokens, heads, head_dim] was expected"
        if x.is_nested:
            return f"{name} is a nested tensor: a padded one was expected"
        if x.device.type != "cpu":
            return f"{name} is on {x.device}: this build has kernels for the CPU only"
        if x.dtype != q.dtype:
            return f"{name} is {x.dtype}, but q is {q.dtype}: one dtype was expected"
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or v.shape != k.shape:
        return (
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: equal shapes were expected, but "
            "that k and v may have fewer heads"
        )
    if q.dtype == torch.float64:
        if group is not None:
            return "float64 runs on the reference, in one process only: use float32 with a group"
    elif q.dtype not in _DTYPES:
        return f"q is {q.dtype}: float32, bfloat16 or float16 was expected"
    return None


def _refuse(
    group: dist.ProcessGroup | None, n_global: object, timeout: object, text: str
) -> NoReturn:
    _rings.refuse(group, n_global, timeout, ConfigError(f"ring_attention: {text}"))


def _refuse_transforms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Raises where forward-mode or functional derivatives would be lost; whether vmap is at work."""
    if forward_ad._current_level >= 0:
        for x in (q, k, v):
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    "annulus: ring_attention has no forward-mode derivative; use backward"
                )
    inner = torch._C._functorch.peek_interpreter_stack()
    if inner is not None and inner.key() != torch._C._functorch.TransformType.Vmap:
        raise NotImplementedError(
            "annulus: ring_attention does not work inside torch.func.grad, vjp or jvp; use torch.autograd"
        )
    return inner is not None


# By the arguments of a call, to make its text once.
_texts: dict[tuple, str] = {}


@torch.compiler.assume_constant_result
def _config_text(*values: object) -> str:
    """The configuration's text; "!" and what is wrong with it."""
    text = _texts.get(values)
    if text is None:
        config = Config(*values)
        complaint = config.complaint()
        if complaint is not None:
            return "!" + complaint
        if len(_texts) >= _MOST_TEXTS:
            _texts.clear()
        text = _texts[values] = config.text()
    return text


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    pattern: str | None = None,
    is_causal: bool = False,
    offsets: str = "blocked",
    mix_gradient: str = "full",
    group_scale: bool = False,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    placement: str = "contiguous",
    n_global: int | None = None,
    schedule: str = "auto",
    reproducible: bool = False,
    min_tokens_for_ring: int = 32768,
    max_communication_bytes: int = 1 << 30,
    timeout: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence that is spread over the ranks of a group.

    Every rank passes its shard and gets its shard of the output; gradients flow back the same way. The
    result is that of one process holding the whole sequence, whatever the number of ranks and the
    placement: masks and dilation follow the tokens' positions in the whole sequence.

    Args:
        q: [batch, local tokens, heads, head_dim]; float32, bfloat16 or float16, any strides whose last
            axis is dense (others are copied). float64 runs on the slow reference, in one process.
        k, v: the same with as many or fewer heads (a divisor: grouped-query attention).
        segment_lengths, dilation_rates: one branch each, as in LongNet; without them attention is dense.
        pattern: "dense", "longnet" (every head is in every branch) or "head_groups" (the branches share
            the heads out); None: "dense" without segment lengths, else "longnet".
        is_causal: tokens attend to themselves and earlier positions only.
        offsets: of a dilated branch's rows, by head: "blocked" or "interleaved".
        mix_gradient: "full" is the exact gradient; "detached" treats the branches' weights as constants,
            as the best-known LongNet implementation does, and keeps every branch's output for it.
        group_scale: divides the output by the number of branches.
        scale: of q.k; None: 1/sqrt(head_dim).
        group: the ranks of the ring; None: this process alone.
        placement: "contiguous", "zigzag", "striped" or "hilbert": which rank holds which tokens. Make
            shards with :func:`shard`; contiguous shards may also have lengths of your own.
        n_global: tokens of the whole sequence. None: the ranks tell each other their lengths in every
            call, which costs one small all-gather; a number saves that.
        schedule: "ring", "gather" or "auto".
        reproducible: the same bits for every number of ranks and every placement; slower.
        min_tokens_for_ring: below this many tokens in all, "auto" gathers.
        max_communication_bytes: limit on this rank's buffers for messages; more is a ConfigError.
        timeout: seconds that one transfer may take; None: the group's timeout.
        return_lse: also return the log-sum-exp of every row, [batch, local tokens, heads], without
            gradient.

    Raises:
        ConfigError: wrong arguments; on every rank, whichever rank they are wrong on.
        TransportError: a rank died, left or took too long; its ``rank`` is the one at fault where known.
    """
    group_name = _rings.group_name(group)
    if torch.is_autocast_enabled("cpu") and all(
        isinstance(x, torch.Tensor) and x.dtype in _DTYPES for x in (q, k, v)
    ):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    complaint = _complaint(q, k, v, group)
    if complaint is not None:
        _refuse(group, n_global, timeout, complaint)
    inside_vmap = not torch.compiler.is_compiling() and _refuse_transforms(q, k, v)
    needs_gradient = torch.is_grad_enabled() and (
        inside_vmap or q.requires_grad or k.requires_grad or v.requires_grad
    )
    if pattern is None:
        pattern = "dense" if segment_lengths is None and dilation_rates is None else "longnet"
    text = _config_text(
        pattern,
        () if segment_lengths is None else tuple(segment_lengths),
        () if dilation_rates is None else tuple(dilation_rates),
        is_causal,
        offsets,
        mix_gradient,
        group_scale,
        scale,
        group_name,
        placement,
        n_global,
        schedule,
        reproducible,
        needs_gradient,
        min_tokens_for_ring,
        max_communication_bytes,
        timeout,
    )
    if text[0] == "!":
        _refuse(group, n_global, timeout, text[1:])
    o, lse, _, _ = torch.ops.annulus.attend(q, k, v, text)
    return (o, lse) if return_lse else o
