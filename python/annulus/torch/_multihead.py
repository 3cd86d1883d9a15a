"""RingMultiheadDilatedAttention: torch.nn.MultiheadAttention over a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from annulus import ConfigError
from annulus.torch._config import DOCUMENTS
from annulus.torch._key_masks import MOST_HEAD_DIM, attention_weights, key_bias
from annulus.torch._modules import FIXED, RingDilatedAttention, with_fixed_options
from annulus.torch._options import (
    MOST_NUMBER,
    dropout_complaint,
    flag_complaint,
    number_complaint,
    refuse_unknown,
    whole_complaint,
)
from annulus.torch._published import takes_published_names
from annulus.torch._rotary import rotate
from annulus.torch.ring._errors import collective


class RingMultiheadDilatedAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` over a ring, dense or dilated.

    Constructor, parameters, state dict, :meth:`forward` and its result are those of
    ``torch.nn.MultiheadAttention``: either loads the other's state dict, and with a dense pattern in one
    process both give the same numbers. It can be used as ``self_attn`` in ``nn.TransformerEncoderLayer``.
    With a `group`, every rank passes its shard of the sequence.

    These options of nn.MultiheadAttention raise a :class:`ConfigError`, because they would silently change the
    result: ``add_bias_kv``, ``add_zero_attn``.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
            dtype: as in nn.MultiheadAttention. embed_dim / num_heads is at most 512.
        segment_lengths, dilation_rates: branches as in LongNet; without them attention is dense.
        layer_norm: MAGNETO's sub-LayerNorm: normalises the joint output of the heads before ``out_proj``.
        layer_norm_eps: the eps of this normalisation.
        gamma_init: MAGNETO's gain of the value and output projections. All projections are initialised by
            Xavier's normal rule, query and key with gain 1. None: nn.MultiheadAttention's initialisation.
        is_causal: every call is causal.
        sinks: learns a logit per head, the parameter ``sinks``, that takes part in the softmax of each of its rows
            and has no value. It begins as 0.
        window: (before, after): the query at t attends only to keys from t - before to t + after, as in
            :func:`ring_attention`.
        options: all other keyword arguments of :func:`ring_attention` except n_global, return_lse and key_padding_mask:
            pattern, offsets, group_scale, group, placement, timeout, schedule and so on.
    """

    @takes_published_names
    @with_fixed_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        gamma_init: float | None = None,
        sinks: bool = False,
        **options: object,
    ):
        here = type(self).__name__
        refuse_unknown(here, options, FIXED)
        for name, value in (
            ("add_bias_kv", add_bias_kv),
            ("add_zero_attn", add_zero_attn),
        ):
            if value:
                raise ConfigError(f"{here}: {name} = {value} is not supported")
        complaint = dropout_complaint("dropout", dropout)
        if complaint is None and options.get("dropout_p", 0.0) != 0.0:
            complaint = "dropout_p is another name of dropout: pass dropout"
        if complaint is not None:
            self._refuse(complaint)
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads}
        sizes |= {n: x for n, x in (("kdim", kdim), ("vdim", vdim)) if x is not None}
        flags = {"bias": bias, "batch_first": batch_first, "layer_norm": layer_norm, "sinks": sinks}
        numbers = {"layer_norm_eps": layer_norm_eps}
        if gamma_init is not None:
            numbers["gamma_init"] = gamma_init
        self._check_arguments(sizes, flags, numbers)
        if embed_dim % num_heads != 0:
            raise ConfigError(
                f"{here}: embed_dim {embed_dim} does not divide by num_heads {num_heads}"
            )
        if embed_dim // num_heads > MOST_HEAD_DIM:
            raise ConfigError(
                f"{here}: embed_dim / num_heads is {embed_dim // num_heads}: at most {MOST_HEAD_DIM} was expected"
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout=float(dropout),
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self._packed = self._qkv_same_embed_dim
        # The fused path of nn.TransformerEncoderLayer would compute dense attention with the weights of this
        # module. This attribute disables it.
        self._qkv_same_embed_dim = False
        options["dropout_p"] = self.dropout
        self.attention = RingDilatedAttention(segment_lengths, dilation_rates, **options)
        self.layer_norm = (
            nn.LayerNorm(embed_dim, eps=layer_norm_eps, device=device, dtype=dtype)
            if layer_norm
            else None
        )
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        else:
            self.register_parameter("sinks", None)
        if gamma_init is not None:
            self._init_magneto(gamma_init)

    def _check_arguments(self, sizes: dict, flags: dict, numbers: dict) -> None:
        """Checks before PyTorch does, which accepts wrong values or raises less clear errors."""
        complaints = [
            *(whole_complaint(n, x, 2**31 - 1, least=1) for n, x in sizes.items()),
            *(flag_complaint(n, x) for n, x in flags.items()),
            *(number_complaint(n, x, MOST_NUMBER) for n, x in numbers.items()),
        ]
        for complaint in complaints:
            if complaint is not None:
                self._refuse(complaint)

    def _projections(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._packed:
            return self.in_proj_weight.chunk(3)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _reset_parameters(self) -> None:
        made = "_packed" in self.__dict__  # else the constructor of nn.MultiheadAttention is running
        if made:
            self._qkv_same_embed_dim = self._packed
        super()._reset_parameters()
        if made:
            self._qkv_same_embed_dim = False
            if self.sinks is not None:
                nn.init.zeros_(self.sinks)

    def _init_magneto(self, gamma: float) -> None:
        with torch.no_grad():
            for weight, gain in zip(self._projections(), (1.0, 1.0, gamma)):
                nn.init.xavier_normal_(weight, gain=gain)
            nn.init.xavier_normal_(self.out_proj.weight, gain=gamma)

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        split = (self.num_heads, self.head_dim)
        if self._packed and query is key and key is value:
            qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return qkv.unflatten(-1, (3, *split)).unbind(-3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(x, weight, b).unflatten(-1, split)
            for x, weight, b in zip((query, key, value), self._projections(), biases)
        )

    @collective(lambda self, *_, **__: (self.attention.group, self.attention.timeout))
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        n_global: int | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        dropout_seed: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention.forward, for this rank's shards.

        Args:
            query, key, value: [tokens, batch, features], or [batch, tokens, features] if batch_first, or
                [tokens, features]. Their lengths are equal, because masks and branches depend on positions.
            key_padding_mask: [batch, tokens] of this shard. Boolean: True means that the key is ignored; or
                floating point, added to the scores of the key. (A tokenizer's attention_mask is neither: pass
                ``attention_mask == 0``.) A row without any key gives zeros before ``out_proj``
                (nn.MultiheadAttention gives NaN). A mask needs three more columns of q and k: embed_dim / num_heads
                is at most 509 with it.
            need_weights: whether to return the attention weights, which computes their whole matrix. True needs
                the dense pattern and one process. None: True if both hold, else False.
            average_attn_weights: whether the returned weights are the mean over the heads.
            attn_mask: [tokens, tokens] or [batch x heads, tokens, tokens], boolean or floating point, in one
                process. Accepted if it masks nothing or is the causal mask of the whole sequence, which has the
                effect of `is_causal`.
            is_causal: whether the call is causal, without a mask. If it is True, attn_mask is ignored.
            n_global: as in :func:`ring_attention`.
            rotary: rotates queries and keys by their positions: the result of :func:`rotary_table` for this shard.
            dropout_seed: as in :func:`ring_attention`. Returned weights are those without dropout.

        Returns:
            (output like query, weights or None).
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, torch.Tensor):
                self._refuse(f"{name} is a {type(x).__name__}: a torch.Tensor was expected")
        if query.is_nested:
            if rotary is not None:
                self._refuse("rotary cannot be used with nested tensors: pad them")
            return self._forward_nested(query, key, value, need_weights, attn_mask, is_causal)
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and not isinstance(mask, torch.Tensor):
                self._refuse(f"{name} is a {type(mask).__name__}: a torch.Tensor was expected")
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            self._refuse(
                f"query, key, value have {query.dim()}, {key.dim()}, {value.dim()} axes: 2 or 3 of each was "
                "expected"
            )
        self_attention = query is key and key is value
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if self_attention:
            key = value = query
        if key.shape[1] != value.shape[1]:
            self._refuse(
                f"key has {key.shape[1]} tokens, value {value.shape[1]}: equal lengths were expected"
            )
        special = ("segment_lengths", "group", *DOCUMENTS)
        has_weights = all(getattr(self.attention, name) is None for name in special)
        need_weights = has_weights if need_weights is None else need_weights
        if need_weights and not has_weights:
            self._refuse(
                "need_weights is supported only for the dense pattern without documents and query_start, in one "
                "process: pass need_weights=False"
            )
        causal = is_causal or self.attention.is_causal
        if attn_mask is not None and not is_causal:
            causal = self._is_causal_mask(attn_mask, query.shape[0], query.shape[1])

        q, k, v = self._project(query, key, value)
        if rotary is not None:
            self._check_rotary(rotary, query.shape[1])
            q, k = rotate(q, rotary), rotate(k, rotary)
        heads = self.attention(
            *(q, k, v, causal, n_global),
            sinks=self.sinks,
            key_padding_mask=key_padding_mask,
            dropout_seed=dropout_seed,
        )
        out = heads.flatten(-2)
        if self.layer_norm is not None:
            out = self.layer_norm(out)
        out = self.out_proj(out)
        weights = None
        if need_weights:
            scale = self.attention.scale
            scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
            bias = None if key_padding_mask is None else key_bias(key_padding_mask, q.dtype)
            mask = (causal, self.attention.window)
            special = (self.sinks, self.attention.softcap)
            weights = attention_weights(q, k, bias, *mask, average_attn_weights, scale, *special)

        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _forward_nested(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        need_weights: bool | None,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, None]:
        """forward with nested tensors, which nn.TransformerEncoder makes of padded ones when it is not training."""
        if query is not key or key is not value or need_weights or self.attention.group is not None:
            self._refuse(
                "nested tensors are supported only for self-attention in one process with need_weights=False"
            )
        lengths = torch.tensor([len(x) for x in query.unbind()])
        padded = query.to_padded_tensor(0.0)
        padding = (torch.arange(padded.shape[1]) >= lengths[:, None]).to(padded.device)
        if not self.batch_first:
            padded = padded.transpose(0, 1)
        out, _ = self.forward(
            padded, padded, padded, padding, False, attn_mask, is_causal=is_causal
        )
        if not self.batch_first:
            out = out.transpose(0, 1)
        return torch.nested.as_nested_tensor([x[:n] for x, n in zip(out, lengths)]), None

    def _refuse(self, text: str) -> NoReturn:
        raise ConfigError(f"{type(self).__name__}: {text}")

    def _check_rotary(self, rotary: tuple[torch.Tensor, torch.Tensor], tokens: int) -> None:
        shape = (tokens, 1, self.head_dim // 2)
        if tuple(x.shape for x in rotary) != (shape, shape):
            self._refuse(
                f"rotary has shapes {[list(x.shape) for x in rotary]}: two of {list(shape)} were expected, from "
                "rotary_table"
            )

    def _is_causal_mask(self, mask: torch.Tensor, batch: int, tokens: int) -> bool:
        """Whether a call with this mask is causal. Refuses a mask that is neither empty nor causal."""
        if self.attention.group is not None:
            self._refuse("attn_mask cannot be used with a group: pass is_causal=True")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            self._refuse(f"attn_mask is {mask.dtype}: torch.bool or floating point was expected")
        pairs = (tokens, tokens)
        if mask.shape not in (pairs, (batch * self.num_heads, *pairs)):
            self._refuse(
                f"attn_mask is {list(mask.shape)}: [{tokens}, {tokens}] or [batch x heads, {tokens}, {tokens}] "
                f"with {batch * self.num_heads} of them was expected"
            )
        masked = mask if mask.dtype == torch.bool else mask == -torch.inf
        plain = mask.dtype == torch.bool or bool(((mask == 0) | masked).all())
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).triu(1)
        if plain and bool((masked == later).all()):
            return True
        if plain and not bool(masked.any()):
            return self.attention.is_causal
        self._refuse(
            "attn_mask is neither empty nor the causal mask: other masks are not supported"
        )
