"""One rank of test_distributed.py; runs under torchrun: torch_worker.py <case>..."""

from __future__ import annotations

import itertools
import os
import tempfile

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
import torch_dropout
import torch_failures
import torch_masks
import torch_padding
from support import transport_contract
from support.rank_cases import run_cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = None


def whole(
    tokens: int, heads: int, kv_heads: int, dim: int, seed: int, dtype=torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, tokens, h, dim, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def equals_one_process() -> None:
    """All placements and schedules, lengths that do not divide and below the number of ranks, GQA, causal."""
    longnet = {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}
    dilated = {"segment_lengths": [200], "dilation_rates": [5], "offsets": "all", "window": (60, 0)}
    patterns = [{}, longnet, {"window": (40, 0)}, dilated]
    placements = ["contiguous", "zigzag", "striped", "hilbert"]
    cases = itertools.product(placements, patterns, [False, True], ["ring", "gather", "auto"])
    for number, (placement, pattern, causal, schedule) in enumerate(cases):
        tokens = [150, 2, 257][number % 3]
        heads, kv_heads = [(4, 4), (4, 2), (8, 1)][number // 2 % 3]
        dtype = [torch.float32, torch.float32, torch.bfloat16][number % 3]
        reproducible = schedule == "gather"
        options = {
            **pattern,
            "is_causal": causal,
            "reproducible": reproducible,
            "mix_gradient": "detached" if number % 5 == 0 else "full",
        }
        *qkv, do = whole(tokens, heads, kv_heads, [16, 64][number % 2], number, dtype)
        alone = leaves(qkv)
        o = at.ring_attention(*alone, **options)
        o.backward(do)
        expected = [o.detach()] + [x.grad for x in alone]

        place = {"placement": placement, "group": WORLD}
        mine = leaves([at.shard(x, **place) for x in qkv])
        n_global = tokens if number % 2 else None
        o = at.ring_attention(*mine, schedule=schedule, n_global=n_global, **options, **place)
        o.backward(at.shard(do, **place))
        found = [at.unshard(x, **place) for x in (o.detach(), *(x.grad for x in mine))]
        for f, e in zip(found, expected):
            if reproducible:
                assert torch.equal(f, e), (number, placement)
            limit = 1e-6 if dtype == torch.float32 else 0.01
            assert (f.double() - e.double()).norm() <= limit * e.double().norm(), (
                number,
                placement,
            )


def gradients_of_sinks_add_up() -> None:
    """Every rank has those of its rows, as of any parameter that all ranks hold."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    longnet = {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}
    for number, placement in enumerate(["contiguous", "zigzag", "striped", "hilbert"]):
        options = {
            **(longnet if number % 2 else {}),
            "is_causal": number > 1,
            "mix_gradient": "detached" if number == 3 else "full",
        }
        tokens = [150, 2][number // 3]
        *qkv, do = whole(tokens, 4, 2, 16, number)
        sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
        alone = leaves([*qkv, sinks])
        o = at.ring_attention(*alone[:3], sinks=alone[3], **options)
        o.backward(do)
        place = {"placement": placement, "group": WORLD}
        mine = leaves([*(at.shard(x, **place) for x in qkv), sinks])
        found = at.ring_attention(*mine[:3], sinks=mine[3], **place, **options)
        found.backward(at.shard(do, **place))
        total = mine[3].grad.clone()
        dist.all_reduce(total)
        for a, b in zip((found, *(x.grad for x in mine[:3])), (o, *(x.grad for x in alone))):
            torch.testing.assert_close(a, at.shard(b, **place), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(total, alone[3].grad, rtol=1e-5, atol=1e-6)
        if mine[0].shape[1] == 0:
            assert torch.equal(mine[3].grad, torch.zeros(4))
    # In a model: data_parallel treats them as it treats projections.
    torch.manual_seed(1)
    model = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, sinks=True, group=WORLD)
    single = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, sinks=True)
    single.load_state_dict(model.state_dict())
    x = torch.randn(2, 24 * ranks, 64)
    parallel = DistributedDataParallel(model)
    parallel(*[at.shard(x, group=WORLD)] * 3, need_weights=False)[0].square().sum().backward()
    single(x, x, x, need_weights=False)[0].square().sum().backward()
    for name in ("sinks", "in_proj_weight"):
        a, b = model.get_parameter(name).grad, single.get_parameter(name).grad / ranks
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert rank < ranks


def compiled_equals_eager() -> None:
    """The number of rows of stored branch outputs depends on the lengths of other ranks. Compilers do not know it."""
    options = {"segment_lengths": [16, 64], "dilation_rates": [1, 4], "mix_gradient": "detached"}

    def function(*x: torch.Tensor) -> torch.Tensor:
        return 2 * at.ring_attention(*x, placement="striped", group=WORLD, **options)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for tokens in (150, 77):
        *qkv, do = (at.shard(x, placement="striped", group=WORLD) for x in whole(tokens, 4, 2, 16, tokens))
        results = []
        for each in (function, compiled):
            mine = leaves(qkv)
            o = each(*mine)
            o.backward(do)
            results.append([o, *(x.grad for x in mine)])
        for a, b in zip(*results):
            assert torch.equal(a, b)


def lengths_of_your_own() -> None:
    lengths = [5, 0, 17, 9][: dist.get_world_size()]
    *qkv, do = whole(sum(lengths), 2, 2, 16, 7)
    alone = leaves(qkv)
    o = at.ring_attention(*alone, is_causal=True)
    o.backward(do)
    rank = dist.get_rank()
    mine = leaves([x.split(lengths, 1)[rank] for x in qkv])
    part = at.ring_attention(*mine, is_causal=True, group=WORLD)
    part.backward(do.split(lengths, 1)[rank])
    torch.testing.assert_close(part, o.split(lengths, 1)[rank], rtol=1e-5, atol=1e-6)
    for a, b in zip(mine, alone):
        torch.testing.assert_close(a.grad, b.grad.split(lengths, 1)[rank], rtol=1e-5, atol=1e-6)
    try:
        at.ring_attention(*mine, placement="zigzag", group=WORLD)
    except annulus.ConfigError as error:
        assert "shard" in str(error) and str(lengths) in str(error), error
    else:
        raise AssertionError("zigzag took shards of the wrong lengths")


def placements_of_your_own() -> None:
    """A Placement without a name: everything that takes a name takes it, and ranks compare its ranges."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # The last rank holds the first tokens; the others share the rest in stripes, downwards.
    ranges = [[range(40 + r, 97, ranks - 1), range(10 + r, 40, ranks - 1)] for r in range(ranks - 1)]
    placement = annulus.Placement.explicit(97, [*ranges, [range(10)]])
    place = {"placement": placement, "group": WORLD}
    *qkv, do = whole(97, 4, 2, 16, 3)
    options = {"segment_lengths": [32, 97], "dilation_rates": [1, 3], "is_causal": True}
    alone = leaves(qkv)
    o = at.ring_attention(*alone, **options)
    o.backward(do)
    for n_global in (None, 97, None):  # the third call is known
        mine = leaves([at.shard(x, **place) for x in qkv])
        part = at.ring_attention(*mine, n_global=n_global, **options, **place)
        part.backward(at.shard(do, **place))
        found = [at.unshard(x, **place) for x in (part.detach(), *(x.grad for x in mine))]
        for f, e in zip(found, (o.detach(), *(x.grad for x in alone))):
            torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-6)
    other = annulus.Placement.explicit(97, [*ranges[1:], ranges[0], [range(10)]])
    differs = {"placement": other if rank == 0 else placement, "group": WORLD}
    for wrong in (differs, {**place, "n_global": 96}, {**place, "placement": annulus.Placement.striped(97, ranks)}):
        try:
            at.ring_attention(*mine, **wrong)
        except annulus.ConfigError as error:
            assert "placement" in str(error), error
        else:
            raise AssertionError("another placement was taken")


def messages_are_few() -> None:
    """A pass sends one agreement and the rows, with and without n_global."""
    ranks = dist.get_world_size()
    rounds = (ranks - 1).bit_length()
    q = torch.randn(1, 8, 2, 16).requires_grad_()
    for options in ({}, {"n_global": 8 * ranks}):
        at.ring_attention(q, q, q, group=WORLD, **options).sum().backward()
        transport = at.ring._registry._groups[WORLD.group_name].transport
        before = transport.counters()["messages_sent"]
        o = at.ring_attention(q, q, q, group=WORLD, **options)
        forward = transport.counters()["messages_sent"]
        o.sum().backward()
        backward = transport.counters()["messages_sent"]
        assert forward - before == rounds + ranks - 1, forward - before
        assert backward - forward == rounds + 2 * (ranks - 1), backward - forward


def documents_that_change() -> None:
    """New documents need no other messages than known ones, and no other executor."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rounds = (ranks - 1).bit_length()
    tokens = 8 * ranks
    *qkv, do = whole(tokens, 2, 2, 16, 7)
    mine = leaves([x.split(8, 1)[rank] for x in qkv])
    at.clear_cache()

    def attend(cut: int, inputs=mine, **options) -> torch.Tensor:
        lists = [[0, cut, tokens], [0, tokens]]
        return at.ring_attention(*inputs, is_causal=True, cu_seqlens=lists, **options)

    attend(1, group=WORLD)
    transport = at.ring._registry._groups[WORLD.group_name].transport
    outputs = []
    for cut in range(2, tokens):
        before = transport.counters()["messages_sent"]
        outputs.append(attend(cut, group=WORLD))
        assert transport.counters()["messages_sent"] - before <= rounds + ranks - 1
    assert len(at.ring._registry.executors()) == 1
    for cut, o in list(enumerate(outputs, 2))[::5]:  # gradients after other forwards
        grads = torch.autograd.grad(o, mine, do.split(8, 1)[rank])
        alone = leaves(qkv)
        expected = attend(cut, alone)
        torch.testing.assert_close(o, expected.split(8, 1)[rank], rtol=1e-5, atol=1e-6)
        for a, b in zip(grads, torch.autograd.grad(expected, alone, do)):
            torch.testing.assert_close(a, b.split(8, 1)[rank], rtol=1e-5, atol=1e-5)
    for wrong, words in (
        ([0, tokens + 1], [f"ends at query token {tokens + 1}"]),
        ([0, 3, tokens], ["cu_seqlens (rank 0: [[0, 2,", "rank 1: [0, 3,"]),
        (list(range(tokens + 1)), [f"{tokens + 1} numbers (0, 1, 2, ..., {tokens}; digest "]),
    ):
        torch_failures.refused(
            lambda: at.ring_attention(
                *mine,
                is_causal=True,
                cu_seqlens=wrong if rank == 1 else [[0, 2, tokens], [0, tokens]],
                group=WORLD,
            ),
            words,
        )
        attend(5, group=WORLD)


def lengths_that_change() -> None:
    """On one rank only: the others cannot tell from their own shards."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, first in enumerate((5, 9, 5, 5, 0, 9, 0)):
        if number == 3 and rank == 1:
            at.clear_cache()  # of one rank alone: what the others have kept is of no use
        lengths = [first] + [5] * (ranks - 1)
        *qkv, do = whole(sum(lengths), 2, 2, 16, first)
        alone = leaves(qkv)
        expected = at.ring_attention(*alone, is_causal=True)
        expected.backward(do)
        mine = leaves([x.split(lengths, 1)[rank] for x in qkv])
        o = at.ring_attention(*mine, is_causal=True, group=WORLD)
        o.backward(do.split(lengths, 1)[rank])
        torch.testing.assert_close(o, expected.split(lengths, 1)[rank], rtol=1e-5, atol=1e-6)
        for a, b in zip(mine, alone):
            torch.testing.assert_close(a.grad, b.grad.split(lengths, 1)[rank], rtol=1e-5, atol=1e-6)


def nothing_gives_nothing() -> None:
    """No rank has a token, or there are no sequences."""
    for shape in ((1, 0, 2, 16), (0, 5, 2, 16)):
        for mix in ("full", "detached"):
            q = torch.empty(shape, requires_grad=True)
            o = at.ring_attention(q, q, q, group=WORLD, mix_gradient=mix)
            o.sum().backward()
            assert o.shape == shape and q.grad.shape == shape
    nothing = torch.empty(1, 0, 3)
    for placement in ("contiguous", "hilbert"):
        place = {"placement": placement, "group": WORLD}
        assert at.unshard(at.shard(nothing, **place), **place).shape == nothing.shape
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=WORLD)


