"""Shared keys and matrices of masks on a group: cases of torch_worker.py."""

from __future__ import annotations

import annulus.torch as at
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_failures import refused

LONGNET = {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}
INF = torch.inf


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def shared_keys_take_part_once() -> None:
    """The results of one process, and whole gradients with the same bits on all ranks, for any placement and length."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    options = [
        {},
        {"is_causal": True},
        LONGNET,
        {**LONGNET, "is_causal": True, "group_scale": True, "reproducible": True},
        {"window": (5, 2), "schedule": "ring"},
        {"cu_seqlens": [0, 40, 111]},
    ]
    for number, placement in enumerate(["contiguous", "zigzag", "striped", "hilbert"] * 3):
        call = options[number % 6]
        tokens = 2 if number in (0, 7) else 150
        dtype = torch.bfloat16 if number % 4 == 3 else torch.float32
        sizes = ((tokens, 4), (tokens, 2), (tokens, 2), (3, 2), (3, 2), (tokens, 4))
        made = [_randn(2, n, h, 16, seed=number * 10 + i).to(dtype) for i, (n, h) in enumerate(sizes)]
        *tensors, do = made
        sinks = _randn(4, seed=number)
        padding = torch.arange(tokens) % 7 == 3
        mask = padding.expand(2, -1) if number % 3 == 1 else None
        wide = _leaves(*(x.double() for x in (*tensors, sinks)))
        exact_call = {name: x for name, x in call.items() if name != "schedule"}

        def attend(q, k, v, shared_k, shared_v, sinks, **more):
            shared = {"shared_k": shared_k, "shared_v": shared_v, "sinks": sinks}
            return at.ring_attention(q, k, v, **shared, **more)

        exact = attend(*wide, key_padding_mask=mask, **exact_call)
        exact.backward(do.double())
        place = {"placement": placement, "group": world}
        for gradient in ("whole", "own"):
            mine = _leaves(*(at.shard(x, **place) for x in tensors[:3]), *tensors[3:], sinks)
            own_mask = None if mask is None else at.shard(mask, **place)
            o = attend(
                *mine, key_padding_mask=own_mask, shared_gradient=gradient, **place, **call
            )
            o.backward(at.shard(do, **place))
            limit = 2e-6 if dtype == torch.float32 else 1e-2

            def check(found: torch.Tensor, expected: torch.Tensor, limit: float = limit) -> None:
                assert (found.double() - expected).norm() <= limit * expected.norm(), (number, gradient)

            check(at.unshard(o.detach(), **place), exact)
            for x, e in zip(mine[:3], wide[:3]):
                check(at.unshard(x.grad, **place), e.grad)
            for x, e in zip(mine[3:5], wide[3:5]):
                whole = x.grad.clone()
                if gradient == "own":
                    dist.all_reduce(whole)
                else:
                    first = x.grad.clone()
                    dist.broadcast(first, 0)
                    assert torch.equal(first, whole)
                check(whole, e.grad)
            dist.all_reduce(mine[5].grad)
            check(mine[5].grad, wide[5].grad, 10 * limit)
    assert ranks > 1


def shared_keys_are_everybodys() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    q, shared = torch.randn(1, 8, 2, 16), torch.randn(1, 3, 2, 16)
    good = {"shared_k": shared, "shared_v": shared}
    for wrong, words in (
        ({"shared_k": None, "shared_v": None}, ["tokens of shared_k (rank 0: 3, rank 1: 0)"]),
        ({"shared_k": shared[:, :2], "shared_v": shared[:, :2]}, ["(rank 0: 3, rank 1: 2)"]),
        ({"shared_v": shared[:, :2]}, ["shared_k has 3 tokens, shared_v 2"]),
        ({"shared_k": shared.half()}, ["float16"]),
        ({"attn_bias": torch.zeros(8, 8)}, ["attn_bias cannot be used with a group"]),
        ({"shared_gradient": 1}, ["shared_gradient is 1"]),
    ):
        call = good | (wrong if rank == 1 else {})
        refused(lambda call=call: at.ring_attention(q, q, q, group=world, **call), words)
    at.ring_attention(q, q, q, group=world, **good)


def known_calls_are_compared() -> None:
    """What executors do not know is compared in every call, not only in the first one of its kind."""
    rank, world = dist.get_rank(), dist.group.WORLD
    tokens = 8 * dist.get_world_size()
    q, shared = torch.randn(1, 8, 2, 16), torch.randn(1, 3, 2, 16)

    def keys(count: int, **more: object) -> dict[str, object]:
        return {"shared_k": shared[:, :count], "shared_v": shared[:, :count], **more}

    def attend(call: dict[str, object]) -> torch.Tensor:
        x = q.clone().requires_grad_()
        return at.ring_attention(x, x, x, group=world, **call)

    for of_0, of_1, words in (
        (keys(3), {}, "tokens of shared_k (rank 0: 3, rank 1: 0)"),
        (keys(3), keys(2), "tokens of shared_k (rank 0: 3, rank 1: 2)"),
        (keys(3), keys(3, shared_gradient="own"), "shared_gradient (rank 0: 'whole', rank 1: 'own')"),
        ({"allow_half": True}, {}, "allow_half (rank 0: True, rank 1: False)"),
        ({"n_global": tokens}, {}, f"n_global (rank 0: {tokens}, rank 1: None)"),
    ):
        for call in (of_0, of_1, of_0, of_1):
            attend(call).sum().backward()
        transport = at.ring._registry._groups[world.group_name].transport
        refused(lambda call=of_1 if rank == 1 else of_0: attend(call), [words])
        before = transport.counters()["messages_sent"]
        attend(of_0)
        rounds = (dist.get_world_size() - 1).bit_length()
        assert transport.counters()["messages_sent"] - before == rounds + dist.get_world_size() - 1


def memory_for_gradients_of_shared_keys_is_everybodys() -> None:
    """If one rank has none for the sums over the ranks, all of them hear of it before rows move."""
    rank, world = dist.get_rank(), dist.group.WORLD
    q, shared = torch.randn(1, 8, 2, 16), torch.randn(1, 3, 2, 16, requires_grad=True)

    def attend() -> torch.Tensor:
        return at.ring_attention(q, q, q, shared_k=shared, shared_v=shared, group=world).sum()

    attend().backward()
    o = attend()
    parts_of_ranks = at._shared_keys._parts_of_ranks

    def unlucky(*_: object) -> torch.Tensor:
        raise MemoryError("no room for parts")

    if rank == 1:
        at._shared_keys._parts_of_ranks = unlucky
    try:
        refused(lambda: o.backward(), ["no room for parts"])
    finally:
        at._shared_keys._parts_of_ranks = parts_of_ranks
    attend().backward()


def additional_keys_of_modules() -> None:
    """bias_k and bias_v are parameters: data parallelism adds their gradients over the ranks."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    for options in ({}, {**LONGNET, "is_causal": True}):
        torch.manual_seed(1)
        extras = {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True, **options}
        single = at.RingMultiheadDilatedAttention(64, 4, **extras)
        for p in single.parameters():
            nn.init.normal_(p, std=0.2)
        model = at.RingMultiheadDilatedAttention(64, 4, group=world, **extras)
        model.load_state_dict(single.state_dict())
        x = torch.randn(2, 24 * ranks, 64)
        single(x, x, x, need_weights=False)[0].square().sum().backward()
        mine = at.shard(x, group=world)
        parallel = DistributedDataParallel(model)
        parallel(mine, mine, mine, need_weights=False)[0].square().sum().backward()
        for (name, p), e in zip(model.named_parameters(), single.parameters()):
            found = p.grad * ranks  # DistributedDataParallel takes the mean
            largest = float(e.grad.abs().max())
            torch.testing.assert_close(found, e.grad, rtol=1e-4, atol=2e-5 * largest, msg=name)


