"""Rotary position embeddings for the tokens of a shard."""

from __future__ import annotations

import torch
import torch.distributed as dist

from annulus import ConfigError, Placement
from annulus.torch._placements import claim_of, placement_of_lengths
from annulus.torch._sharding import positions
from annulus.torch.ring._process_groups import group_name
from annulus.torch.ring._registry import lengths_of_all

Table = tuple[torch.Tensor, torch.Tensor]


def rotary_table(
    where: torch.Tensor, head_dim: int, base: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for :class:`RingMultiheadDilatedAttention`, float32 [tokens, 1, head_dim / 2] each.

    Features i and i + head_dim / 2 of a head form pair i, which is rotated by position x base ** (-2i / head_dim).

    Args:
        where: the position of each token in the whole sequence, [tokens], as :func:`positions` returns it.
        head_dim: features of a head, an even number.
        base: the longest wavelength is nearly 2 pi x base tokens.
    """
    if not isinstance(where, torch.Tensor) or where.dim() != 1:
        raise ConfigError("rotary_table: where is wrong: a tensor [tokens] of positions was expected")
    if head_dim < 2 or head_dim % 2 != 0:
        raise ConfigError(f"rotary_table: head_dim is {head_dim!r}: an even number was expected")
    if not base > 0:
        raise ConfigError(f"rotary_table: base is {base!r}: a number above 0 was expected")
    half = head_dim // 2
    # In float64: near position 1,000,000 a float32 angle is off by up to 0.03.
    exponents = torch.arange(half, dtype=torch.float64, device=where.device) / -half
    angles = where[:, None, None].to(torch.float64) * base**exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotates each token of x, [batch, tokens, heads, head_dim], by its position. Computes in float32 or wider."""
    cos, sin = table
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def own_positions(
    where: str,
    tokens: int,
    n_global: int | None,
    placement: str | Placement,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The position of each token of this rank. With a group and without n_global, ranks exchange their lengths."""
    if group is None and isinstance(placement, str):
        # Not `positions`, which torch.compile cannot trace.
        mine = torch.arange(tokens)
    elif group is None:
        mine = positions(tokens, placement=placement)
    elif n_global is not None:
        mine = positions(n_global, placement=placement, group=group)
    else:
        claims = {"placement": claim_of(placement), "n_global": None}
        lengths = list(lengths_of_all(where, group_name(group), claims, tokens))
        if sum(lengths) == 0:
            return torch.arange(0)
        placed = placement_of_lengths(placement, lengths)
        mine = torch.from_numpy(placed.positions(dist.get_rank(group)))
    if len(mine) != tokens or (group is None and n_global not in (None, tokens)):
        raise ConfigError(
            f"{where}: this rank has {tokens} tokens, but placement {placement!r} of n_global {n_global} gives it "
            f"{len(mine) if group is not None else n_global}: make the shards with annulus.torch.shard"
        )
    return mine
