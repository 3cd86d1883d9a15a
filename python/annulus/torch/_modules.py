"""RingDilatedAttention: attention as a module without parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from annulus import ConfigError
from annulus.torch._config import DOCUMENTS
from annulus.torch._functional import ring_attention
from annulus.torch._options import (
    branch_numbers,
    refuse_unknown,
    window_pair,
    with_parameters,
)
from annulus.torch._published import takes_published_names
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_name

F = TypeVar("F", bound=Callable)

# Arguments of ring_attention that may differ between the calls of one module.
_OF_CALLS = ("n_global", "return_lse", "key_padding_mask", "sinks", "dropout_seed")
_OF_CALLS += ("attn_bias", "shared_k", "shared_v", "shared_gradient")
# Arguments that a module fixes, but a call may override.
_OVERRIDDEN = ("window", *DOCUMENTS, "dropout_p")
_PARAMETERS = [
    p
    for p in inspect.signature(ring_attention).parameters.values()
    if p.kind == p.KEYWORD_ONLY and p.name not in _OF_CALLS
]
# The other ones, which a module fixes, and their defaults.
FIXED = {p.name: p.default for p in _PARAMETERS}


def with_fixed_options(init: F) -> F:
    """Adds the arguments that a module fixes to the signature of its constructor, which takes them as **options."""
    return with_parameters(init, _PARAMETERS)


class RingDilatedAttention(nn.Module):
    """:func:`ring_attention` with its options fixed; no parameters.

    Without segment lengths and dilation rates attention is dense. A copy shares the process group; set
    ``group = None`` before storing the module in a file.

    Args:
        segment_lengths, dilation_rates: as in :func:`ring_attention`.
        dropout_p: as in :func:`ring_attention`, in training only.
        options: all other keyword arguments of :func:`ring_attention` except n_global, return_lse, key_padding_mask,
            sinks, dropout_seed, attn_bias and those of shared keys: pattern, is_causal, window, offsets, group_scale,
            group, placement, timeout, schedule and so on.
    """

    @takes_published_names
    @with_fixed_options
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        **options: object,
    ):
        super().__init__()
        refuse_unknown(type(self).__name__, options, FIXED)
        branches = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        for name, values in branches.items():
            options[name] = None if values is None else branch_numbers(name, values)
        options["window"] = window_pair(options.get("window"))
        for name, value in (FIXED | options).items():
            setattr(self, name, value)

    @collective(lambda self, *_, **__: (self.group, self.timeout))
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool | None = None,
        n_global: int | None = None,
        sinks: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        dropout_seed: int | torch.Tensor | None = None,
        attn_bias: torch.Tensor | None = None,
        shared_k: torch.Tensor | None = None,
        shared_v: torch.Tensor | None = None,
        shared_gradient: str = "whole",
        **others: object,
    ) -> torch.Tensor:
        """The output for this rank's queries, with the shape and dtype of `query`.

        Args:
            query, key, value: this rank's shards, [batch, local tokens, heads, head_dim].
            is_causal: overrides the value of the module; None: the module's.
            n_global, sinks, key_padding_mask, dropout_seed, attn_bias, shared_k, shared_v, shared_gradient: as in
                :func:`ring_attention`.
            others: window, cu_seqlens, cu_seqlens_k, query_start, seqused_k, leftpad_k and dropout_p override those of
                the module.
        """
        refuse_unknown("forward", others, _OVERRIDDEN)
        causal = self.is_causal if is_causal is None else is_causal
        changes: dict[str, object] = {"is_causal": causal, "n_global": n_global, "sinks": sinks, "attn_bias": attn_bias}
        changes |= {"shared_k": shared_k, "shared_v": shared_v, "shared_gradient": shared_gradient}
        changes |= {"key_padding_mask": key_padding_mask, "dropout_seed": dropout_seed, **others}
        if not self.training:
            changes["dropout_p"] = 0.0
        return ring_attention(query, key, value, **{**self.options(), **changes})

    def options(self) -> dict[str, object]:
        """The arguments of ring_attention that this module fixes."""
        return {name: getattr(self, name) for name in FIXED}

    def extra_repr(self) -> str:
        shown = (
            "dense"
            if self.segment_lengths is None
            else (
                f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}"
            )
        )
        if self.window is not None:
            shown += f", window={self.window}"
        return f"{shown}, is_causal={self.is_causal}, placement={self.placement!r}"

    def __getstate__(self) -> dict[str, object]:
        # A process group cannot be stored. Its name is, so that copies in this process find the same group.
        state = dict(self.__dict__)
        state["group"] = group_name(self.group)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        name = state["group"]
        if isinstance(name, str):
            try:
                state["group"] = dist.distributed_c10d._resolve_process_group(name)
            except (RuntimeError, KeyError, ValueError) as error:
                raise ConfigError(
                    f"RingDilatedAttention: the process group {name!r} of the stored module does not exist "
                    "here; set `group = None` before storing it"
                ) from error
        super().__setstate__(FIXED | state)  # a module that was stored earlier lacks newer options