def masks_of_the_whole_sequence() -> None:
    """Causal masks, windows and documents are passed whole, on every rank; other ones are refused on every rank."""
    rank, world = dist.get_rank(), dist.group.WORLD
    tokens = 101
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    document = torch.arange(tokens) // 30
    apart = document[:, None] != document
    masks = [later, torch.zeros(tokens, tokens).masked_fill(later, -INF), later.triu(5) | later.T.tril(-9)]
    masks += [apart, apart | later, later.expand(8, tokens, tokens)]
    for placement in ("contiguous", "zigzag", "striped"):
        for options in ({}, LONGNET):
            torch.manual_seed(2)
            ring = {"group": world, "placement": placement}
            model = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, **options, **ring)
            single = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, **options)
            single.load_state_dict(model.state_dict())
            x = torch.randn(2, tokens, 64)
            mine = at.shard(x, **ring)
            for mask in masks:
                call = {"attn_mask": mask, "need_weights": False}
                expected = at.shard(single(x, x, x, **call)[0], **ring)
                if options and mask.dim() == 2 and mask[-1, 0] and not mask[0, 0] and bool(mask[30, 29]):
                    refused(lambda: model(mine, mine, mine, **call), ["with segment_lengths"])  # noqa: B023
                    continue
                found = model(mine, mine, mine, **call)[0]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # One rank alone has another mask, none, or one that a group cannot use.
    torch.manual_seed(3)
    ring = {"group": world, "placement": "zigzag"}
    model = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, **ring)
    mine = at.shard(torch.randn(2, tokens, 64), **ring)
    other = torch.rand(tokens, tokens) < 0.5
    for mask, words in (
        (other, ["attn_mask is not a causal mask"]),
        (later.triu(5), ["is_causal (rank 0: True, rank 1: False)"]),
        (later[:50, :50], ["shape of attn_mask (rank 0: [101, 101], rank 1: [50, 50])"]),
        (later.expand(7, tokens, tokens), ["attn_mask is [7, 101, 101]"]),
        (None, ["rank 1"]),
    ):
        call = {"attn_mask": mask if rank == 1 else later, "need_weights": False}
        refused(lambda call=call: model(mine, mine, mine, **call), words)
    for wrong, words in (  # behind the agreement about the mask
        ({"need_weights": True}, ["need_weights is supported in one process only"]),
        ({"rotary": (torch.ones(3), torch.ones(3))}, ["rotary has shapes [[3], [3]]"]),
    ):
        call = {"attn_mask": later, "need_weights": False, **(wrong if rank == 1 else {})}
        refused(lambda call=call: model(mine, mine, mine, **call), words)
    learned = torch.zeros(tokens, tokens, requires_grad=True)
    refused(lambda: model(mine, mine, mine, attn_mask=learned, need_weights=False), ["attn_mask requires a gradient"])
    words = ["attn_mask is [50, 50]: [101, 101] of the whole sequence"]
    refused(lambda: model(mine, mine, mine, attn_mask=later[:50, :50]), words)
    words = ["need_weights is supported in one process only"]
    refused(lambda: model(mine, mine, mine, need_weights=True), words)
    nested = torch.nested.as_nested_tensor([mine[0], mine[1]], layout=torch.jagged)
    refused(lambda: model(nested, nested, nested), ["nested tensors cannot be used with a group"])
