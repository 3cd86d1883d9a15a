"""Ring attention as a differentiable operator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import annulus
from annulus import ConfigError, OutOfMemory, monitor
from annulus.torch import _plain_calls, _rings
from annulus.torch._config import (
    DEFAULTS,
    Config,
    branch_numbers,
    config_of,
    flag_complaint,
    pattern_of,
    text_of,
    with_options,
)
from annulus.torch._memory import LOG, with_room

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# An argument of ring_attention for the module that makes columns of q and k of a mask: all ranks must.
HAS_MASK = "_has_key_padding_mask"


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x itself wherever the kernels can read it: any strides, as long as the last axis is dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else with_room(x.contiguous)


def _result_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result of x's shape, in x's layout where the kernels can write to it."""
    if x.stride(-1) == 1:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gradients_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(map(_result_like, tensors))


def _results_like(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for o and lse."""
    batch, tokens, heads, _ = q.shape
    # Half of what new_empty(q.shape[:3]) takes.
    return _result_like(q), torch.empty(
        batch, tokens, heads, dtype=torch.float32, device=q.device
    )


# Two operators with plain tensors in and out: torch.compile, checkpointing and autograd take them as
# they are. The two states have no rows unless detached mixing needs them.


def _states(q: torch.Tensor, rows: int | torch.SymInt) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the branches' outputs and log-sum-exps, all of which forward writes."""
    return q.new_empty((rows, q.shape[3])), q.new_empty((rows,), dtype=torch.float32)


def _keeps_branches(q: torch.Tensor, c: Config) -> bool:
    return c.mix_gradient == "detached" and c.backward and q.dtype != torch.float64


def _kept_rows(q: torch.Tensor, c: Config) -> int | torch.SymInt:
    """What RingAttention.branch_state_rows is for a sequence in one process."""
    batch, tokens, heads, _ = q.shape
    rows = 0
    for branch in pattern_of(c, int(heads)).branches:
        for offset in branch.offset:
            if offset < 0:
                continue

            def selected(length: int | torch.SymInt) -> int | torch.SymInt:
                return torch.sym_max(0, (length - offset + branch.dilation - 1) // branch.dilation)

            if branch.segment_length is None:
                rows += selected(tokens)
            else:
                whole, last = tokens // branch.segment_length, tokens % branch.segment_length
                rows += whole * selected(branch.segment_length) + selected(last)
    return batch * rows


def _attend_now(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    o, lse, states = _forward(q, k, v, config_of(config))
    return o, lse, *(states or _states(q, 0))


_DEVICES = ("cpu", "cuda")
_attend = torch.library.custom_op(
    "annulus::attend", _attend_now, mutates_args=(), device_types=_DEVICES
)


def _errors_of_all(c: Config) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if c.group is None else _rings.errors_of_all(c.group, c.timeout)


def _in_half(c: Config, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The last resort, on all ranks or none: memory that ran out is everybody's error."""
    monitor.record("recovery", "half precision", rank=_rings.rank_in(c.group))
    LOG.warning("ring_attention: memory ran out: float32 is computed in bfloat16, as allow_half says")
    with _errors_of_all(c):
        return [with_room(x.to, torch.bfloat16) for x in tensors]


def _may_halve(x: torch.Tensor, c: Config) -> bool:
    return c.allow_half and x.dtype == torch.float32


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, c: Config
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """o, lse and the two states, if there are any."""
    try:
        if c.group is None:
            return _forward_here(q, k, v, c)
        with _errors_of_all(c):
            return _forward_here(q, k, v, c)
    except OutOfMemory:
        if not _may_halve(q, c):
            raise
    half = _in_half(c, q, k, v)
    with _errors_of_all(c):
        o, lse, states = _forward_here(*half, c)
    return o.to(q.dtype), lse, tuple(x.to(torch.float32) for x in states)


def _forward_here(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, c: Config
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    o, lse = with_room(_results_like, q)
    states: tuple[torch.Tensor, ...] = ()
    if q.dtype == torch.float64:
        if q.shape[0] * q.shape[1] > 0:
            o64, lse64 = annulus.reference_forward(
                *(x.cpu().numpy() for x in (q, k, v)), pattern_of(c, q.shape[2]), scale=c.scale
            )
            o.copy_(torch.from_numpy(o64))
            lse.copy_(torch.from_numpy(lse64))
        return o, lse, states

    def body(executor: annulus.RingAttention) -> None:
        nonlocal states
        state = None
        if _keeps_branches(q, c):
            states = with_room(_states, q, executor.branch_state_rows)
            state = executor.make_branch_state(o=states[0], lse=states[1])
        executor.forward(_readable(q), _readable(k), _readable(v), o, lse, state)

    _rings.run("forward", c, q, k, body)
    return o, lse, states


@_attend.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    c = config_of(config)
    o, lse = _result_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    rows: int | torch.SymInt = 0
    if _keeps_branches(q, c):
        # On a group it depends on where this rank's tokens are, which other ranks' lengths decide.
        rows = _kept_rows(q, c) if c.group is None else torch.library.get_ctx().new_dynamic_size()
    return o, lse, *_states(q, rows)


def _attend_backward_now(
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
    try:
        if c.group is None:
            return _backward(q, k, v, o, lse, state_o, state_lse, grad, c)
        with _errors_of_all(c):
            return _backward(q, k, v, o, lse, state_o, state_lse, grad, c)
    except OutOfMemory:
        if not _may_halve(q, c):
            raise
    *half, state_o, grad = _in_half(c, q, k, v, o, state_o, grad)
    with _errors_of_all(c):
        grads = _backward(*half, lse, state_o, state_lse, grad, c)
    return tuple(x.to(q.dtype) for x in grads)


_attend_backward = torch.library.custom_op(
    "annulus::attend_backward", _attend_backward_now, mutates_args=(), device_types=_DEVICES
)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    state_o: torch.Tensor,
    state_lse: torch.Tensor,
    grad: torch.Tensor,
    c: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = with_room(_gradients_like, q, k, v)
    if q.dtype == torch.float64:
        if q.shape[0] * q.shape[1] > 0:
            arrays = [x.cpu().numpy() for x in (q, k, v, grad)]
            exact = annulus.reference_backward(
                *arrays, pattern_of(c, q.shape[2]), scale=c.scale, mix_gradient=c.mix_gradient
            )
            for g, e in zip(grads, exact):
                g.copy_(torch.from_numpy(e))
        return grads

    def body(executor: annulus.RingAttention) -> None:
        state = None
        if c.mix_gradient == "detached":
            state = executor.make_branch_state(o=state_o, lse=state_lse, filled=True)
        inputs = [_readable(x) for x in (q, k, v, o)]
        executor.backward(*inputs, lse, _readable(grad), *grads, state)

    _rings.run("backward", c, q, k, body)
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


def _refuse_gradient(grad: torch.Tensor, c: Config) -> NoReturn:
    with _errors_of_all(c):
        raise ConfigError(
            f"ring_attention: the gradient of the output is a {grad.layout} tensor: a dense one was expected"
        )


def _differentiate(ctx, grad: torch.Tensor | None, *_: None) -> tuple:
    if grad is None:
        return None, None, None, None
    # Autograd sees to the dtype, device and shape; for a sparse one PyTorch would find no kernel.
    if grad.layout != torch.strided:
        _refuse_gradient(grad, config_of(ctx.config))
    q, k, v, o, lse, *states = ctx.saved_tensors
    states = states or _states(q, 0)
    backward = torch.ops.annulus.attend_backward
    if not torch.is_grad_enabled() and _plain_calls.nobody_looks(q, k, v, grad):
        backward = _attend_backward_now
    dq, dk, dv = backward(q, k, v, o, lse, *states, grad, ctx.config)
    return dq, dk, dv, None


_attend.register_autograd(_differentiate, setup_context=_save)


class _Attention(torch.autograd.Function):
    """annulus::attend and its gradient."""

    @staticmethod
    def forward(
        ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, states = _forward(q, k, v, config_of(config))
        ctx.config = config
        ctx.save_for_backward(q, k, v, o, lse, *states)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple:
        return _differentiate(ctx, *grads)


def _refuse_second_derivative(ctx, *_: torch.Tensor | None) -> tuple:
    raise NotImplementedError(
        "annulus: ring_attention has no second derivative; its gradient cannot be differentiated again"
    )


_attend_backward.register_autograd(_refuse_second_derivative)


_complaints: list[str] = []  # asked for once


@torch.compiler.assume_constant_result
def _cuda_complaint() -> str:
    if not _complaints:
        _complaints.append(annulus.cuda_complaint())
    return _complaints[0]


def _complaint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: object) -> str | None:
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
    if q.device.type not in _DEVICES:
        return f"q is on {q.device}: there are kernels for the CPU and for CUDA devices"
    if q.is_cuda and _cuda_complaint() != "":
        return f"q is on {q.device}: {_cuda_complaint()}"
    shape = k.shape
    if shape != q.shape:
        batch, tokens, _, head_dim = q.shape
        shape = (batch, tokens, shape[2], head_dim)  # k and v may have fewer heads
    if k.shape != shape or v.shape != shape:
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


def refuse_transforms(call: str, *tensors: torch.Tensor) -> bool:
    """Raises where forward-mode or functional derivatives would be lost; whether vmap is at work."""
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


# Constant in a compiled graph: dynamo does not look into it. Defaults are filled in here, because dynamo takes
# numbers of dictionaries for variables where shapes are dynamic.
@torch.compiler.assume_constant_result
def _text_of(names: tuple[str, ...], values: tuple, needs_gradient: bool, *call: object) -> str:
    """Of options that are given, by name, and the other fields of Config in their order."""
    return text_of(*call, *{**DEFAULTS, **dict(zip(names, values))}.values(), needs_gradient)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: str | None,
    pattern: str | None,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    *others: object,
    options: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(o, lse) and the configuration, given the fields of Config in their order, up to the options."""
    if (
        isinstance(q, torch.Tensor)
        and q.device.type in _DEVICES
        and torch.is_autocast_enabled(q.device.type)
        and all(isinstance(x, torch.Tensor) and x.dtype in _DTYPES for x in (q, k, v))
    ):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    complaint = _complaint(q, k, v, group)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    inside_vmap = not torch.compiler.is_compiling() and refuse_transforms(
        "ring_attention", q, k, v
    )
    needs_gradient = torch.is_grad_enabled() and (
        inside_vmap or q.requires_grad or k.requires_grad or v.requires_grad
    )
    if pattern is None:
        pattern = "dense" if segment_lengths is None and dilation_rates is None else "longnet"
    segments = branch_numbers("segment_lengths", segment_lengths)
    rates = branch_numbers("dilation_rates", dilation_rates)
    names, values = tuple(options), tuple(options.values())
    text = _text_of(names, values, needs_gradient, group, pattern, segments, rates, *others)
    if text[0] == "!":
        raise ConfigError(f"ring_attention: {text[1:]}")
    if not _plain_calls.nobody_looks(q, k, v):
        o, lse, _, _ = torch.ops.annulus.attend(q, k, v, text)
    else:
        o, lse = _plain_call(q, k, v, text)
    return o, lse, text


def _plain_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    config = config_of(text)
    if config.backward:
        return _Attention.apply(q, k, v, text)
    o, lse, _ = _forward(q, k, v, config)
    return o, lse


@_rings.errors_reach_all(lambda *_, group=None, timeout=None, **__: (group, timeout))
@with_options
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
    group_scale: bool = False,
    group: dist.ProcessGroup | None = None,
    placement: str = "contiguous",
    n_global: int | None = None,
    timeout: float | None = None,
    return_lse: bool = False,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence that is spread over the ranks of a group.

    Every rank passes its shard and gets its shard of the output; gradients flow back the same way. The
    result is that of one process holding the whole sequence, whatever the number of ranks and the
    placement: masks and dilation follow the tokens' positions in the whole sequence.

    On a CUDA device work is enqueued on the current stream, and the call returns without waiting for it. A
    graph (``torch.cuda.graph``) of a call in one process can be captured once the same call has been made
    before. It uses the workspace that other calls of the same shape use, too: replay it on the stream on
    which these are made, or order them by events. On a group, a call waits for the other ranks to make it,
    too. Rows go from device to device between processes of one host, and between hosts by a group whose CUDA
    backend is NCCL; else through host memory, and the call waits for them.

    Args:
        q: [batch, local tokens, heads, head_dim] on the CPU or a CUDA device; float32, bfloat16 or float16,
            any strides whose last axis is dense (others are copied). float64 runs on the slow reference, in
            one process.
        k, v: the same with as many or fewer heads (a divisor: grouped-query attention). Query head h uses
            head h // (heads // kv_heads) of k and v: neighbours share one.
        segment_lengths, dilation_rates: one branch each, as in LongNet; without them attention is dense.
        pattern: "dense", "longnet" (every head is in every branch) or "head_groups" (the branches share
            the heads out); None: "dense" without segment lengths, else "longnet".
        is_causal: tokens attend to themselves and earlier positions only.
        offsets: of a dilated branch's rows, by head: "blocked" or "interleaved".
        mix_gradient: "full" is the exact gradient; "detached" treats the branches' weights as constants,
            as the best-known LongNet implementation does, and keeps for it every branch's output of the
            rows that the branch selects.
        group_scale: divides the output by the number of branches.
        scale: of q.k, above 0; None: 1/sqrt(head_dim).
        group: the ranks of the ring; None: this process alone.
        placement: "contiguous", "zigzag", "striped" or "hilbert": which rank holds which tokens. Make
            shards with :func:`shard`; contiguous shards may also have lengths of your own.
        n_global: tokens of the whole sequence, on all ranks or none: the shards must then have the lengths
            that the placement gives them. A check, which saves nothing: lengths are part of what the ranks
            agree on in any case.
        schedule: "ring", "gather" or "auto".
        reproducible: the same bits for every number of ranks and every placement; slower.
        min_tokens_for_ring: below this many tokens in all, "auto" gathers.
        max_communication_bytes: limit on this rank's buffers for messages; more is a ConfigError.
        recover: when memory runs out on any rank, all try again with less: without what is cached, some
            sequences, then some heads at a time, then by schedule "ring". The results are the same (to rounding,
            unless reproducible); the logger "annulus" says what was done. False: the first failure is the error.
        allow_half: when all that is not enough for float32, compute in bfloat16. The result is float32 with
            bfloat16's precision.
        timeout: seconds that one transfer may take; None: the group's timeout. The ranks' may differ.
        return_lse: also return the log-sum-exp of every row, [batch, local tokens, heads], without
            gradient.

    Raises:
        ConfigError: wrong arguments, on every rank, whichever rank they are wrong on; the ranks' calls
            differ; two threads call on one group at a time.
        TransportError: a rank died, left or took too long; its ``rank`` is the one at fault where known.
        OutOfMemory: on every rank, whichever of them has no memory left; says what was tried and would fit.
    """
    has_mask = options.pop(HAS_MASK, False)
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"ring_attention() got an unexpected keyword argument {name!r}")
    complaint = flag_complaint("return_lse", return_lse)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    call = (_rings.group_name(group), pattern, segment_lengths, dilation_rates, is_causal, offsets)
    call += (group_scale, placement, n_global, timeout, has_mask)
    plain = not torch.compiler.is_compiling()
    looks = _plain_calls.looks_of(q, k, v, call, options) if plain else None
    text = None if looks is None else _plain_calls.text_of(looks)
    if text is not None:
        o, lse = _plain_call(q, k, v, text)
    else:
        o, lse, text = _call(q, k, v, *call, options=options)
        if looks is not None:
            _plain_calls.remember(looks, text)
    return (o, lse) if return_lse else o
