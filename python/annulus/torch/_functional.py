"""ring_attention: attention as a differentiable function of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from annulus import ConfigError
from annulus.torch import _fast_path
from annulus.torch._config import call_of, config_of, text_of
from annulus.torch._operator import attend, attend_directly
from annulus.torch._options import (
    DEFAULTS,
    branch_numbers,
    flag_complaint,
    refuse_unknown,
    with_options,
)
from annulus.torch._tensor_checks import DEVICES, DTYPES, tensor_complaint
from annulus.torch._transforms import refuse_transforms
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_name

# An argument of ring_attention that modules pass when some columns of q and k stand for a key_padding_mask: all ranks
# have to pass one, or none.
HAS_MASK = "_has_key_padding_mask"


# Constant in a compiled graph: dynamo does not trace it. Defaults are filled in here, because dynamo takes
# numbers in dictionaries for variables where shapes are dynamic.
@torch.compiler.assume_constant_result
def _text_of(names: tuple[str, ...], values: tuple, needs_gradient: bool, *arguments: object) -> str:
    """text_of, given some of the options by name, and before them the other fields of Config in their order."""
    return text_of(*arguments, *{**DEFAULTS, **dict(zip(names, values))}.values(), needs_gradient)


def _cast_for_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if (
        isinstance(q, torch.Tensor)
        and q.device.type in DEVICES
        and torch.is_autocast_enabled(q.device.type)
        and all(isinstance(x, torch.Tensor) and x.dtype in DTYPES for x in (q, k, v))
    ):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _valid_text(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: str | None,
    pattern: str | None,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    *others: object,
    options: dict[str, object],
) -> str:
    """The text of a valid call's Config, given the fields of Config in their order, up to the options."""
    complaint = tensor_complaint(q, k, v, group)
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
    return text


@collective(lambda *_, group=None, timeout=None, **__: (group, timeout))
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
    refuse_unknown("ring_attention", options, DEFAULTS)
    complaint = flag_complaint("return_lse", return_lse)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    arguments = (group_name(group), pattern, segment_lengths, dilation_rates, is_causal, offsets)
    arguments += (group_scale, placement, n_global, timeout, has_mask)
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v = _cast_for_autocast(q, k, v)
    if compiling:
        o, lse = attend(q, k, v, _valid_text(q, k, v, *arguments, options=options))
    else:
        plain = _fast_path.only_autograd_active(q, k, v)
        signature = None
        if plain or _fast_path.is_eager(q, k, v):
            signature = _fast_path.call_signature(q, k, v, arguments, options)
        call = _fast_path.known_call(signature)
        if call is None:
            call = call_of(config_of(_valid_text(q, k, v, *arguments, options=options)), q, k)
            _fast_path.remember(signature, call)
        if plain:
            o, lse = attend_directly(q, k, v, call)
        else:
            o, lse = attend(q, k, v, call.config.text)
    return (o, lse) if return_lse else o
