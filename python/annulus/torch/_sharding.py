"""shard, unshard and positions: the tokens of a rank, by placement."""

from __future__ import annotations

import torch
import torch.distributed as dist

from annulus import ConfigError, Placement
from annulus.torch._options import whole_complaint
from annulus.torch._placements import (
    claim_of,
    placement_complaint,
    placement_of_lengths,
    placement_of_tokens,
)
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_name, group_size_and_rank
from annulus.torch.ring._registry import lengths_of_all


def _axis(where: str, x: torch.Tensor, dim: int) -> int:
    """The axis of the tokens, counted from the front. ConfigError if x is not a dense tensor with this axis."""
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"{where}: x is a {type(x).__name__}: a torch.Tensor was expected")
    if x.layout != torch.strided or x.is_nested:
        raise ConfigError(f"{where}: x is a {x.layout} tensor: a dense one was expected")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ConfigError(
            f"{where}: dim is {dim!r}: an axis of x, which has {x.dim()}, was expected"
        )
    return dim % x.dim()


def positions(
    n_global: int,
    *,
    placement: str | Placement = "contiguous",
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """The position in the whole sequence of each token of this rank, int64 [local tokens].

    Rotary and other position embeddings need it: with "zigzag", "striped" and "hilbert", the tokens of a rank
    are not neighbours in the sequence. No communication.

    Args:
        n_global: tokens of the whole sequence.
        placement: "contiguous", "zigzag", "striped", "hilbert" or a Placement.
        group: the ranks of the ring; None: this process alone, which holds all tokens in order.
        rank: the rank in the group; None: the rank of this process.
    """
    ranks, own = group_size_and_rank(group)
    rank = own if rank is None else rank
    for complaint in (
        whole_complaint("n_global", n_global),
        placement_complaint(placement),
        whole_complaint("rank", rank, ranks - 1),
    ):
        if complaint is not None:
            raise ConfigError(f"positions: {complaint}")
    # A placement has at least one token. For an empty sequence, it is made to check the name and the rank.
    tokens = 1 if n_global == 0 and isinstance(placement, str) else n_global
    try:
        placed = placement_of_tokens(placement, tokens, ranks)
    except ConfigError as error:
        raise ConfigError(f"positions: {error}") from None
    mine = torch.from_numpy(placed.positions(rank))
    return mine[:n_global]


def shard(
    x: torch.Tensor,
    *,
    placement: str | Placement = "contiguous",
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
) -> torch.Tensor:
    """This rank's shard of a tensor that every rank has whole.

    A view if the placement is contiguous, else a copy. Differentiable. No communication.

    Args:
        x: the whole tensor, with the tokens of the sequence along `dim`: embeddings, q, k, v, labels.
        placement: "contiguous", "zigzag", "striped", "hilbert" or a Placement.
        group: the ranks of the ring; None: this process alone, which gets all of x.
        dim: the axis of the tokens.
    """
    dim = _axis("shard", x, dim)
    mine = positions(x.shape[dim], placement=placement, group=group)
    if isinstance(placement, str) and placement == "contiguous":
        return x.narrow(dim, int(mine[0]) if len(mine) else 0, len(mine))
    return x.index_select(dim, mine.to(x.device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths, order, group, dim):
        parts = [x.new_empty((*x.shape[:dim], n, *x.shape[dim + 1 :])) for n in lengths]
        ctx.lengths, ctx.group, ctx.dim = lengths, group, dim
        ctx.order = order
        # Gloo's all_gather needs equal sizes. Broadcasts do not.
        rank = dist.get_rank(group)
        for source, part in enumerate(parts):
            if source == rank:
                part.copy_(x)
            if part.numel() > 0:
                dist.broadcast(part, group=group, group_src=source)
        return torch.cat(parts, dim).index_select(dim, torch.argsort(order).to(x.device))

    @staticmethod
    def backward(ctx, grad):
        # A copy, because all_reduce writes to it. A sparse gradient becomes dense, so that all_reduce can add it.
        grad = grad.to_dense().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        first = sum(ctx.lengths[:rank])
        mine = ctx.order[first : first + ctx.lengths[rank]]
        return grad.index_select(ctx.dim, mine.to(grad.device)), None, None, None, None


@collective(lambda *_, group=None, **__: (group, None))
def unshard(
    x: torch.Tensor,
    *,
    placement: str | Placement = "contiguous",
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
) -> torch.Tensor:
    """The whole tensor, in the order of the sequence, on every rank: the inverse of :func:`shard`.

    Collective: every rank of the group calls it. Contiguous shards may have any lengths.

    The gradient is that of the sum of all ranks' losses: gradients of all ranks are added. If every rank
    computes the same loss from the whole tensor, use it on one rank only or divide it by the number of ranks.

    Args:
        x: this rank's shard.
        placement: the placement of the shards.
        group: the ranks of the ring; None: this process alone.
        dim: the axis of the tokens.
    """
    name = group_name(group)
    dim = _axis("unshard", x, dim)
    if name is None:
        order = positions(x.shape[dim], placement=placement)
        if torch.equal(order, torch.arange(len(order))):
            return x
        return x.index_select(dim, torch.argsort(order).to(x.device))
    complaint = placement_complaint(placement)
    if complaint is not None:
        raise ConfigError(f"unshard: {complaint}")
    others = [None if axis == dim else n for axis, n in enumerate(x.shape)]
    claims = {"dtype": str(x.dtype), "dim": dim, "the other axes": others, "placement": claim_of(placement)}
    lengths = list(lengths_of_all("unshard", name, claims, x.shape[dim]))
    if sum(lengths) == 0:
        return x
    placed = placement_of_lengths(placement, lengths)
    order = torch.cat([torch.from_numpy(placed.positions(r)) for r in range(len(lengths))])
    if len(order) != sum(lengths):
        raise ConfigError(f"unshard: the ranks hold {lengths} tokens of {len(order)}")
    return _Gather.apply(x, lengths, order, group, dim)
