"""Attention with a matrix of biases of pairs, in one process; and the matrix of attention weights.

A pattern's branches form one softmax over a multiset of keys. So it is the attention of PyTorch with a bias for each
pair of query and key: the logarithm of the number of branches that contain the pair. Memory grows with the number of
pairs.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from annulus import ConfigError
from annulus.torch._config import config_of, pattern_of
from annulus.torch._dropout import kept_pairs
from annulus.torch._key_masks import key_bias
from annulus.torch._placements import token_ranges, tokens_of
from annulus.torch._tensor_checks import DTYPES

_MOST_SCORES = 2**26  # that are in memory at once for log-sum-exps


class Pairs(NamedTuple):
    """What total_bias needs of a call, as plain numbers, which are constants of a compiled graph."""

    branches: tuple[tuple[int, int, tuple[int, ...]], ...]  # segment length (0: none), dilation, offset of each head
    least: int | None  # of key position minus query position
    most: int | None
    # For each batch entry or once for all, the documents: query_begin, query_end, key_begin, key_end, query_start,
    # key_start. None: all tokens are one.
    documents: tuple[tuple[tuple[int, ...], ...], ...] | None
    order: tuple[tuple[int, int, int], ...]  # the tokens of q's rows, as ranges (start, stop, step)
    key_order: tuple[tuple[int, int, int], ...]
    output_scale: float
    scale: float
    softcap: float
    dropout_p: float
    deterministic: bool


@torch.compiler.assume_constant_result
def pairs_of(
    text: str, head_dim: int, batch: int, heads: int, tokens: int, key_tokens: int
) -> Pairs:
    """The pairs of a call, given the text of its Config. ConfigError if it does not fit these numbers of tokens."""
    c = config_of(text)
    if c.n_global not in (None, tokens):
        raise ConfigError(f"ring_attention: n_global is {c.n_global}, but q has {tokens} tokens")
    pattern = pattern_of(c, heads, tokens, key_tokens)
    pattern.allowed_pairs(tokens, key_tokens)  # checks the documents
    before, after = (-1, -1) if c.window is None else c.window
    after = 0 if c.is_causal else after
    documents = None
    if pattern.documents:
        entries = 1 + pattern.documents[-1][-1]  # -1: the documents of all entries
        if entries not in (0, batch):
            raise ConfigError(
                f"ring_attention: there are documents of {entries} batch entries, but q has {batch}"
            )
        documents = tuple(
            tuple(d[:-1] for d in pattern.documents if d[-1] in (-1, entry))
            for entry in range(max(1, entries))
        )
    return Pairs(
        tuple((b.segment_length or 0, b.dilation, tuple(b.offset)) for b in pattern.branches),
        -before if before >= 0 else None,
        after if after >= 0 else None,
        documents,
        token_ranges(c.placement, tokens),
        token_ranges(c.placement, key_tokens),
        pattern.output_scale,
        head_dim**-0.5 if c.scale is None else float(c.scale),
        float(c.softcap),
        float(c.dropout_p),
        bool(c.deterministic or c.reproducible),
    )


def _places(
    token: torch.Tensor,
    documents: tuple[tuple[tuple[int, ...], ...], ...] | None,
    side: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The position and the document of each token, [batch or 1, tokens]; below 0: none. `side`: 0 is queries, 1 keys.

    src/pattern/segments.h does the same for kernels.
    """
    device = token.device
    if documents is None:
        return token[None], torch.zeros_like(token)[None]
    positions, numbers = [], []
    for of_entry in documents:
        begin, end, start = (
            torch.tensor([d[i] for d in of_entry] or [0], device=device)
            for i in (2 * side, 2 * side + 1, 4 + side)
        )
        number = torch.bucketize(token, begin, right=True) - 1
        some = number.clamp(min=0)
        positions.append(token - begin[some] + start[some])
        inside = (number >= 0) & (token < end[some]) & (len(of_entry) > 0)
        numbers.append(torch.where(inside, number, -1 - side))
    return torch.stack(positions), torch.stack(numbers)


