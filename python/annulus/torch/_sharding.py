"""Tokens to ranks and back."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from annulus import ConfigError, Placement
from annulus.torch import _rings
from annulus.torch._config import placement_of_lengths


def positions(
    n_global: int,
    *,
    placement: str = "contiguous",
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
) -> torch.Tensor:
    """The position in the whole sequence of each token that this rank holds, int64 [local tokens].

    Rotary and other position-dependent embeddings need it: under "zigzag", "striped" and "hilbert" local
    tokens are not neighbours. No communication.

    Args:
        n_global: tokens of the whole sequence.
        placement: "contiguous", "zigzag", "striped" or "hilbert".
        group: the ranks of the ring; None: this process alone, which holds all tokens in order.
        rank: another rank of the group than this process's own.
    """
    ranks, own = _rings.group_size_and_rank(group)
    # A placement has at least one token: of none, its name and the rank are checked all the same.
    placed = Placement.named(placement, 1 if n_global == 0 else n_global, ranks)
    mine = torch.from_numpy(placed.positions(own if rank is None else rank))
    return mine[:n_global]


def shard(
    x: torch.Tensor,
    *,
    placement: str = "contiguous",
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds whole.

    A view where the placement is contiguous, else a copy. Differentiable. No communication.

    Args:
        x: the whole tensor, with the tokens of the sequence along `dim`: embeddings, q, k, v, labels.
        placement: "contiguous", "zigzag", "striped" or "hilbert".
        group: the ranks of the ring; None: this process alone, which gets all of x.
        dim: the axis of the tokens.
    """
    n = x.shape[dim]
    mine = positions(n, placement=placement, group=group)
    if placement == "contiguous":
        return x.narrow(dim, int(mine[0]) if len(mine) else 0, len(mine))
    return x.index_select(dim, mine.to(x.device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths, order, group, dim):
        parts = [x.new_empty((*x.shape[:dim], n, *x.shape[dim + 1 :])) for n in lengths]
        ctx.lengths, ctx.group, ctx.dim = lengths, group, dim
        ctx.order = order
        # Gloo's all_gather wants equal sizes: broadcasts take any.
        rank = dist.get_rank(group)
        for source, part in enumerate(parts):
            if source == rank:
                part.copy_(x)
            if part.numel() > 0:
                dist.broadcast(part, group=group, group_src=source)
        return torch.cat(parts, dim).index_select(dim, torch.argsort(order))

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # others may hold what came in
        dist.all_reduce(grad, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        first = sum(ctx.lengths[:rank])
        mine = ctx.order[first : first + ctx.lengths[rank]]
        return grad.index_select(ctx.dim, mine), None, None, None, None


def _shapes(x: torch.Tensor, group: dist.ProcessGroup) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every rank's tensor. Collective."""
    mine = torch.zeros(256, dtype=torch.uint8)
    text = json.dumps([str(x.dtype), list(x.shape)]).encode()
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    all_ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    texts = (bytes(t.tolist()).rstrip(b"\0").decode() for t in all_ranks)
    return [(dtype, tuple(shape)) for dtype, shape in map(json.loads, texts)]


def unshard(
    x: torch.Tensor,
    *,
    placement: str = "contiguous",
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
) -> torch.Tensor:
    """The whole tensor, in the order of the sequence, on every rank: the inverse of :func:`shard`.

    Collective: every rank of the group calls it. Contiguous shards may have any lengths.

    Its gradient is that of the sum of all ranks' losses: what the ranks send back for a token is summed
    up. If every rank computes the same loss from the whole tensor, count it on one rank or divide it by
    the number of ranks.

    Args:
        x: this rank's shard.
        placement: the one that the shards were made with.
        group: the ranks of the ring; None: this process alone.
        dim: the axis of the tokens.
    """
    _rings.group_size_and_rank(group)  # refuses what is no group
    if group is None:
        order = positions(x.shape[dim], placement=placement)
        return x.index_select(dim, torch.argsort(order)) if placement == "hilbert" else x
    dim = dim % x.dim()
    shapes = _shapes(x, group)
    lengths = [shape[dim] for _, shape in shapes if dim < len(shape)]
    if len({(dtype, *shape[:dim], None, *shape[dim + 1 :]) for dtype, shape in shapes}) > 1:
        raise ConfigError(
            "unshard: the ranks hold "
            + ", ".join(f"{dtype} {list(shape)}" for dtype, shape in shapes)
            + f": tensors that differ in axis {dim} alone were expected"
        )
    if sum(lengths) == 0:
        positions(0, placement=placement, group=group)  # refuses what is no placement
        return x
    placed = placement_of_lengths(placement, lengths)
    order = torch.cat([torch.from_numpy(placed.positions(r)) for r in range(len(lengths))])
    if len(order) != sum(lengths):
        raise ConfigError(f"unshard: the ranks hold {lengths} tokens of {len(order)}")
    return _Gather.apply(x, lengths, order, group, dim)
