"""Dropout on a group: cases of torch_worker.py."""

from __future__ import annotations

import functools

import annulus.torch as at
import torch
import torch.distributed as dist
from support import dropout
from support.reference import relative_rms
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_failures import refused

P = 0.3


def _tensors(tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and the gradient of o, of the whole sequence."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, do = (torch.randn(2, tokens, h, 16, generator=generator) for h in (4, 2, 2, 4))
    return [q, k, v], do


def _whole_results(attend, tensors: list[torch.Tensor], do: torch.Tensor, **place) -> list[torch.Tensor]:
    """o and the gradients of the whole sequence; `attend` gets the shards of this rank."""
    mine = [at.shard(x, **place).requires_grad_() for x in tensors]
    o = attend(*mine)
    o.backward(at.shard(do, **place))
    return [at.unshard(x, **place) for x in (o.detach(), *(x.grad for x in mine))]


def _check(found: list[torch.Tensor], tensors: list[torch.Tensor], do: torch.Tensor, seed: int, **options) -> None:
    """Compares with autograd through the dense formula in float64."""
    wide = [x.double().requires_grad_() for x in tensors]
    batch, tokens, heads, _ = tensors[0].shape
    factors = dropout.kept(seed, P, batch, heads, tokens, tokens)
    o = dropout.attention(*wide, factors=factors, **options)
    wanted = [o.detach(), *torch.autograd.grad(o, wide, do.double())]
    for name, f, w in zip(("o", "dq", "dk", "dv"), found, wanted):
        assert relative_rms(f, w) < 2e-6, name


def _drawn(generator_seed: int) -> int:
    """The number that a call draws if it is the first one after torch.manual_seed."""
    generator = torch.Generator().manual_seed(generator_seed)
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator))


def dropout_equals_one_process() -> None:
    """With a seed, and with seeds that the ranks draw differently: then that of rank 0 is everybody's."""
    rank, world = dist.get_rank(), dist.group.WORLD
    tensors, do = _tensors(37)
    for placement in ("contiguous", "striped"):
        place = {"placement": placement, "group": world}
        for options in ({}, {"is_causal": True, "softcap": 2.0}):
            attend = functools.partial(at.ring_attention, dropout_p=P, **place, **options)
            seeded = functools.partial(attend, dropout_seed=2**40 + 3)
            found = _whole_results(seeded, tensors, do, **place)
            _check(found, tensors, do, 2**40 + 3, **options)
            torch.manual_seed(100 + rank)
            found = _whole_results(attend, tensors, do, **place)
            _check(found, tensors, do, _drawn(100), **options)
            # Recomputation draws the same numbers again.
            torch.manual_seed(100 + rank)
            recomputed = functools.partial(checkpoint, attend, use_reentrant=False)
            again = _whole_results(recomputed, tensors, do, **place)
            assert all(map(torch.equal, again, found))


def seeds_are_everybodys() -> None:
    """Different seeds are refused, and afterwards a call draws seeds as before."""
    rank, world = dist.get_rank(), dist.group.WORLD
    q = torch.randn(1, 8, 2, 16)

    def attend(**call):
        return at.ring_attention(q, q, q, group=world, dropout_p=P, **call)

    for seed, words in (
        (4, ["ranks disagree about dropout_seed: rank 1 has 4, rank 0 has 3"]),
        (None, ["whether dropout_seed is None (rank 0: False, rank 1: True)"]),
        (-1, ["dropout_seed is -1"]),
        (torch.tensor(-1), ["dropout_seed is -1"]),
        (torch.tensor(2**64 - 1, dtype=torch.uint64), [f"dropout_seed is {2**64 - 1}"]),
        ("x", ["dropout_seed is 'x'"]),
    ):
        for _ in range(2):
            attend(dropout_seed=3), attend()  # an executor and both calls are known
            refused(lambda seed=seed: attend(dropout_seed=seed if rank == 1 else 3), words)
    words = ["dropout_p is tensor([0.5000, 0.5000])"]
    wrong = torch.tensor([0.5, 0.5])
    refused(lambda: at.ring_attention(q, q, q, group=world, dropout_p=wrong if rank == 1 else P), words)
    # The error of one rank: it draws no number, and the others do.
    refused(lambda: attend(is_causal="x" if rank == 1 else False), ["is_causal is 'x'"])
    attend()


def drawn_seeds_beside_masks() -> None:
    """Also if a mask changes on one rank only, which the others hear of during the call."""
    rank, world = dist.get_rank(), dist.group.WORLD
    tokens = 8 * dist.get_world_size()
    q = torch.randn(1, 8, 2, 16)
    padding = torch.arange(tokens).expand(1, -1) >= tokens - 1
    mask = at.shard(padding, group=world).clone()
    for ignored in (1, 3):
        if rank == dist.get_world_size() - 1:
            mask[:, -ignored:] = True
        torch.manual_seed(100 + rank)
        call = {"group": world, "key_padding_mask": mask, "dropout_p": P}
        drawn = at.ring_attention(q, q, q, **call)
        assert torch.equal(drawn, at.ring_attention(q, q, q, dropout_seed=_drawn(100), **call))


def layers_drop_whatever_the_shards_draw() -> None:
    """nn.Dropout draws as many numbers as a shard has, so that the generators of the ranks part."""
    world = dist.group.WORLD
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    layer.self_attn = at.RingMultiheadDilatedAttention(32, 2, dropout=0.1, batch_first=True, group=world)
    x = at.shard(torch.randn(1, 17, 32), group=world)
    for _ in range(3):
        x = layer(x)
    x.sum().backward()