def groups_that_not_everybody_is_in() -> None:
    """Ranks may be in different numbers of groups."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, peer]) for peer in range(1, ranks)]
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=WORLD)
    for peer, pair in enumerate(pairs, 1):
        if rank in (0, peer):
            at.ring_attention(q, q, q, group=pair)


def alone() -> None:
    """A group of one rank."""
    q = torch.randn(1, 8, 2, 16)
    o = at.ring_attention(q, q, q, group=WORLD)
    assert torch.equal(o, at.ring_attention(q, q, q))
    at.ring._registry._groups[WORLD.group_name].transport.abort("out of tea")
    assert torch.equal(o, at.ring_attention(q, q, q, group=WORLD))


def group_made_again() -> None:
    """Without cleanup() in between. With its own stores: in the store of torchrun, groups of PyTorch sometimes find the
    addresses of earlier groups. The last case of its process, because it destroys the group of the worker."""
    q = torch.randn(1, 8, 2, 16)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number in range(2):
        at.ring_attention(q, q, q, group=dist.group.WORLD)
        dist.barrier()
        dist.destroy_process_group()
        name = f"annulus_{os.environ['MASTER_PORT']}_{number}"
        store = dist.FileStore(os.path.join(tempfile.gettempdir(), name), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    at.ring_attention(q, q, q, group=dist.group.WORLD)


def unshard_and_its_gradient() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(2, 23, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for placement in ("contiguous", "zigzag", "striped", "hilbert"):
        place = {"placement": placement, "group": WORLD}
        mine = at.shard(x, **place).clone().requires_grad_()
        assert torch.equal(mine[0, :, 0], x[0, at.positions(23, **place), 0])
        back = at.unshard(mine, **place)
        assert torch.equal(back, x)
        (back * x * (rank + 1)).sum().backward()  # the sum of all ranks' losses
        expected = at.shard(x, **place) * sum(range(1, ranks + 1))
        torch.testing.assert_close(mine.grad, expected)

        # Gradients of other tensors are theirs alone.
        other = torch.ones(2, 23, 3, dtype=torch.float64, requires_grad=True)
        (
            (at.unshard(mine.detach().requires_grad_(), **place) + 2 * other) * (rank + 1)
        ).sum().backward()
        torch.testing.assert_close(other.grad, torch.full_like(other, 2.0 * (rank + 1)))
    for wrong in (x[..., : 2 + (rank == 1)], x[0], x.float()):
        try:
            at.unshard(wrong if rank == 1 else x[..., :2], group=WORLD)
        except annulus.ConfigError as error:
            assert "unshard" in str(error), error
        else:
            raise AssertionError("shards that do not fit together went unnoticed")


def resharding_moves_the_fewest_bytes() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every, fewer = list(range(ranks)), list(range(ranks))[1:]
    names = ("contiguous", "zigzag", "striped", "hilbert")
    cases = [((a, every), (b, every)) for a in names for b in names]
    cases += [((a, every), (b, fewer[::-1])) for a, b in zip(names, names[1:])]
    cases += [((a, fewer), (b, every)) for a, b in zip(names, names[1:])]
    for number, (source, target) in enumerate(cases):
        tokens, dtype = [53, 2000][number % 2], [torch.float64, torch.bfloat16][number % 2]
        x = torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(number)).to(dtype)

        def part(where: tuple[str, list[int]], owner: int = rank) -> torch.Tensor:
            name, held_by = where
            if owner not in held_by:
                return x[:, :0]
            placed = annulus.Placement.named(name, tokens, len(held_by))
            return x[:, torch.from_numpy(placed.positions(held_by.index(owner)))]

        mine = part(source).clone().requires_grad_()
        found = at.reshard(mine, source, target, group=WORLD)
        assert torch.equal(found, part(target)), (source, target)
        # Twice the rows' bytes and the same agreement.
        transport = at.ring._registry._groups[WORLD.group_name].transport
        sent = [transport.counters()["bytes_sent"]]
        at.reshard(mine, source, target, group=WORLD)
        sent.append(transport.counters()["bytes_sent"])
        at.reshard(torch.cat([mine, mine], 2), source, target, group=WORLD)
        sent.append(transport.counters()["bytes_sent"])
        held = annulus.moves(*(placed_over_all(w, tokens, ranks) for w in (source, target)), rank)
        leaving = sum(len(r) for _, rows in held["sends"] for r in rows)
        moved = (sent[2] - sent[1]) - (sent[1] - sent[0])
        assert moved == leaving * 2 * 3 * x.element_size(), (moved, leaving)
        found.backward(part(target) * 2)
        assert torch.equal(mine.grad, part(source) * 2)
    short = torch.zeros(1, 5 + rank, 2)
    assert at.reshard(short, "contiguous", "striped", group=WORLD).shape[0] == 1  # any lengths
    for wrong, words in (("zig", "zig"), (("zigzag", [0, 9]), "0, 9"), (7, "7")):
        try:
            at.reshard(short, "contiguous", wrong if rank == 1 else "striped", group=WORLD)
        except annulus.ConfigError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{wrong} went unnoticed")
    # Placements of one name and size that place tokens differently. Ranks may come in anything that lists them.
    even, tokens = torch.zeros(1, 5, 2), 5 * ranks
    halves = [[range(5 * r, 5 * r + 5)] for r in range(ranks)]
    ways = [annulus.Placement.explicit(tokens, each) for each in (halves, halves[::-1])]
    try:
        at.reshard(even, "contiguous", ways[rank == 1], group=WORLD)
    except annulus.ConfigError as error:
        assert "disagree about target" in str(error), error
    else:
        raise AssertionError("rows went where only one rank wanted them")
    for held_by in (tuple(every), iter(every), torch.tensor(every)):
        at.reshard(even, "contiguous", ("zigzag", held_by if rank == 1 else every), group=WORLD)


def placed_over_all(where: tuple[str, list[int]], tokens: int, ranks: int) -> annulus.Placement:
    name, held_by = where
    placed = annulus.Placement.named(name, tokens, len(held_by))
    ranges = [list(placed.ranges(held_by.index(r))) if r in held_by else [] for r in range(ranks)]
    return annulus.Placement.explicit(tokens, ranges)


def groups_beside_data_parallelism() -> None:
    """2 x 2: rings of two ranks and data parallelism of two, by a DeviceMesh; DDP averages over all ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    ring = mesh.get_group("ring")
    torch.manual_seed(3)
    model = at.RingMultiheadDilatedAttention(
        32, 2, batch_first=True, is_causal=True, placement="zigzag"
    )
    alone = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, is_causal=True)
    alone.load_state_dict(model.state_dict())
    model.attention.group = ring
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(4))
    o, _ = alone(x, x, x, need_weights=False)
    o.square().sum().backward()

    parallel = DistributedDataParallel(model)
    mine = at.shard(x[mesh.get_local_rank("data")][None], placement="zigzag", group=ring)
    o, _ = parallel(mine, mine, mine, need_weights=False)
    (4 * o.square().sum()).backward()  # DDP divides by the number of processes
    for a, b in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    layer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    attention = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, is_causal=True)
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(6))
    h = layer(x)
    o, _ = attention(h, h, h, need_weights=False)
    loss = o.square().sum()
    loss.backward()
    expected = {n: p.grad.clone() for n, p in attention.named_parameters()}
    attention.zero_grad()

    attention.attention.group = WORLD
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(attention, mesh=mesh)
    mine = at.shard(h.detach(), group=WORLD)
    o, _ = attention(mine, mine, mine, need_weights=False)
    (dist.get_world_size() * o.square().sum()).backward()
    for name, p in attention.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-4)


