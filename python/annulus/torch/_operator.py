"""Ring attention as operators of PyTorch, with their gradients.

``annulus::attend`` and ``annulus::attend_backward`` take plain tensors and the text of a Config, so that torch.compile,
checkpointing and autograd can handle them. :class:`_Attention` is the same function without the cost of an operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

import annulus
from annulus import ConfigError, OutOfMemory, monitor
from annulus.torch import _fast_path
from annulus.torch._config import DOCUMENTS, Call, Config, branches_of, call_of, config_of, pattern_of
from annulus.torch._memory import LOG, with_room
from annulus.torch._options import whole_complaint
from annulus.torch._placements import token_ranges, tokens_of
from annulus.torch._tensor_checks import DEVICES
from annulus.torch.ring import _registry
from annulus.torch.ring._errors import report_errors_to_ranks
from annulus.torch.ring._process_groups import rank_in


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x itself wherever the kernels can read it: any strides, as long as the last axis is dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else with_room(x.contiguous)


def _result_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result of x's shape, in x's layout where the kernels can write to it."""
    if x.stride(-1) == 1:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gradients_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(map(_result_like, tensors))


def dsinks_like(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Memory for the gradient of sinks; empty: there are none."""
    return q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def results_like(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for o and lse."""
    batch, tokens, heads, _ = q.shape
    # Not new_empty(q.shape[:3]), which takes twice the time.
    return _result_like(q), torch.empty(
        batch, tokens, heads, dtype=torch.float32, device=q.device
    )


# The two states have no rows unless detached mixing needs them.
def _states(q: torch.Tensor, rows: int | torch.SymInt) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the branches' outputs and log-sum-exps, all of which forward writes."""
    return q.new_empty((rows, q.shape[3])), q.new_empty((rows,), dtype=torch.float32)


def _keeps_branches(q: torch.Tensor, c: Config) -> bool:
    return c.mix_gradient == "detached" and c.backward and q.dtype != torch.float64


def _kept_rows(q: torch.Tensor, c: Config) -> int | torch.SymInt:
    """The value of RingAttention.branch_state_rows for one document in one process."""
    batch, tokens, heads, _ = q.shape
    rows = 0
    for branch in branches_of(c, int(heads)).branches:
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


def _whole_pattern(c: Config, q: torch.Tensor, k: torch.Tensor) -> annulus.Pattern:
    return pattern_of(c, q.shape[2], q.shape[1], k.shape[1])


def one_side_is_empty(c: Config, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether there are queries without keys, or keys without queries, in one process."""
    return c.group is None and (q.shape[1] == 0) != (k.shape[1] == 0)


def _rows_without_keys(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if sinks is None:
        return o.zero_(), lse.fill_(-torch.inf)
    rows = torch.where(sinks < torch.inf, 0.0, torch.nan)  # NaN and +inf make all rows of a head NaN
    return o.copy_(rows[:, None].expand_as(o)), lse.copy_((sinks + rows).expand_as(lse))


def _rows_of_tokens(c: Config, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of q and of k in the order of their tokens, in one process."""
    at, of_keys = (tokens_of(token_ranges(c.placement, x.shape[1]), x.device).argsort() for x in (q, k))
    return at, of_keys


def _ordered(x: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
    return x[:, rows].cpu().numpy()


def _number(seed: torch.Tensor | None) -> int | None:
    if seed is None:
        return None
    number = int(seed)
    complaint = whole_complaint("dropout_seed", number)  # compiled code could not read it before
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    return number


def _reference_options(
    c: Config, sinks: torch.Tensor | None, seed: torch.Tensor | None
) -> dict[str, object]:
    """The keyword arguments of reference_forward and reference_backward."""
    return {
        "scale": c.scale,
        "softcap": c.softcap,
        "dropout_p": c.dropout_p,
        "dropout_seed": _number(seed) or 0,
        "sinks": None if sinks is None else sinks.cpu().contiguous().numpy(),
    }


def errors_of_all(c: Config) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if c.group is None else report_errors_to_ranks(c.group, c.timeout)


def _with_recovery(
    compute: Callable[..., tuple[torch.Tensor, ...]],
    call: Call,
    tensors: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """compute(call, tensors, others). If memory runs out and `allow_half` is set, again with tensors in bfloat16.

    All ranks try again or none: OutOfMemory is raised on all.
    """
    c = call.config
    try:
        if c.group is None:
            return compute(call, tensors, others)
        with errors_of_all(c):
            return compute(call, tensors, others)
    except OutOfMemory:
        if not c.allow_half or tensors[0].dtype != torch.float32:
            raise
    monitor.record("recovery", "half precision", rank=rank_in(c.group))
    LOG.warning("ring_attention: memory ran out: float32 is computed in bfloat16, as allow_half says")
    with errors_of_all(c):
        half = [with_room(x.to, torch.bfloat16) for x in tensors]
        results = compute(call_of(c, half[0], half[1]), half, others)
    return tuple(x.to(torch.float32) for x in results)


def _forward(
    call: Call, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """o, lse and the two states, if there are any."""
    q, k, v = tensors
    sinks, seed = others
    c = call.config
    o, lse = with_room(results_like, q)
    if one_side_is_empty(c, q, k):
        return _rows_without_keys(o, lse, sinks)
    if q.dtype == torch.float64:
        if q.shape[0] * q.shape[1] > 0:
            at, of_keys = _rows_of_tokens(c, q, k)
            o64, lse64 = annulus.reference_forward(
                *(_ordered(x, rows) for x, rows in zip(tensors, (at, of_keys, of_keys))),
                _whole_pattern(c, q, k),
                **_reference_options(c, sinks, seed),
            )
            o[:, at] = torch.from_numpy(o64).to(o)
            lse[:, at] = torch.from_numpy(lse64).to(lse)
        return o, lse
    states: tuple[torch.Tensor, ...] = ()

    def body(executor: annulus.RingAttention) -> None:
        nonlocal states
        state = None
        if _keeps_branches(q, c):
            states = with_room(_states, q, executor.branch_state_rows)
            state = executor.make_branch_state(o=states[0], lse=states[1])
        inputs = (_readable(q), _readable(k), _readable(v))
        executor.forward(
            *(*inputs, o, lse, state),
            sinks=sinks,
            dropout_seed=_number(seed),
            dropout_seed_of_rank_0=c.draws_seed,
            claims=c.claims_text,
        )

    _registry.run("forward", call, q, k, body)
    return o, lse, *states


def _backward(
    call: Call, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and, with sinks, their gradient."""
    q, k, v, o, grad, *state_o = tensors
    sinks, seed, lse, *state_lse = others
    c = call.config
    grads = with_room(gradients_like, q, k, v)
    dsinks = None
    if sinks is not None:
        dsinks = with_room(dsinks_like, q, sinks)
        grads += (dsinks,)
    if one_side_is_empty(c, q, k):
        return tuple(g.zero_() for g in grads)
    if q.dtype == torch.float64:
        if q.shape[0] * q.shape[1] > 0:
            at, of_keys = _rows_of_tokens(c, q, k)
            order = (at, of_keys, of_keys, at)
            exact = annulus.reference_backward(
                *(_ordered(x, rows) for x, rows in zip((q, k, v, grad), order)),
                _whole_pattern(c, q, k),
                mix_gradient=c.mix_gradient,
                **_reference_options(c, sinks, seed),
            )
            for g, e, rows in zip(grads[:3], exact, order):
                g[:, rows] = torch.from_numpy(e).to(g)
            if dsinks is not None:
                dsinks.copy_(torch.from_numpy(exact[3]))
        elif dsinks is not None:
            dsinks.zero_()
        return grads

    def body(executor: annulus.RingAttention) -> bool:
        state = None
        if c.mix_gradient == "detached":
            state = executor.make_branch_state(o=state_o[0], lse=state_lse[0], filled=True)
        inputs = [_readable(x) for x in (q, k, v, o)]
        executor.backward(
            *(*inputs, lse, _readable(grad), *grads[:3], state),
            sinks=sinks,
            dsinks=dsinks,
            dropout_seed=_number(seed),
            dropout_seed_of_rank_0=c.draws_seed,
            claims=c.claims_text,
        )
        return True

    if _registry.run("backward", call, q, k, body) is None and dsinks is not None:
        dsinks.zero_()  # no tokens
    return grads


def attended(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """o, lse and the two states, if there are any."""
    return _with_recovery(_forward, call, (q, k, v), (sinks, seed))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    config: str,
) -> tuple[torch.Tensor, ...]:
    o, lse, *states = attended(call_of(config_of(config), q, k), q, k, v, sinks, seed)
    return o, lse, *(states or _states(q, 0))


def gradients_of(
    call: Call, saved: Sequence[torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v and sinks, if there are any, given the tensors that _save keeps and the gradient of o."""
    q, k, v, sinks, seed, o, lse, *states = saved
    tensors = (q, k, v, o, grad, *states[:1])
    return _with_recovery(_backward, call, tensors, (sinks, seed, lse, *states[1:]))


def _attend_backward(*arguments: torch.Tensor | str) -> tuple[torch.Tensor, ...]:
    *saved, grad, config = arguments
    grads = gradients_of(call_of(config_of(config), saved[0], saved[1]), saved, grad)
    return grads if len(grads) == 4 else (*grads, dsinks_like(grad, None))


_attend_operator = torch.library.custom_op(
    "annulus::attend",
    _attend,
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? seed, str config) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
_attend_backward_operator = torch.library.custom_op(
    "annulus::attend_backward",
    _attend_backward,
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? seed, Tensor o, Tensor lse, Tensor state_o, "
    "Tensor state_lse, Tensor grad, str config) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_attend_operator.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    c = config_of(config)
    o, lse = _result_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    rows: int | torch.SymInt = 0
    if _keeps_branches(q, c):
        # On a group it depends on the other ranks' lengths: they decide where this rank's tokens are.
        simple = c.group is None and all(getattr(c, name) is None for name in DOCUMENTS)
        rows = _kept_rows(q, c) if simple else torch.library.get_ctx().new_dynamic_size()
    return o, lse, *_states(q, rows)


@_attend_backward_operator.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor, ...]:
    return *gradients_like(q, k, v), dsinks_like(q, sinks)


def _save(ctx, inputs: tuple, output: tuple, call: Call | None = None) -> None:
    q, k, v, sinks, seed, ctx.config = inputs
    ctx.call = call
    o, lse, *states = output
    ctx.save_for_backward(q, k, v, sinks, seed, o, lse, *states)
    ctx.mark_non_differentiable(lse, *states)
    ctx.set_materialize_grads(False)


def refuse_sparse_gradient(grad: torch.Tensor, config: str) -> None:
    """Autograd checks dtype, device and shape. A sparse gradient would fail in PyTorch for want of a kernel."""
    if grad.layout != torch.strided:
        with errors_of_all(config_of(config)):
            raise ConfigError(
                f"ring_attention: the gradient of the output is a {grad.layout} tensor: a dense one was expected"
            )


def _differentiate(ctx, grad: torch.Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 6
    refuse_sparse_gradient(grad, ctx.config)
    saved = ctx.saved_tensors
    q, k, v, sinks = saved[:4]
    if not torch.is_grad_enabled() and _fast_path.only_autograd_active(q, k, v, grad):
        grads = gradients_of(ctx.call or call_of(config_of(ctx.config), q, k), saved, grad)
    else:
        states = _states(q, 0) if len(saved) == 7 else ()  # the operator takes states, also if there are none
        grads = torch.ops.annulus.attend_backward(*saved, *states, grad, ctx.config)
    return *grads[:3], None if sinks is None else grads[3], None, None


_attend_operator.register_autograd(_differentiate, setup_context=_save)


class _Attention(torch.autograd.Function):
    """annulus::attend and its gradient, without the operator."""

    @staticmethod
    def forward(
        ctx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *states = attended(call, q, k, v, sinks, seed)
        _save(ctx, (q, k, v, sinks, seed, call.config.text), (o, lse, *states), call)
        return o, lse

    backward = staticmethod(_differentiate)


def refuse_second_derivative(ctx, *_: torch.Tensor | None) -> tuple:
    raise NotImplementedError(
        "annulus: ring_attention has no second derivative; its gradient cannot be differentiated again"
    )


_attend_backward_operator.register_autograd(refuse_second_derivative)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    text: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse by the operator, which compilers, tracers, profilers and modes see."""
    o, lse, _, _ = torch.ops.annulus.attend(q, k, v, sinks, seed, text)
    return o, lse


def attend_directly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse without the operator: only autograd sees the call."""
    if call.config.backward:
        return _Attention.apply(q, k, v, sinks, seed, call)
    o, lse, *_ = attended(call, q, k, v, sinks, seed)
    return o, lse
