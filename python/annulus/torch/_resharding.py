"""reshard: moves shards from one placement to another, also between different numbers of ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

import annulus
from annulus import ConfigError, Placement
from annulus.torch._placements import claim_of, placement_of_lengths
from annulus.torch._sharding import _axis
from annulus.torch.ring._errors import collective
from annulus.torch.ring._messages import exchange
from annulus.torch.ring._process_groups import group_name, group_size_and_rank
from annulus.torch.ring._registry import ring_of_group

Where = str | tuple[str, Sequence[int]] | Placement


@torch.compiler.disable(reason="the other ranks decide on the shapes of the result")
@collective(lambda *_, group=None, **__: (group, None))
def reshard(
    x: torch.Tensor,
    source: Where,
    target: Where,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
) -> torch.Tensor:
    """This rank's shard of a tensor by another placement, or by a placement over other ranks of the group.

    Collective: every rank of the group calls it. Each row that changes its rank is sent once, directly to its new rank.
    Differentiable: gradients go back to the old placement.

        x = reshard(x, "contiguous", "zigzag", group=group)
        x = reshard(x, ("zigzag", [0, 1, 2]), ("zigzag", [0, 1, 2, 3]), group=group)  # rank 3 joins

    Args:
        x: this rank's shard; a rank without tokens passes a tensor with 0 tokens.
        source: the present placement: a name, over all ranks of the group; a pair of a name and a list of ranks in
            their order; or an :class:`annulus.Placement` over the ranks of the group. Contiguous shards may have any
            lengths.
        target: the new placement, in the same forms.
        group: the ranks; None: this process alone.
        dim: the axis of the tokens.
    """
    name = group_name(group)
    dim = _axis("reshard", x, dim)
    ranks, _ = group_size_and_rank(group)
    old, new = _checked("source", source, ranks), _checked("target", target, ranks)
    return _Reshard.apply(x, old, new, name, ranks, dim)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, target, group, ranks, dim):
        result, placements = _move("reshard", x, source, target, group, ranks, dim)
        ctx.way_back = (*reversed(placements), group, ranks, dim)
        return result

    @staticmethod
    def backward(ctx, grad):
        back, _ = _move("backward of reshard", grad.to_dense(), *ctx.way_back)
        return back, None, None, None, None, None


def _checked(what: str, where: Where, ranks: int) -> Where:
    """A valid source or target, in a form that is equal on every rank: ranks are a list of numbers."""
    if isinstance(where, Placement):
        if where.ranks != ranks:
            raise ConfigError(
                f"reshard: {what} is a placement over {where.ranks} ranks, and the group has {ranks}"
            )
        return where
    name, held_by = _named(where, ranks)
    valid = isinstance(held_by, Iterable) and not isinstance(held_by, str)
    numbers = [operator.index(rank) for rank in held_by] if valid else []
    if not numbers or len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(ranks)):
        raise ConfigError(
            f"reshard: the ranks of {what} are {held_by!r}: some of 0..{ranks - 1} were expected, each once"
        )
    Placement.named(name, 1, len(numbers))  # checks the name
    return name, numbers


def _named(where: object, ranks: int) -> tuple[str, Sequence[int]]:
    if isinstance(where, str):
        return where, range(ranks)
    if isinstance(where, tuple) and len(where) == 2 and isinstance(where[0], str):
        return where
    raise ConfigError(
        f"reshard: found {where!r}: the name of a placement, a pair of a name and ranks, or a Placement was expected"
    )


def _placed(what: str, where: Where, lengths: Sequence[int] | None, tokens: int, ranks: int) -> Placement:
    """A placement over all ranks of the group; of shards of these `lengths`, if they are known."""
    if isinstance(where, Placement):
        placement = where
    else:
        name, held_by = _named(where, ranks)
        if lengths is None:
            part = Placement.named(name, tokens, len(held_by))
        else:
            part = placement_of_lengths(name, [lengths[rank] for rank in held_by], None)
        of_rank: list[list[range]] = [[] for _ in range(ranks)]
        for place, rank in enumerate(held_by):
            of_rank[rank] = list(part.ranges(place))
        placement = Placement.explicit(part.tokens, of_rank)
    held = [placement.local_tokens(rank) for rank in range(ranks)]
    if placement.tokens != tokens or (lengths is not None and held != list(lengths)):
        raise ConfigError(
            f"reshard: {what} gives the ranks {held} of {placement.tokens} tokens, but they have "
            f"{list(lengths or [tokens])}"
        )
    return placement


def _index(rows: Sequence[range], device: torch.device) -> torch.Tensor:
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in rows]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def _claim_of(where: Where) -> str:
    return claim_of(where) if isinstance(where, Placement) else f"{where[0]} over ranks {where[1]}"


def _move(
    call: str, x: torch.Tensor, source: Where, target: Where, group: str | None, ranks: int, dim: int
) -> tuple[torch.Tensor, tuple[Placement, Placement] | tuple[Where, Where]]:
    if group is None:
        return _carry(x, source, target, [x.shape[dim]], None, ranks, dim)
    others = [None if axis == dim else n for axis, n in enumerate(x.shape)]
    claims = {"dtype": str(x.dtype), "dim": dim, "the other axes": others}
    claims |= {"source": _claim_of(source), "target": _claim_of(target)}
    with ring_of_group(group, None, call) as ring:
        ring.set_timeout(None)
        lengths = list(ring.agree(call, claims, x.shape[dim]))
        return _carry(x, source, target, lengths, ring.transport, ranks, dim)


def _carry(
    x: torch.Tensor,
    source: Where,
    target: Where,
    lengths: list[int],
    transport: annulus.Transport | None,
    ranks: int,
    dim: int,
) -> tuple[torch.Tensor, tuple]:
    tokens = sum(lengths)
    if tokens == 0:
        return x.clone(), (source, target)
    old = _placed("source", source, lengths, tokens, ranks)
    new = _placed("target", target, None, tokens, ranks)
    rank = 0 if transport is None else transport.rank()
    found = annulus.moves(old, new, rank)
    shape = (*x.shape[:dim], new.local_tokens(rank), *x.shape[dim + 1 :])
    result = x.new_empty(shape)
    for before, after in found["kept"]:
        result[(slice(None),) * dim + (slice(after.start, after.stop, after.step),)] = x[
            (slice(None),) * dim + (slice(before.start, before.stop, before.step),)
        ]
    arriving = []
    for peer, rows in found["receives"]:
        index = _index(rows, x.device)
        part = x.new_empty((*shape[:dim], len(index), *shape[dim + 1 :]))
        arriving.append((peer, index, part))
    leaving = [
        (peer, x.index_select(dim, _index(rows, x.device))) for peer, rows in found["sends"]
    ]
    if arriving or leaving:
        exchange(transport, leaving, [(peer, part) for peer, _, part in arriving])
    for _, index, part in arriving:
        result.index_copy_(dim, index, part)
    return result, (old, new)
