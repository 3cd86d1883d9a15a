"""ring_attention: attention as a differentiable function of tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from annulus import ConfigError, Placement
from annulus.torch import _fast_path
from annulus.torch._config import DOCUMENTS, call_of, config_of, text_of
from annulus.torch._dense_masks import Pairs, attend_densely, bias_complaint, pairs_of, total_bias
from annulus.torch._dense_masks import attention_weights as weights_of
from annulus.torch._key_masks import head_dim_complaint, mask_complaint, narrowed, widened
from annulus.torch._key_ranges import Ranges, find_ranges
from annulus.torch._operator import attend, attend_directly
from annulus.torch._options import (
    DEFAULTS,
    NO_MASK,
    UNREAD_MASK,
    branch_numbers,
    flag_complaint,
    name_complaint,
    option_complaint,
    refuse_unknown,
    timeout_complaint,
    whole_complaint,
    whole_numbers,
    window_pair,
    with_options,
)
from annulus.torch._placements import placement_complaint
from annulus.torch._shared_keys import GRADIENTS, attend_shared, shared_complaint
from annulus.torch._tensor_checks import (
    DEVICES,
    DTYPES,
    seed_complaint,
    sinks_complaint,
    tensor_complaint,
)
from annulus.torch._transforms import refuse_transforms
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_name
from annulus.torch.ring._records import StaleMask

# A private argument of ring_attention: how the key_padding_mask is computed, of which the other arguments are a part.
KEY_PADDING = "_key_padding"
# Another one: whether dropout_seed is what this rank has drawn.
HAS_DRAWN = "_has_drawn_its_seed"
# The arguments that are the first fields of Config, in their order.
_FIELDS = (
    *("group", "pattern", "segment_lengths", "dilation_rates", "window", *DOCUMENTS),
    *("is_causal", "offsets", "group_scale", "placement", "n_global", "timeout"),
)
# The next fields of Config, up to the options: no mask, no shared keys and no seed to draw.
_NO_MORE = (NO_MASK, 0, "whole", False)


# Its result is a constant in a compiled graph: dynamo does not trace it. Defaults are filled in here, because with
# dynamic shapes dynamo treats numbers in dictionaries as variables.
@torch.compiler.assume_constant_result
def _text_of(names: tuple[str, ...], values: tuple, needs_gradient: bool, *arguments: object) -> str:
    """Calls text_of. `arguments` has the fields of Config before the options; options are given by name or default."""
    return text_of(*arguments, *{**DEFAULTS, **dict(zip(names, values))}.values(), needs_gradient)


def _fixed(x: object) -> object:
    """x itself. In a compiled graph a whole number that was another one before is a variable, which this fixes; also in
    tuples."""
    if isinstance(x, tuple):
        return tuple(map(_fixed, x))
    whole = isinstance(x, int) and not isinstance(x, bool)
    return operator.index(x) if whole and torch.compiler.is_compiling() else x


def _cast_for_autocast(q: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if (
        isinstance(q, torch.Tensor)
        and q.device.type in DEVICES
        and torch.is_autocast_enabled(q.device.type)
        and all(isinstance(x, torch.Tensor) and x.dtype in DTYPES for x in (q, *others))
    ):
        dtype = torch.get_autocast_dtype(q.device.type)
        return tuple(x.to(dtype) for x in (q, *others))
    return (q, *others)


def _valid_text(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    group: str | None,
    pattern: str | None,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    window: Sequence[int] | None,
    *others: object,
    options: dict[str, object],
    more: tuple[torch.Tensor, ...] = (),
) -> str:
    """The text of a valid call's Config, given the fields of Config in their order, up to the options.

    `more` has tensors that may need a gradient, besides those that are checked.
    """
    complaint = tensor_complaint(q, k, v, group)
    if complaint is None and sinks is not None:
        complaint = sinks_complaint(sinks, q)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    tensors += more
    inside_vmap = not torch.compiler.is_compiling() and refuse_transforms("ring_attention", *tensors)
    needs_gradient = torch.is_grad_enabled() and (
        inside_vmap or any(x.requires_grad for x in tensors)
    )
    if pattern is None:
        pattern = "dense" if segment_lengths is None and dilation_rates is None else "longnet"
    segments = tuple(map(_fixed, branch_numbers("segment_lengths", segment_lengths)))
    rates = tuple(map(_fixed, branch_numbers("dilation_rates", dilation_rates)))
    window = window_pair(window)
    if isinstance(window, tuple):
        window = tuple(map(_fixed, window))
    names, values = tuple(options), tuple(options.values())
    documents = map(_fixed, others[: len(DOCUMENTS)])
    fields = (group, pattern, segments, rates, window, *documents, *others[len(DOCUMENTS) :])
    text = _text_of(names, values, needs_gradient, *fields)
    if text[0] == "!":
        raise ConfigError(f"ring_attention: {text[1:]}")
    return text


def _wide(sinks: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Valid sinks in the dtype of the computation."""
    if sinks is None:
        return None
    return sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _drops(dropout_p: object) -> bool:
    """Whether there is dropout. The value of a float is checked later."""
    if isinstance(dropout_p, float):
        return dropout_p != 0
    complaint = option_complaint("dropout_p", dropout_p)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    return float(dropout_p) != 0


