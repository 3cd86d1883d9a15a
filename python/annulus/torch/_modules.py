"""RingDilatedAttention: attention as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from annulus import ConfigError
from annulus.torch._functional import ring_attention
from annulus.torch._options import DEFAULTS, branch_numbers, with_options
from annulus.torch._published import takes_published_names
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_name


class RingDilatedAttention(nn.Module):
    """:func:`ring_attention` with its options fixed; no parameters.

    Without segment lengths and dilation rates attention is dense. Every argument is as in
    :func:`ring_attention`. A copy shares the process group; set ``group = None`` before storing the module
    in a file.
    """

    @takes_published_names
    @with_options
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        pattern: str | None = None,
        is_causal: bool = False,
        offsets: str = "blocked",
        group_scale: bool = False,
        group: dist.ProcessGroup | None = None,
        placement: str = "contiguous",
        timeout: float | None = None,
        **options: object,
    ):
        super().__init__()
        for name in options:
            if name not in DEFAULTS:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword argument {name!r}"
                )
        self.segment_lengths = self.dilation_rates = None
        if segment_lengths is not None:
            self.segment_lengths = branch_numbers("segment_lengths", segment_lengths)
        if dilation_rates is not None:
            self.dilation_rates = branch_numbers("dilation_rates", dilation_rates)
        self.pattern = pattern
        self.is_causal = is_causal
        self.offsets = offsets
        self.group_scale = group_scale
        self.group = group
        self.placement = placement
        self.timeout = timeout
        for name, value in {**DEFAULTS, **options}.items():
            setattr(self, name, value)

    @collective(lambda self, *_, **__: (self.group, self.timeout))
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool | None = None,
        n_global: int | None = None,
    ) -> torch.Tensor:
        """The output for this rank's queries, like `query`.

        Args:
            query, key, value: this rank's shards, [batch, local tokens, heads, head_dim].
            is_causal: overrides the module's own; None: does not.
            n_global: as in :func:`ring_attention`.
        """
        causal = self.is_causal if is_causal is None else is_causal
        return ring_attention(
            query, key, value, **{**self._options(), "is_causal": causal, "n_global": n_global}
        )

    def _options(self) -> dict[str, object]:
        """The arguments of ring_attention that this module fixes."""
        return {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "pattern": self.pattern,
            "is_causal": self.is_causal,
            "offsets": self.offsets,
            "group_scale": self.group_scale,
            "group": self.group,
            "placement": self.placement,
            "timeout": self.timeout,
            **{name: getattr(self, name) for name in DEFAULTS},
        }

    def extra_repr(self) -> str:
        shown = (
            "dense"
            if self.segment_lengths is None
            else (
                f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}"
            )
        )
        return f"{shown}, is_causal={self.is_causal}, placement={self.placement!r}"

    def __getstate__(self) -> dict[str, object]:
        # A process group cannot be copied or stored: copies share it, files do without.
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
        super().__setstate__({**DEFAULTS, **state})  # options may be younger than what was stored