def ranks_agree_on_the_transport_of_device_memory() -> None:
    rank = dist.get_rank()
    host = at.ring._transport._host
    for names, wanted, nccl in (
        ({}, {}, False),  # one host: memory is shared
        ({0: "here", 1: "there"}, {}, True),
        ({0: "here", 1: "there"}, {0: "shared", 1: "shared"}, False),
        ({0: "here", 1: "there"}, {0: "staged"}, False),
        ({}, {0: "group", 1: "group"}, True),
        ({}, {1: "group"}, False),
    ):
        at.ring._transport._host = lambda names=names: names.get(rank, host())
        os.environ["ANNULUS_DEVICE_MESSAGES"] = wanted.get(rank, "")
        transport = at.ProcessGroupTransport(WORLD, timeout=30)
        assert transport._wants_nccl() == nccl, (names, wanted)
        assert transport.reaches("cpu") and not transport.reaches("cuda:0") and not transport.in_order
        dist.barrier()
        transport.close()
    at.ring._transport._host = host
    del os.environ["ANNULUS_DEVICE_MESSAGES"]


def contract(name: str) -> None:
    """One check of transport_contract.py on a new ring."""
    transport = at.ProcessGroupTransport(WORLD, timeout=30)
    transport_contract.CHECKS[name](transport)
    dist.barrier()  # closing is leaving: the others may still wait for this rank
    transport.close()


if __name__ == "__main__":
    more = (torch_dropout, torch_failures, torch_masks, torch_padding)
    run_cases(globals(), {name: case for module in more for name, case in vars(module).items()})