def _seed_of(dropout_seed: int | torch.Tensor | None) -> torch.Tensor:
    """The seed of a call with dropout, on the CPU. None: drawn from PyTorch's generator of the CPU."""
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    dropout_seed = _fixed(dropout_seed)
    complaint = seed_complaint(dropout_seed)
    if complaint is None and isinstance(dropout_seed, torch.Tensor):
        if not _fast_path.is_eager((dropout_seed,)):
            return dropout_seed.detach().reshape(()).to("cpu", torch.int64)
        dropout_seed = dropout_seed.item()
        complaint = whole_complaint("dropout_seed", dropout_seed)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    return torch.full((), operator.index(dropout_seed), dtype=torch.int64, device="cpu")


def _attend_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, call: dict[str, object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse with a key_padding_mask, given the other arguments of ring_attention."""
    shared = call["shared_k"], call["shared_v"]
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        q, k, v = _cast_for_autocast(q, k, v)
        call["shared_k"], call["shared_v"] = shared = _cast_for_autocast(*shared)
    complaint = (
        tensor_complaint(q, k, v, call["group"])
        or mask_complaint(mask, q, k)
        or option_complaint("scale", call.get("scale"))
        or option_complaint("softcap", call.get("softcap", 0.0))
        or placement_complaint(call["placement"])
        or timeout_complaint(call["timeout"])
    )
    drops = _drops(call.get("dropout_p", 0.0))
    if complaint is None and shared != (None, None):
        complaint = shared_complaint(*shared, k, call.get("mix_gradient"), drops)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    # Lengths cannot be combined with documents. A compiled or captured call reads the mask whenever it is replayed.
    lists = any(call[name] is not None for name in DOCUMENTS if name != "query_start")
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if lists or capturing or not _fast_path.is_eager((q, k, v, mask)):
        return _attend_padded(q, k, v, mask, Ranges(UNREAD_MASK, None), call)
    if drops:  # once, also if the ranks begin anew
        call[HAS_DRAWN] = call["dropout_seed"] is None
        call["dropout_seed"] = _seed_of(call["dropout_seed"])
    where = group_name(call["group"]), call["timeout"], call["placement"]
    try:
        return _attend_padded(q, k, v, mask, find_ranges(mask, *where), call)
    except StaleMask:
        pass  # on all ranks
    return _attend_padded(q, k, v, mask, find_ranges(mask, *where, again=True), call)


# The ranks may have exchanged messages already: its errors are reported apart.
@collective(lambda *arguments: (arguments[-1]["group"], arguments[-1]["timeout"]))
def _attend_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    ranges: Ranges,
    call: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse with a key_padding_mask that leaves these ranges, or by columns of q and k that represent it."""
    call = {**call, "return_lse": True, KEY_PADDING: ranges.state}
    if ranges.arguments is not None:
        return ring_attention(q, k, v, **call | ranges.arguments)
    complaint = head_dim_complaint(q)
    if complaint is None and call.get("softcap"):
        complaint = (
            "softcap would also be applied to the columns of q and k that represent this key_padding_mask: a mask that "
            "leaves one range of keys in each batch entry needs no columns, except inside torch.compile and beside "
            "cu_seqlens, seqused_k or leftpad_k"
        )
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    head_dim, scale = q.shape[3], call.get("scale")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    q, k, v = widened(q, k, v, mask, scale)
    for name in ("shared_k", "shared_v"):
        if call[name] is not None:
            call[name] = F.pad(call[name], (0, q.shape[3] - head_dim))
    return narrowed(*ring_attention(q, k, v, **call | {"scale": scale}), head_dim, scale)


def _document_numbers(documents: Sequence[object]) -> tuple:
    return tuple(
        whole_numbers(name, _fixed(x), one=not name.startswith("cu_"))
        for name, x in zip(DOCUMENTS, documents)
    )


def _attend_shared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    shared: tuple[torch.Tensor, torch.Tensor],
    arguments: tuple,
    options: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse with keys that all ranks hold. `arguments` has the fields of Config before the options."""
    shared_k, shared_v = shared
    text = _valid_text(q, k, v, sinks, *arguments, options=options, more=shared)
    fields = dict(zip(_FIELDS, arguments))
    if fields["group_scale"]:
        shared_v = shared_v / len(branch_numbers("segment_lengths", fields["segment_lengths"]))
    # Of this rank alone, dense and without a mask.
    named = {"pattern": "dense", "is_causal": False, "offsets": "blocked", "group_scale": False}
    named |= {"placement": "contiguous"}
    plain = (*(named.get(name) for name in _FIELDS), *_NO_MORE)
    tensors = (k, v) if sinks is None else (k, v, sinks)
    shared_text = _valid_text(q, shared_k, shared_v, None, *plain, options=options, more=tensors)
    sinks = _wide(sinks, q)
    return attend_shared(q, k, v, sinks, shared_k, shared_v, text, shared_text)


def _with_biases(
    text: str,
    q: torch.Tensor,
    k: torch.Tensor,
    more_k: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
) -> tuple[Pairs, torch.Tensor | None, torch.Tensor]:
    """The pairs of a call, given the text of its Config, their biases, and the keys together with `more_k`, which every
    query attends to."""
    sizes = tuple(map(_fixed, (q.shape[2], q.shape[1], k.shape[1])))
    pairs = pairs_of(text, _fixed(q.shape[3]), _fixed(q.shape[0]), *sizes)
    bias = total_bias(pairs, sizes, q.dtype, q.device, attn_bias, key_padding_mask)
    if more_k is not None:
        k = torch.cat([k, more_k], 1)
        bias = None if bias is None else F.pad(bias, (0, more_k.shape[1]))
    return pairs, bias, k


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    more_k: torch.Tensor | None,
    average: bool,
    sinks: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    **call: object,
) -> torch.Tensor:
    """The weights of a call of ring_attention in one process, [batch, heads, queries, keys], or their mean over heads.

    `more_k` has keys that every query attends to; their weights are behind those of k. `call` has the other arguments
    of ring_attention, which have been checked.
    """
    documents = [call[name] for name in DOCUMENTS]
    call |= dict(zip(DOCUMENTS, _document_numbers(documents)))
    fields = [call.get(name) for name in _FIELDS]
    options = {name: call[name] for name in DEFAULTS if name in call and name != "dropout_p"}
    text = _valid_text(q, k, k, sinks, *fields, *_NO_MORE, options=options)
    pairs, bias, k = _with_biases(text, q, k, more_k, attn_bias, key_padding_mask)
    return weights_of(q, k, bias, average, pairs, sinks)


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
    window: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    cu_seqlens_k: Sequence[int] | torch.Tensor | None = None,
    query_start: int | Sequence[int] | torch.Tensor | None = None,
    seqused_k: int | Sequence[int] | torch.Tensor | None = None,
    leftpad_k: int | Sequence[int] | torch.Tensor | None = None,
    offsets: str = "blocked",
    group_scale: bool = False,
    group: dist.ProcessGroup | None = None,
    placement: str | Placement = "contiguous",
    n_global: int | None = None,
    timeout: float | None = None,
    return_lse: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_seed: int | torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    shared_k: torch.Tensor | None = None,
    shared_v: torch.Tensor | None = None,
    shared_gradient: str = "whole",
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence that is spread over the ranks of a group.

    Every rank passes its shard and gets its shard of the output and, in backward, of the gradients. The
    result is the same as in one process with the whole sequence, for any number of ranks and any
    placement: masks and dilation depend on the tokens' positions in the whole sequence.

    On a CUDA device the call enqueues work on the current stream and returns without waiting for it. With a
    group, the call waits until the other ranks make it, too. Rows go from device to device between processes of
    one host, and between hosts if the group's CUDA backend is NCCL. Otherwise they go through host memory, and
    the call waits for them.

    A call without a group can be captured in a graph (``torch.cuda.graph``) if the same call has been made
    before. The graph uses the same workspace as other calls of this shape: replay it on their stream, or order
    them by events.

    Args:
        q: [batch, local tokens, heads, head_dim] on the CPU or a CUDA device; float32, bfloat16 or float16,
            any strides whose last axis is dense (others are copied). float64 runs in one process, on the
            slow reference (with attn_bias or shared keys by PyTorch).
        k, v: the same with as many or fewer heads (a divisor: grouped-query attention). Query head h uses
            head h // (heads // kv_heads) of k and v: neighbours share one. They may have another number of
            tokens than q: cross-attention, or a chunk of queries behind a cache (query_start).
        segment_lengths, dilation_rates: one branch each, as in LongNet; without them attention is dense.
        pattern: "dense", "longnet" (every head is in every branch) or "head_groups" (every head is in one
            branch); None: "dense" without segment lengths, else "longnet".
        is_causal: tokens attend to themselves and earlier positions only.
        window: (before, after), as flash-attention's window_size: the query at position t attends only to keys at
            t - before to t + after; -1: no limit on that side. Positions are those of tokens, in dilated branches,
            too. With is_causal, after is 0 (or -1). None: no window.
        cu_seqlens: boundaries of packed documents in the whole sequence, as flash-attention's: 0, then the end of
            each document. Tokens of different documents do not attend to each other; positions, segments,
            offsets and windows start anew in each. Tokens behind the last boundary are padding: their output
            and gradients are 0. The same on all ranks. They hold for every batch entry; a list of lists or a 2-D
            tensor has those of each entry, and its rows may be padded with their last number. A tensor on a CUDA
            device is read, which waits for the device: pass a list. None: all tokens are one document.
        cu_seqlens_k: likewise of the keys, if they are not as many as the queries.
        query_start: position of the first query among the keys of its document: one number, or one for each
            document. Needed if q and k differ in length and there is a mask. Where cu_seqlens is of single batch
            entries or None, a list has one for each entry.
        seqused_k: number of keys of the whole sequence, if the rest is padding: one number, or one for each batch
            entry, as flash-attention's. Not with cu_seqlens. Padding is neither computed nor sent.
        leftpad_k: number of keys of padding at the beginning, likewise. The other keys keep their positions.
        offsets: how heads differ in the rows that a dilated branch selects: "blocked" or "interleaved". "all":
            every head takes every offset, so that the query at t attends to all keys of its segment at a multiple
            of the dilation from t; with a window this is the dilated sliding window.
        mix_gradient: "full" is the exact gradient; "detached" treats the branches' weights as constants,
            as the best-known LongNet implementation does, and keeps for it every branch's output of the
            rows that the branch selects.
        group_scale: divides the output by the number of branches (of segment lengths, with offsets="all").
        scale: of q.k, above 0; None: 1/sqrt(head_dim).
        group: the ranks of the ring; None: this process alone.
        placement: "contiguous", "zigzag", "striped", "hilbert" or a Placement: which rank holds which tokens. Make
            shards with :func:`shard`; contiguous shards may also have lengths of your own. A Placement is that of q,
            k and v.
        n_global: tokens of the whole sequence, on all ranks or none. The shards must then have the lengths
            that the placement gives them. This is only a check: ranks compare their lengths in any case.
        schedule: "ring", "gather" or "auto".
        reproducible: gives the same bits for every number of ranks and every placement; slower. Only gradients
            of sinks, shared_k and shared_v are sums of one part for each rank, whose last bits depend on their number.
        min_tokens_for_ring: below this many tokens in all, "auto" gathers.
        max_communication_bytes: limit on this rank's buffers for messages; more is a ConfigError.
        recover: when memory runs out on any rank, all ranks try again with less: without cached workspaces, with
            some sequences at a time, with some heads at a time, with schedule "ring". The results are the same (up
            to rounding, unless reproducible). The logger "annulus" reports what was done. False: the first failure
            is an error.
        allow_half: if recovery is not enough for float32, compute in bfloat16. The result is float32 with the
            precision of bfloat16.
        timeout: seconds that one transfer may take; None: the group's timeout. The ranks' may differ.
        return_lse: also return the log-sum-exp (natural logarithm) of every row, [batch, local tokens, heads],
            without gradient.
        key_padding_mask: [batch, local keys], of the keys that this rank passes; on all ranks or none. bool (True: the
            key is ignored) or floating point (added to the key's scores, with a gradient), as in
            nn.MultiheadAttention. A row without other keys gives 0. If it leaves one range of keys in each batch entry
            of the whole sequence, it is the same as seqused_k and leftpad_k, which the ranks find out once for each
            new mask; reading a mask on a CUDA device waits for the device. Otherwise, and inside torch.compile, it is
            a few more columns of q, k and v, and ignored keys are computed and sent.
        sinks: [heads], floating point, the same on every rank or on none: a logit per query head that takes part in
            the softmax of each of its rows and has no value (gpt-oss). -inf: none for that head. A row without keys
            gives 0, and its log-sum-exp is the sink. NaN or +inf makes all rows of the head NaN. On each rank its
            gradient is that of the rank's rows, as for every parameter that all ranks hold: the sum over the group
            is the whole one.
        softcap: c above 0: scores become c * tanh(score / c) before masks and softmax (Gemma 2). 0: they do not. Not
            with a key_padding_mask that leaves holes.
        dropout_p: from 0 to less than 1: after the softmax, each pair of query and key of a head loses its probability
            with this probability, and the others are divided by 1 - dropout_p. Which pairs do follows from dropout_seed,
            the batch entry, the head and the tokens of query and key alone (their numbers in the whole sequence): it is
            the same for any number of ranks, any placement and device, and in backward. lse is that of all pairs.
        dropout_seed: a whole number from 0 on, or a tensor of one (on the CPU: another one is read, which waits for the
            device). The same on all ranks, or None on all: then it is drawn from PyTorch's default generator of the CPU,
            which torch.manual_seed seeds, and all ranks use what rank 0 has drawn. Unused if dropout_p is 0.
        attn_bias: added to the scores, floating point, [queries, keys], [heads, queries, keys] or [batch, heads,
            queries, keys], or 1 in place of any of these; -inf: the query does not attend to the key. With a gradient.
            Its rows and columns are those of q and k. In one process, and combined with all other masks. PyTorch's
            attention computes it with a matrix of numbers, so that time and memory grow with queries x keys: for
            causal masks, windows, documents and padding use the arguments above.
        shared_k, shared_v: [batch, shared tokens, kv_heads, head_dim], keys and values that all ranks hold besides
            those of the sequence, as a prompt beside the tokens of an image. Every query attends to each of them once,
            in every head, whatever the pattern and the masks. On all ranks or none, and the same on all. They are not
            sent. Not with mix_gradient "detached".
        shared_gradient: "whole": every rank gets the whole gradient of shared_k and shared_v, with the same bits.
            "own": that of the rank's queries, whose sum over the group is the whole one; for what is computed from parameters
            whose gradients are added over the ranks, as by DistributedDataParallel.

    Raises:
        ConfigError: an argument is wrong on any rank; the ranks' calls differ; two threads call on one group at
            the same time. Raised on every rank.
        TransportError: a rank died, left or took too long; its ``rank`` is the rank at fault, if known.
        OutOfMemory: memory ran out on any rank. Raised on every rank; says what was tried and what would fit.
    """
    key_padding = options.pop(KEY_PADDING, NO_MASK)
    has_drawn = options.pop(HAS_DRAWN, False)
    if options:
        refuse_unknown("ring_attention", options, DEFAULTS)
    complaint = flag_complaint("return_lse", return_lse)
    if complaint is None and shared_gradient not in GRADIENTS:
        complaint = name_complaint("shared_gradient", shared_gradient, GRADIENTS)
    if complaint is not None:
        raise ConfigError(f"ring_attention: {complaint}")
    has_shared = shared_k is not None or shared_v is not None
    # The reference, which computes float64, has no shared keys.
    dense = attn_bias is not None or (has_shared and getattr(q, "dtype", None) == torch.float64)
    if key_padding_mask is not None and not dense:
        branches = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        masks: dict[str, object] = {"is_causal": is_causal, "window": window, "cu_seqlens": cu_seqlens}
        masks |= {"cu_seqlens_k": cu_seqlens_k, "query_start": query_start}
        masks |= {"seqused_k": seqused_k, "leftpad_k": leftpad_k}
        ring = {"group": group, "placement": placement, "n_global": n_global, "timeout": timeout}
        kind = {"pattern": pattern, "offsets": offsets, "group_scale": group_scale}
        call = {**branches, **masks, **ring, **kind, **options}
        call |= {"sinks": sinks, "dropout_seed": dropout_seed, "shared_gradient": shared_gradient}
        call |= {"shared_k": shared_k, "shared_v": shared_v}
        o, lse = _attend_masked(q, k, v, key_padding_mask, call)
        return (o, lse) if return_lse else o
    documents = (cu_seqlens, cu_seqlens_k, query_start, seqused_k, leftpad_k)
    for given in documents:  # no generator: a small call makes few Python calls
        if given is not None:
            documents = _document_numbers(documents)
            break
    arguments = (group_name(group), pattern, segment_lengths, dilation_rates, window)
    arguments += (*documents, is_causal)
    arguments += (offsets, group_scale, placement, n_global, timeout, key_padding)
    compiling = torch.compiler.is_compiling()
    drops = "dropout_p" in options and _drops(options["dropout_p"])
    draws = has_drawn or (drops and dropout_seed is None)
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v = _cast_for_autocast(q, k, v)
        shared_k, shared_v = _cast_for_autocast(shared_k, shared_v)
    if dense or has_shared:
        complaint = tensor_complaint(q, k, v, group)
        if complaint is None and has_shared:
            mixing = options.get("mix_gradient")
            complaint = shared_complaint(shared_k, shared_v, k, mixing, drops)
        if complaint is None and attn_bias is not None:
            complaint = bias_complaint(attn_bias, q, k, group, options.get("mix_gradient"))
        if complaint is None and key_padding_mask is not None:
            complaint = mask_complaint(key_padding_mask, q, k)
        if complaint is not None:
            raise ConfigError(f"ring_attention: {complaint}")
        arguments += (_fixed(shared_k.shape[1]), shared_gradient, draws) if has_shared else (0, "whole", draws)
        if dense:
            text = _valid_text(q, k, v, sinks, *arguments, options=options)
            seed = _seed_of(dropout_seed) if drops else None
            pairs, bias, k = _with_biases(text, q, k, shared_k, attn_bias, key_padding_mask)
            v = v if shared_v is None else torch.cat([v, shared_v], 1)
            o, lse = attend_densely(q, k, v, bias, _wide(sinks, q), seed, pairs, return_lse)
        else:
            shared = shared_k, shared_v
            o, lse = _attend_shared(q, k, v, sinks, shared, arguments, options)
        return (o, lse) if return_lse else o
    arguments += (0, "whole", draws)
    if compiling:
        text = _valid_text(q, k, v, sinks, *arguments, options=options)
        seed = _seed_of(dropout_seed) if drops else None
        o, lse = attend(q, k, v, _wide(sinks, q), seed, text)
    else:
        tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
        plain = _fast_path.only_autograd_active(*tensors)
        signature = None
        if plain or _fast_path.is_eager(tensors):
            signature = _fast_path.call_signature(q, k, v, sinks, arguments, options)
        call = _fast_path.known_call(signature)
        if call is None:
            text = _valid_text(q, k, v, sinks, *arguments, options=options)
            call = call_of(config_of(text), q, k)
            _fast_path.remember(signature, call)
        sinks = _wide(sinks, q)
        seed = _seed_of(dropout_seed) if drops else None
        if plain:
            o, lse = attend_directly(q, k, v, sinks, seed, call)
        else:
            o, lse = attend(q, k, v, sinks, seed, call.config.text)
    return (o, lse) if return_lse else o
