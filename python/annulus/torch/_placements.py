"""The argument `placement`: a name, or a Placement for everything that has no name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from annulus import ConfigError, Placement

PLACEMENTS = ("contiguous", "zigzag", "striped", "hilbert")


def placement_complaint(value: object) -> str | None:
    """What is wrong with a placement, as far as can be said without the tokens and ranks; None: nothing."""
    if isinstance(value, Placement) or (isinstance(value, str) and value in PLACEMENTS):
        return None
    return f"placement is {value!r}: one of {', '.join(map(repr, PLACEMENTS))}, or a Placement, was expected"


def claim_of(placement: str | Placement) -> str:
    """A text that is equal if and only if the placements are. Explicit placements of one name may differ."""
    if isinstance(placement, str):
        return placement
    ranges = repr([placement.ranges(rank) for rank in range(placement.ranks)])
    return f"{placement} {hashlib.sha256(ranges.encode()).hexdigest()[:16]}"


def plain_placement(placement: Placement) -> tuple:
    """A placement in types that JSON has; placement_from is the inverse."""
    ranges = [placement.ranges(rank) for rank in range(placement.ranks)]
    return placement.tokens, [[(r.start, r.stop, r.step) for r in of_rank] for of_rank in ranges]


def placement_from(plain: str | list) -> str | Placement:
    if isinstance(plain, str):
        return plain
    tokens, ranges = plain
    return Placement.explicit(tokens, [[range(*r) for r in of_rank] for of_rank in ranges])


def placement_of_tokens(placement: str | Placement, tokens: int, ranks: int) -> Placement:
    """The placement of a whole sequence. One that is not a name has to be of as many tokens and ranks."""
    if isinstance(placement, str):
        return Placement.named(placement, tokens, ranks)
    if (placement.tokens, placement.ranks) != (tokens, ranks):
        raise ConfigError(
            f"placement is of {placement.tokens} tokens on {placement.ranks} ranks, but there are {tokens} tokens on "
            f"{ranks} ranks"
        )
    return placement


@torch.compiler.assume_constant_result
def token_ranges(placement: str | Placement, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """The tokens of a sequence in the order in which one process without a group passes them: (start, stop, step)."""
    if isinstance(placement, str):  # named placements keep the order of the sequence in one process
        return ((0, tokens, 1),)
    return tuple((r.start, r.stop, r.step) for r in placement_of_tokens(placement, tokens, 1).ranges(0))


def tokens_of(ranges: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(*r, device=device) for r in ranges])


def placement_of_lengths(
    name: str | Placement, lengths: Sequence[int], n_global: int | None = None
) -> Placement:
    """The placement of shards of these lengths. Contiguous shards may have any lengths, unless n_global is given."""
    tokens = sum(lengths) if n_global is None else n_global
    placement = placement_of_tokens(name, tokens, len(lengths))
    expected = [placement.local_tokens(r) for r in range(len(lengths))]
    if expected == list(lengths):
        return placement
    if name != "contiguous" or n_global is not None:
        raise ConfigError(
            f"the ranks hold {list(lengths)} tokens, but placement {placement.name!r} of {tokens} tokens gives them "
            f"{expected}: make the shards with annulus.torch.shard"
        )
    ranges, first = [], 0
    for n in lengths:
        ranges.append([range(first, first + n)] if n > 0 else [])
        first += n
    return Placement.explicit(tokens, ranges)
