"""The published variants of ring dilated attention, by their published names.

Each class is :class:`annulus.torch.RingDilatedAttention` with some options fixed. All variants use the same
implementation and give the same results. They exist so that code written for the published modules runs unchanged. New
code uses :class:`~annulus.torch.RingDilatedAttention` or :func:`~annulus.torch.ring_attention`.

A variant is called as ``module(q, k, v, is_causal=True)`` with tensors ``[batch, tokens, heads, head_dim]``: whole
sequences without a `group`, each rank's shard with one. It has no parameters. Other arguments are those of
:class:`~annulus.torch.RingDilatedAttention`; the published ones (``ring_size``, ``dropout``, ``enable_memory_pool`` and
so on) are accepted and checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import ClassVar

import torch

from annulus import ConfigError
from annulus.torch._modules import RingDilatedAttention
from annulus.torch.ring._errors import collective
from annulus.torch.training._advanced import RingAdvancedDistributedDilatedAttention

__all__ = [
    "RingDilatedAttentionHilbertGPUOptimized",
    "RingDilatedAttentionSDPA",
    "RingDilatedAttentionTrue",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2DeepSpeed",
    "RingDilatedAttentionV2FSDP",
    "RingDilatedAttentionV2Robust",
    "RingDistributedDilatedAttention",
    "StandardRingAttention",
]


class _Variant(RingDilatedAttention):
    """RingDilatedAttention with some options fixed."""

    _fixed: ClassVar[Mapping[str, object]] = {}

    def __init__(self, *args: object, **options: object):
        for name, value in self._fixed.items():
            given = options.setdefault(name, value)
            if not isinstance(given, str) or given != value:
                raise ConfigError(
                    f"{type(self).__name__}: {name} is {given!r}, but this variant fixes {name}={value!r}: use "
                    "RingDilatedAttention"
                )
        super().__init__(*args, **options)

    @collective(lambda self, *_, **__: (self.group, self.timeout))
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool | None = None,
        attention_mask: None = None,
        n_global: int | None = None,
        dropout_seed: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`RingDilatedAttention.forward`. An `attention_mask` is an error: pass `is_causal`."""
        if attention_mask is not None:
            raise ConfigError(
                f"{type(self).__name__}: attention_mask is not supported: pass is_causal=True for a causal mask"
            )
        options = {"is_causal": is_causal, "n_global": n_global, "dropout_seed": dropout_seed}
        return super().forward(query, key, value, **options)


class RingDilatedAttentionV2Collective(_Variant):
    """Gathers the rows of other ranks that a rank needs, then computes once. Rows that no query selects are not sent.

    New code: ``RingDilatedAttention(..., schedule="gather")``, or the default ``schedule="auto"``, which gathers below
    32,768 tokens.
    """

    _fixed: ClassVar = {"schedule": "gather"}


class RingDilatedAttentionTrue(_Variant):
    """Passes rows from neighbour to neighbour, in O(tokens / ranks) memory.

    New code: ``RingDilatedAttention(..., schedule="ring")``.
    """

    _fixed: ClassVar = {"schedule": "ring"}


class RingDilatedAttentionV2Robust(_Variant):
    """Passes rows around the ring. All schedules have deadlines, and errors that are raised on every rank.

    New code: ``RingDilatedAttention(..., schedule="ring")``.
    """

    _fixed: ClassVar = {"schedule": "ring"}


class RingDilatedAttentionV2DeepSpeed(_Variant):
    """For models that DeepSpeed trains. It does not need DeepSpeed itself: its rows travel over `group`.

    New code: :class:`RingDilatedAttention`, and :class:`RingAdvancedDistributedDilatedAttention` for DeepSpeed's
    configuration.
    """


class RingDilatedAttentionV2FSDP(_Variant):
    """For models whose parameters FSDP shards. It has no parameters itself: its rows travel over `group`.

    New code: :class:`RingDilatedAttention`.
    """


class RingDilatedAttentionSDPA(_Variant):
    """Computes with fused kernels, like every class of this module: the matrix of scores is never stored.

    New code: :class:`RingDilatedAttention`.
    """


class RingDilatedAttentionHilbertGPUOptimized(_Variant):
    """Places tokens on the ranks along a Hilbert curve: make the shards with ``shard(..., placement="hilbert")``.

    Without a group, tensors are in the order of the sequence. All placements give the same results.

    New code: ``RingDilatedAttention(..., placement="hilbert")`` if the model needs this placement; "zigzag" balances
    causal work better.
    """

    _fixed: ClassVar = {"placement": "hilbert"}


class StandardRingAttention(_Variant):
    """Dense attention over a ring: every query attends to every key, or to earlier ones with `is_causal`.

    New code: :class:`RingDilatedAttention` without segment lengths.
    """

    _fixed: ClassVar = {"pattern": "dense"}

    def __init__(self, **options: object):
        super().__init__(**options)


class RingDistributedDilatedAttention(_Variant):
    """The deprecated name of two modules.

    With `embed_dim` and `num_heads` it makes a :class:`RingAdvancedDistributedDilatedAttention`, as the published class
    of this name was; without them, the attention alone.

    New code: :class:`RingAdvancedDistributedDilatedAttention` or :class:`RingDilatedAttention`.
    """

    def __new__(cls, *args: object, **options: object) -> torch.nn.Module:
        projects = not options.keys().isdisjoint(("embed_dim", "num_heads")) or (
            len(args) > 0 and hasattr(args[0], "__index__")
        )
        kind = RingAdvancedDistributedDilatedAttention if projects else RingDilatedAttention
        warnings.warn(
            f"RingDistributedDilatedAttention is deprecated: use {kind.__name__}",
            DeprecationWarning,
            stacklevel=2,
        )
        if projects and cls is not RingDistributedDilatedAttention:  # whose __init__ would not be called
            raise ConfigError(
                f"{cls.__name__}: RingDistributedDilatedAttention with embed_dim and num_heads cannot be derived from: "
                f"derive from {kind.__name__}"
            )
        return kind(*args, **options) if projects else super().__new__(cls)
