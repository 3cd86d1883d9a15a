"""RingMultiheadDilatedAttention: torch.nn.MultiheadAttention over a ring."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from annulus import ConfigError
from annulus.torch._config import DOCUMENTS
from annulus.torch._fast_path import is_eager
from annulus.torch._functional import attention_weights
from annulus.torch._mask_forms import arguments_of, mask_form
from annulus.torch._modules import FIXED, RingDilatedAttention, with_fixed_options
from annulus.torch._options import (
    MOST_HEAD_DIM,
    MOST_NUMBER,
    dropout_complaint,
    flag_complaint,
    number_complaint,
    refuse_unknown,
    whole_complaint,
)
from annulus.torch._placements import token_ranges, tokens_of
from annulus.torch._published import takes_published_names
from annulus.torch._rotary import rotate
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_name
from annulus.torch.ring._registry import lengths_of_all


class _WrongAxes(ConfigError, AssertionError):
    """nn.MultiheadAttention raises an AssertionError for a wrong number of axes."""


def _projection(name: str, number: int) -> property:
    """A parameter of that name, or where weights are packed the part of in_proj_weight.

    Code that finds ``_qkv_same_embed_dim`` False reads these, for example F.multi_head_attention_forward.
    """

    def weight(self: nn.Module) -> torch.Tensor:
        if name not in self._parameters:
            raise AttributeError(name)
        own, packed = self._parameters[name], self._parameters.get("in_proj_weight")
        return own if own is not None or packed is None else packed.chunk(3)[number]

    side = ("queries", "keys", "values")[number]
    return property(weight, doc=f"The weight that projects {side}, also where it is a part of in_proj_weight.")


class RingMultiheadDilatedAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` over a ring, dense or dilated.

    Constructor, parameters, state dict, :meth:`forward` and its result are those of
    ``torch.nn.MultiheadAttention``: either loads the other's state dict, and with a dense pattern in one
    process both give the same numbers. It can be used as ``self_attn`` in ``nn.TransformerEncoderLayer``.
    With a `group`, every rank passes its shard of the sequence.


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
        options: all other keyword arguments of :func:`ring_attention` that do not change from call to call: pattern,
            offsets, group_scale, group, placement, timeout, schedule and so on.
    """

    q_proj_weight, k_proj_weight, v_proj_weight = (
        _projection(f"{x}_proj_weight", number) for number, x in enumerate("qkv")
    )

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
        complaint = dropout_complaint("dropout", dropout)
        if complaint is None and options.get("dropout_p", 0.0) != 0.0:
            complaint = "dropout_p is another name of dropout: pass dropout"
        if complaint is None and dropout and add_bias_kv:
            complaint = (
                f"dropout is {dropout} and add_bias_kv is True: which weights are dropped follows from tokens, and "
                "the additional key is none"
            )
        if complaint is not None:
            self._refuse(complaint)
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads}
        sizes |= {n: x for n, x in (("kdim", kdim), ("vdim", vdim)) if x is not None}
        flags = {"bias": bias, "batch_first": batch_first, "layer_norm": layer_norm, "sinks": sinks}
        flags |= {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
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
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
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
        bias = self.in_proj_bias
        if bias is not None:
            bias = bias.to(self.out_proj.weight.dtype)
        if self._packed and query is key and key is value:
            qkv = F.linear(query, self.in_proj_weight, bias)
            return qkv.unflatten(-1, (3, *split)).unbind(-3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
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
                [tokens, features]; or nested tensors of sequences of any lengths, in one process.
            key_padding_mask: [batch, tokens] of this shard. Boolean: True means that the key is ignored; or
                floating point, added to the scores of the key. (A tokenizer's attention_mask is neither: pass
                ``attention_mask == 0``.) A row without any key gives zeros before ``out_proj``
                (nn.MultiheadAttention gives NaN). With a mask that leaves holes embed_dim / num_heads is at most 509.
            need_weights: whether to return the attention weights, which computes their whole matrix, in one process.
                None: True with the dense pattern, else False. They are those without dropout and `group_scale`.
            average_attn_weights: whether the returned weights are the mean over the heads.
            attn_mask: [queries, keys] or [batch x heads, queries, keys] of the whole sequence, boolean (True: hidden)
                or floating point (added to the scores). If it is a causal mask, a window or blocks of documents, and
                requires no gradient, no matrix is computed; it can then be passed on every rank of a group, too. Other
                masks need one process. Inside ``torch.compile`` masks are not looked at: pass `is_causal` without a
                mask where that is meant. A mask on a CUDA device is looked at once, and again after writes that
                PyTorch counts; it does not count those through ``mask.data`` and of replayed CUDA graphs.
            is_causal: whether the call is causal; no mask is needed. If there is one, both apply. (If queries and keys
                differ in number, it says that attn_mask is causal, and has no effect.)
            n_global: as in :func:`ring_attention`.
            rotary: rotates queries and keys by their positions: the result of :func:`rotary_table` for this shard.
            dropout_seed: as in :func:`ring_attention`.

        Returns:
            (output like query, weights or None).
        """
        tensors = {"query": query, "key": key, "value": value}
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        for name, x in (tensors | {n: x for n, x in masks.items() if x is not None}).items():
            if not isinstance(x, torch.Tensor):
                self._refuse(f"{name} is a {type(x).__name__}: a torch.Tensor was expected")
        if query.is_nested or key.is_nested or value.is_nested:
            given = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "rotary": rotary}
            given["n_global"] = n_global
            return self._forward_nested(
                query, key, value, need_weights, is_causal, dropout_seed, given
            )
        batched = self._has_batch(query, key, value, key_padding_mask, attn_mask)
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
        if attn_mask is None:
            mask: dict[str, object] = {"is_causal": is_causal or self.attention.is_causal}
        else:
            mask = self._mask_arguments(attn_mask, query, key, is_causal)
        out, weights = self._attend(
            *(query, key, value, mask, key_padding_mask, need_weights, average_attn_weights),
            *(n_global, rotary, dropout_seed),
        )
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    # Its own report: an attn_mask has been agreed on before.
    @collective(lambda self, *_, **__: (self.attention.group, self.attention.timeout))
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: dict[str, object],
        key_padding_mask: torch.Tensor | None,
        need_weights: bool | None,
        average_attn_weights: bool,
        n_global: int | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        dropout_seed: int | torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """forward with the batch first. `mask` has the arguments of ring_attention that say what is masked."""
        options = self.attention.options()
        dense = all(options[name] is None for name in ("segment_lengths", *DOCUMENTS))
        if need_weights and options["group"] is not None:
            self._refuse(
                "need_weights is supported in one process only, where the rows and columns of all tokens are: pass "
                "need_weights=False"
            )
        if need_weights is None:
            need_weights = dense and options["group"] is None
        q, k, v = self._project(query, key, value)
        if rotary is not None:
            self._check_rotary(rotary, query.shape[1])
            q, k = rotate(q, rotary), rotate(k, rotary)
        sinks, shared = self.sinks, {}
        if self.add_zero_attn:  # a key of zeros with a value of zeros is a sink of 0
            sinks = q.new_zeros(self.num_heads, dtype=torch.float32)
            if self.sinks is not None:
                sinks = torch.logaddexp(self.sinks.float(), sinks)
        if self.bias_k is not None:
            # Parameters, whose gradients are added over the ranks.
            shared["shared_gradient"] = "own"
            for name, x in (("shared_k", self.bias_k), ("shared_v", self.bias_v)):
                x = x.to(q.dtype).view(1, 1, self.num_heads, self.head_dim)
                shared[name] = x.expand(q.shape[0], -1, -1, -1)
        padding = {"key_padding_mask": key_padding_mask}
        more = {"n_global": n_global, "dropout_seed": dropout_seed, "sinks": sinks}
        # As in nn.MultiheadAttention, the attribute may be set between calls.
        heads = self.attention(q, k, v, dropout_p=self.dropout, **more, **mask, **padding, **shared)
        out = heads.flatten(-2)
        if self.layer_norm is not None:
            out = self.layer_norm(out)
        out = self.out_proj(out)
        if not need_weights:
            return out, None
        more_keys = [shared["shared_k"]] if "shared_k" in shared else []
        if self.add_zero_attn:
            more_keys.append(q.new_zeros(q.shape[0], 1, self.num_heads, self.head_dim))
        call = options | {"attn_bias": None, "n_global": n_global} | mask | padding
        more_k = torch.cat(more_keys, 1) if more_keys else None
        return out, attention_weights(
            q, k, more_k, average=average_attn_weights, sinks=self.sinks, **call
        )

    def _has_batch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
    ) -> bool:
        """Checks axes, in the words of nn.MultiheadAttention, and features. Returns whether there is a batch axis."""
        axes = query.dim()
        if axes not in (2, 3):
            self._refuse_axes(
                f"query should be unbatched 2D or batched 3D tensor but received {axes}-D query tensor"
            )
        kind = f"For {'batched (3-D)' if axes == 3 else 'unbatched (2-D)'} `query`, expected"
        if key.dim() != axes or value.dim() != axes:
            self._refuse_axes(
                f"{kind} `key` and `value` to be {axes}-D but found {key.dim()}-D and {value.dim()}-D tensors "
                "respectively"
            )
        if key_padding_mask is not None and key_padding_mask.dim() != axes - 1:
            self._refuse_axes(
                f"{kind} `key_padding_mask` to be `None` or {axes - 1}-D but found {key_padding_mask.dim()}-D tensor "
                "instead"
            )
        if attn_mask is not None and attn_mask.dim() not in (2, 3):
            self._refuse_axes(
                f"{kind} `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
            )
        for name, x, features in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.size(-1) != features:
                self._refuse(f"{name} has {x.size(-1)} features: {features} were expected")
        return axes == 3

    def _refuse_axes(self, text: str) -> NoReturn:
        raise _WrongAxes(f"{type(self).__name__}: {text}")

    def _mask_arguments(
        self,
        mask: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        is_causal: bool,
    ) -> dict[str, object]:
        """The arguments of ring_attention for an attn_mask and is_causal."""
        attention = self.attention
        group = attention.group
        if mask.dtype != torch.bool and not mask.is_floating_point():
            self._refuse(f"attn_mask is {mask.dtype}: torch.bool or floating point was expected")
        if mask.is_nested or mask.layout != torch.strided:
            self._refuse("attn_mask is a nested or sparse tensor: a dense one was expected")
        # In a group the numbers of all tokens are known to all ranks together, so they are compared last.
        tokens, keys = mask.shape[-2:] if group is not None else (query.shape[1], key.shape[1])
        causal = attention.is_causal or (tokens == keys and is_causal)
        self._check_mask_shape(mask, query.shape[0], tokens, keys)
        trained = mask.requires_grad and torch.is_grad_enabled()
        form = None if trained else mask_form(mask)  # whatever the values of a parameter are, it gets its gradient
        found = None if form is None else arguments_of(form, attention.options(), causal)
        why = "attn_mask is not a causal mask, a window or blocks of documents"
        if trained:
            why = "attn_mask requires a gradient"
        elif not is_eager((mask,)):
            why = "attn_mask is not looked at inside torch.compile and torch.func (pass is_causal or window instead)"
        if group is not None:
            if found is None:
                self._refuse(
                    f"{why}: a group can use causal masks, windows and blocks of documents only (with segment_lengths: "
                    "causal masks and windows); others need the scores of all pairs in one process"
                )
            claims = {"shape of attn_mask": list(mask.shape[-2:])}
            of_ranks = lengths_of_all(
                f"{type(self).__name__} with attn_mask", group_name(group), claims, [query.shape[1], key.shape[1]]
            )
            tokens, keys = (sum(lengths) for lengths in zip(*of_ranks))
            self._check_mask_shape(mask, query.shape[0], tokens, keys, " of the whole sequence")
        if found is not None:
            return found
        if attention.mix_gradient == "detached":
            self._refuse(
                f"{why}: mix_gradient 'detached' can use causal masks, windows and blocks of documents only; others "
                "are computed for all branches as one"
            )
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (query.shape[0], self.num_heads))
        if not isinstance(attention.placement, str):  # attn_bias is in the order of query and key
            for dim, n in ((-2, tokens), (-1, keys)):
                order = token_ranges(attention.placement, n)
                mask = mask.index_select(dim, tokens_of(order, mask.device))
        return {"is_causal": causal, "attn_bias": mask}

    def _check_mask_shape(
        self, mask: torch.Tensor, batch: int, tokens: int, keys: int, of: str = ""
    ) -> None:
        whole = (tokens, keys)
        of_heads = (batch * self.num_heads, tokens, keys)
        if mask.shape not in (whole, of_heads):
            self._refuse_axes(
                f"attn_mask is {list(mask.shape)}: {list(whole)}{of}, or {list(of_heads)} with one mask for each head "
                f"of each sequence, was expected. (Expected `attn_mask` shape to be {of_heads})"
            )

    def _forward_nested(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        need_weights: bool | None,
        is_causal: bool,
        dropout_seed: int | torch.Tensor | None,
        others: dict[str, object],
    ) -> tuple[torch.Tensor, None]:
        """forward with nested tensors of either layout: their sequences are documents of one sequence."""
        given = [name for name, x in others.items() if x is not None]
        attention = self.attention
        given += [n for n in DOCUMENTS if getattr(attention, n) is not None]
        if need_weights:
            given.append("need_weights")
        if attention.group is not None:
            given.append("a group")
        if not isinstance(attention.placement, str):
            given.append("a Placement")
        if given:
            self._refuse(
                f"nested tensors cannot be used with {given[0]}: pass a padded tensor and a key_padding_mask"
            )
        if not (query.is_nested and key.is_nested and value.is_nested):
            self._refuse("query, key and value: three nested tensors or none were expected")
        if query.size(0) == 0:
            self._refuse("query is a nested tensor of no sequences: at least one was expected")
        self._has_batch(query, key, value, None, None)
        packed: dict[int, torch.Tensor] = {}
        lengths = []
        for x in (query, key, value):
            parts = x.unbind()
            lengths.append([len(part) for part in parts])
            if id(x) not in packed:
                packed[id(x)] = torch.cat(parts)[None]
        if lengths[1] != lengths[2] or len(lengths[0]) != len(lengths[1]):
            self._refuse(
                f"query, key and value have sequences of {lengths} tokens: as many of each, and those of key and value "
                "of equal lengths, were expected"
            )
        mask: dict[str, object] = {"is_causal": is_causal or attention.is_causal}
        mask["cu_seqlens"] = (0, *itertools.accumulate(lengths[0]))
        if lengths[0] != lengths[1]:
            mask["cu_seqlens_k"] = (0, *itertools.accumulate(lengths[1]))
        tensors = (packed[id(x)] for x in (query, key, value))
        out, _ = self._attend(*tensors, mask, None, False, True, None, None, dropout_seed)
        if query.layout == torch.jagged and query.is_contiguous():
            # With the offsets of the query: jagged tensors can be added only if they share them.
            return torch.nested.nested_tensor_from_jagged(out[0], query.offsets()), None
        return torch.nested.as_nested_tensor(list(out[0].split(lengths[0])), layout=query.layout), None

    def _refuse(self, text: str) -> NoReturn:
        raise ConfigError(f"{type(self).__name__}: {text}")

    def _check_rotary(self, rotary: tuple[torch.Tensor, torch.Tensor], tokens: int) -> None:
        shape = (tokens, 1, self.head_dim // 2)
        if not isinstance(rotary, (tuple, list)) or not all(isinstance(x, torch.Tensor) for x in rotary):
            self._refuse(f"rotary is {rotary!r}: a pair of tensors was expected, from rotary_table")
        if tuple(x.shape for x in rotary) != (shape, shape):
            self._refuse(
                f"rotary has shapes {[list(x.shape) for x in rotary]}: two of {list(shape)} were expected, from "
                "rotary_table"
            )