def _pair_counts(
    pairs: Pairs, heads: int, tokens: int, key_tokens: int, device: torch.device
) -> torch.Tensor | None:
    """How many branches contain each pair, [batch or 1, heads or 1, tokens, key_tokens]; None: each pair is in one."""
    whole = all(length == 0 and dilation == 1 for length, dilation, _ in pairs.branches)
    if whole and pairs.least is None and pairs.most is None and pairs.documents is None:
        return None
    at, document = _places(tokens_of(pairs.order, device), pairs.documents, 0)
    key_at, key_document = _places(tokens_of(pairs.key_order, device), pairs.documents, 1)
    distance = key_at[:, None] - at[..., None]
    allowed = document[..., None] == key_document[:, None]
    if pairs.least is not None:
        allowed = allowed & (distance >= pairs.least)
    if pairs.most is not None:
        allowed = allowed & (distance <= pairs.most)
    if whole:
        return allowed[:, None].to(torch.int16)
    counts = torch.zeros(len(at), heads, tokens, key_tokens, dtype=torch.int16, device=device)
    for length, dilation, offsets in pairs.branches:
        near, in_segment, key_in_segment = allowed, at, key_at
        if length > 0:
            near = near & ((at // length)[..., None] == (key_at // length)[:, None])
            in_segment, key_in_segment = at % length, key_at % length
        for offset in sorted({o for o in offsets if o >= 0}):
            selected = in_segment % dilation == offset
            both = near & selected[..., None] & (key_in_segment % dilation == offset)[:, None]
            counts[:, [h for h, o in enumerate(offsets) if o == offset]] += both[:, None]
    return counts


def total_bias(
    pairs: Pairs,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    attn_bias: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """The bias of each pair, [batch or 1, heads or 1, queries, keys]; None: 0. -inf: the query does not see the key.

    Its dtype is `dtype`, or a wider one if a part of the bias needs it. `shape` is heads, queries, keys.
    """
    counts = _pair_counts(pairs, *shape, device)
    bias = None
    if counts is not None:
        several = len(pairs.branches) > 1
        wide = torch.promote_types(dtype, torch.float32) if several else dtype
        bias = counts.to(wide).log()  # log(0) is -inf, log(1) is 0
    if attn_bias is not None:
        attn_bias = attn_bias[(None,) * (4 - attn_bias.dim())]
        bias = attn_bias if bias is None else bias + attn_bias
    if key_padding_mask is not None:
        keys = key_bias(key_padding_mask, dtype)
        if key_padding_mask.dtype == torch.bool:
            keys = keys.to(dtype)
        keys = keys[:, None, None]
        bias = keys if bias is None else bias + keys
    if bias is None:
        return None
    # In this order, gradients are added before they are rounded to the dtype of the bias.
    return bias.to(torch.promote_types(bias.dtype, dtype)).expand(*bias.shape[:2], *shape[1:])


def _used(
    bias: torch.Tensor, q: torch.Tensor, *of_keys: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Which queries see no key, [batch or 1, heads or 1, queries]; and q and tensors of keys with zeros for them, and for
    keys that no query sees. These may be anything, also NaN."""
    unseen = bias == -torch.inf
    empty, hidden = unseen.all(3), unseen.all(2)
    if hidden.shape[1] > 1:  # the query heads that use one head of keys
        hidden = hidden.unflatten(1, (of_keys[0].shape[2], -1)).all(2)
    rows = [(q, empty), *((x, hidden) for x in of_keys)]
    return empty, [x.masked_fill(unused.transpose(1, 2)[..., None], 0) for x, unused in rows]


def attend_densely(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    pairs: Pairs,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and lse if it is wanted, with the bias of each pair. A row without keys gives 0."""
    if bias is None:
        bias = q.new_zeros(1, 1, q.shape[1], k.shape[1])
    if sinks is not None:  # NaN and +inf make all rows of a head NaN
        sinks = torch.where(sinks < torch.inf, sinks, torch.nan)
    empty, (q, k, v) = _used(bias, q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        lse = _log_sum_exp(q, k, bias, sinks, pairs) if with_lse else None
    dtype = torch.promote_types(q.dtype, bias.dtype)
    if sinks is not None:  # a key of zeros, with the sink as its bias
        empty = empty & (sinks == -torch.inf)[:, None]
        dtype = torch.promote_types(dtype, torch.float32)
        bias = bias.to(dtype).expand(-1, len(sinks), -1, -1)
        column = sinks.to(dtype)[:, None, None].expand(*bias.shape[:3], 1)
        bias = torch.cat([bias, column], -1)
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    bias = bias.masked_fill(empty[..., None], 0)  # rows of -inf alone would be NaN
    if pairs.softcap or seed is not None:
        dtype = torch.promote_types(dtype, torch.float32)
    q4, k4, v4 = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    # A backend with atomic additions gives other bits in every run.
    backend = sdpa_kernel(SDPBackend.MATH) if pairs.deterministic else contextlib.nullcontext()
    with backend, torch.autocast(q.device.type, enabled=False):
        if pairs.softcap or seed is not None:
            o = _attend_by_matrix(q4, k4, v4, bias, seed, pairs)
        else:
            grouped = q.shape[2] != k.shape[2]
            o = F.scaled_dot_product_attention(
                *(q4, k4, v4), attn_mask=bias, scale=pairs.scale, enable_gqa=grouped
            )
    o = o.masked_fill(empty[..., None], 0) * pairs.output_scale
    return o.transpose(1, 2).to(q.dtype).contiguous(), lse


def _scores(q: torch.Tensor, k: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """[batch, heads, queries, keys], of tensors [batch, heads, tokens, head_dim]."""
    scores = torch.matmul(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3))
    scores = scores * pairs.scale
    return pairs.softcap * torch.tanh(scores / pairs.softcap) if pairs.softcap else scores


def _attend_by_matrix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor | None,
    pairs: Pairs,
) -> torch.Tensor:
    """What scaled_dot_product_attention cannot do: softcap, and the dropout of the kernels."""
    weights = (_scores(q, k, pairs) + bias).softmax(-1)
    if seed is not None:
        tokens = (tokens_of(order, weights.device) for order in (pairs.order, pairs.key_order))
        kept = kept_pairs(seed, pairs.dropout_p, *weights.shape[:2], *tokens)
        kept = F.pad(kept, (0, weights.shape[3] - kept.shape[3]), value=True)  # a sink has no value to drop
        weights = weights.masked_fill(~kept, 0) / (1 - pairs.dropout_p)
    return torch.matmul(weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def _log_sum_exp(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor | None,
    pairs: Pairs,
) -> torch.Tensor:
    """[batch, queries, heads], without gradient."""
    with torch.no_grad():
        batch, tokens, heads, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, keys = (x.to(wide).transpose(1, 2) for x in (q, k))
        some = max(1, _MOST_SCORES // max(1, batch * heads * k.shape[1]))
        parts = []
        for first in range(0, tokens, some):
            rows = slice(first, first + some)
            scores = _scores(queries[:, :, rows], keys, pairs)
            parts.append((scores + bias[:, :, rows]).logsumexp(-1))
        lse = torch.cat(parts, -1) if parts else q.new_zeros(batch, heads, 0, dtype=wide)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(wide)[:, None])
        return lse.transpose(1, 2).to(torch.float32).contiguous()


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    average: bool,
    pairs: Pairs,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix of attention weights, [batch, heads, queries, keys], or its mean over the heads. Without dropout.

    A row that attends to no key has weights 0, as its output is 0.
    """
    if bias is None:
        bias = q.new_zeros(1, 1, q.shape[1], k.shape[1])
    empty, (q, k) = _used(bias, q, k)
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q.transpose(1, 2), k.transpose(1, 2), pairs) + bias
    scores = scores.masked_fill(empty[..., None], 0)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(empty[..., None], 0)
    return (weights.mean(1) if average else weights).to(q.dtype)  # a bias may have a wider dtype


def bias_complaint(
    bias: object, q: torch.Tensor, k: torch.Tensor, group: object, mix_gradient: object
) -> str | None:
    """What is wrong with an attn_bias for these tensors and options; None: nothing."""
    if group is not None:
        return (
            "attn_bias cannot be used with a group: its rows and columns are those of all ranks. Pass is_causal, "
            "window, cu_seqlens or key_padding_mask"
        )
    if mix_gradient == "detached":
        return "attn_bias cannot be used with mix_gradient 'detached': all branches are computed as one"
    if not isinstance(bias, torch.Tensor):
        return f"attn_bias is a {type(bias).__name__}: a torch.Tensor was expected"
    if bias.is_nested or bias.layout != torch.strided:
        return "attn_bias is a nested or sparse tensor: a dense one was expected"
    if bias.dtype not in (*DTYPES, torch.float64):
        return (
            f"attn_bias is {bias.dtype}: floating point of 16 to 64 bits was expected, which is added to the scores. For "
            "a boolean mask pass torch.zeros(mask.shape).masked_fill(mask, -torch.inf), where mask is True for hidden "
            "pairs"
        )
    batch, tokens, heads, _ = q.shape
    most = (batch, heads, tokens, k.shape[1])
    fits = 2 <= bias.dim() <= 4 and all(
        n in (1, m) for n, m in zip(bias.shape, most[4 - bias.dim() :])
    )
    if not fits:
        return (
            f"attn_bias is {list(bias.shape)}: [queries, keys], [heads, queries, keys] or [batch, heads, queries, "
            f"keys] was expected, with {list(most)} or 1 in place of any of them"
        )
    if bias.device != q.device:
        return f"attn_bias is on {bias.device}, but q is on {q.device}: one device was expected"
    return None
