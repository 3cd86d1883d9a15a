"""key_padding_mask on a group: cases of torch_worker.py."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import TypeVar

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from annulus.torch import _functional, _key_ranges
from annulus.torch.ring._registry import lengths_of_all
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_failures import refused

T = TypeVar("T")

LONGNET = {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}
PATTERNS = [{}, {"window": (20, 9)}, LONGNET, {**LONGNET, "window": (40, 0)}]
PLACEMENTS = ("contiguous", "zigzag", "striped", "hilbert", "explicit")


def _placed(name: str, tokens: int) -> dict[str, object]:
    """The arguments of a placement; explicit: shards whose tokens are in no order."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    if name != "explicit":
        return {"placement": name, "group": world}
    half = tokens // 2
    ranges = [[range(half + rank, tokens, ranks), range(rank, half, ranks)] for rank in range(ranks)]
    return {"placement": annulus.Placement.explicit(tokens, ranges), "group": world}


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def _mask(begin: list[int], end: list[int], tokens: int) -> torch.Tensor:
    at = torch.arange(tokens)
    return torch.stack([(at < b) | (at >= e) for b, e in zip(begin, end)])


def _transport() -> annulus.Transport:
    return at.ring._registry._groups[dist.group.WORLD.group_name].transport


def _sent(what: str, body: Callable[[], T]) -> tuple[int, T]:
    """How much this rank sends for body(), which has been called before; and the result."""
    body()
    before = _transport().counters()[what]
    result = body()
    return _transport().counters()[what] - before, result


@contextlib.contextmanager
def no_columns() -> Iterator[None]:
    """A context in which masks must be lengths."""
    widened, _functional.widened = _functional.widened, None
    try:
        yield
    finally:
        _functional.widened = widened


def padding_is_the_mask() -> None:
    """Random masks of every kind, against the fp64 reference with lengths that no mask was read for."""
    ranks = dist.get_world_size()
    for number in range(40):
        draw = random.Random(number * 10 + ranks)
        tokens = draw.choice([3, 53, 150])
        heads, kv_heads = draw.choice([(4, 4), (4, 2), (4, 1)])
        call = dict(draw.choice(PATTERNS))
        call["is_causal"] = "window" not in call and draw.random() < 0.5
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        # Whole entries, padding on either side, entries without a key, and keys of few ranks only.
        cuts = [sorted(draw.choices(range(tokens + 1), k=2)) for _ in range(2)] + [[0, tokens]]
        draw.shuffle(cuts)
        if number % 5 == 0:
            cuts[0] = [tokens - 1, tokens - 1]
        begin, end = map(list, zip(*cuts))
        hidden = _mask(begin, end, tokens)
        generator = torch.Generator().manual_seed(number)
        *qkv, do = (
            torch.randn(3, tokens, h, 16, generator=generator).to(dtype)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        exact = _leaves(*(x.double() for x in qkv))
        expected, expected_lse = at.ring_attention(
            *exact, leftpad_k=begin, seqused_k=end, return_lse=True, **call
        )
        expected.backward(do.double())

        place = _placed(draw.choice(PLACEMENTS), tokens)
        qkv[1:] = [x.masked_fill(hidden[..., None, None], torch.nan) for x in qkv[1:]]
        mine = _leaves(*(at.shard(x, **place) for x in qkv))
        mask = at.shard(hidden, **place)
        if number % 3 == 1:  # as nn.TransformerEncoder makes it
            mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
        schedule = draw.choice(["ring", "gather"])
        with no_columns():
            o, lse = at.ring_attention(
                *mine, key_padding_mask=mask, schedule=schedule, return_lse=True, **call, **place
            )
        o.backward(at.shard(do, **place))
        limit = 2e-6 if dtype == torch.float32 else 1e-2
        results = [expected, expected_lse, *(x.grad for x in exact)]
        found = [at.unshard(x, **place) for x in (o.detach(), lse, *(x.grad for x in mine))]
        for name, f, e in zip(("o", "lse", "dq", "dk", "dv"), found, results):
            if name == "lse":
                f, e = (x.masked_fill(x == -torch.inf, 0) for x in (f, e))
            # With one key, dq and dk are 0 but for rounding.
            error, size = (f.double() - e).norm(), max(e.norm(), 0.1 * do.double().norm())
            assert error <= limit * size, (number, name, float(error / size))
        for f in (found[3], found[4]):
            assert not f[hidden].any(), "ignored keys have no gradient"


def ignored_keys_are_not_sent() -> None:
    """Predicted bytes are counted bytes. A rank all of whose keys are ignored sends none of them."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tokens = 40 * ranks
    q, k, v = (torch.randn(2, 40, h, 16) for h in (4, 2, 2))
    for end in (tokens, 40, 0):
        mask = _mask([0, 0], [end, end], tokens)[:, 40 * rank : 40 * rank + 40]
        call = {"key_padding_mask": mask, "schedule": "gather", "group": world}
        at.clear_cache()
        with no_columns():
            bytes_sent, _ = _sent("bytes_sent", lambda: at.ring_attention(q, k, v, **call))  # noqa: B023
            rounds, _ = _sent("messages_sent", lambda: at.ring_attention(q, k, v, **call))  # noqa: B023
        (executor,) = at.ring._registry.executors_of(world)
        assert bytes_sent == executor.predicted_forward_bytes
        plain, _ = _sent("bytes_sent", lambda: at.ring_attention(q, k, v, schedule="gather", group=world))
        agreement = (ranks - 1).bit_length()
        if end == tokens:  # nothing is ignored: the same call
            assert bytes_sent == plain and rounds == agreement + ranks - 1
        elif end == 0 or rank > 0:  # all keys of this rank are ignored
            assert rounds == agreement and bytes_sent < plain
        else:
            assert bytes_sent == plain


def masks_that_change() -> None:
    """Ranks have new masks in the same call or not, change their memory in any way, and the results are right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = 11 * ranks + 1
    place = {"placement": "zigzag", "group": dist.group.WORLD}
    whole = [torch.randn(2, tokens, h, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 1)]
    whole[2] = whole[1].sin()
    mine = [at.shard(x, **place) for x in whole]
    rounds = (ranks - 1).bit_length()
    draw = random.Random(3)
    held: dict[tuple[int, int], torch.Tensor] = {}
    hidden = torch.zeros(2, tokens, dtype=torch.bool)

    def check(mask: torch.Tensor, **more: object) -> None:
        o = at.ring_attention(*mine, key_padding_mask=mask, **more, **place)
        exact = at.ring_attention(*(x.double() for x in whole), key_padding_mask=hidden)
        torch.testing.assert_close(o.double(), at.shard(exact, **place), rtol=1e-5, atol=1e-5)

    for step in range(25):
        begin, end = sorted(draw.choices(range(0, tokens + 1, 7), k=2))
        hidden = _mask([begin, 0], [end, tokens], tokens)
        if step % 6 == 5:
            hidden[1, 3::5] = True  # columns
        kept = (draw.randrange(ranks), begin * tokens + end)  # each rank keeps some masks, and makes the others anew
        mask = at.shard(hidden, **place).clone()
        if step % 6 != 5 and kept[0] == rank:
            mask = held.setdefault((begin, end), mask)
        # A mode sees operators, through which the call of this rank then goes.
        with FlopCounterMode(display=False) if step % 5 == rank else contextlib.nullcontext():
            check(mask)
        if step % 4 == 0:
            check(mask[:, :])  # another view of the same mask
    # Memory that is changed without the tensor's knowledge, on one rank.
    mask = at.shard(hidden, **place).clone()
    check(mask)
    hidden = _mask([4, 0], [tokens, tokens - 9], tokens)
    mask.data.copy_(at.shard(hidden, **place))
    check(mask)
    # A known mask needs no other messages than a call without one.
    sent, _ = _sent("messages_sent", lambda: at.ring_attention(*mine, key_padding_mask=mask, **place))
    assert sent <= rounds + ranks - 1
    # A new one needs one comparison of records in addition.
    comparison, _ = _sent("messages_sent", lambda: lengths_of_all("test", place["group"].group_name, {}, 1))
    before = _transport().counters()["messages_sent"]
    check(mask.clone())
    assert _transport().counters()["messages_sent"] - before == sent + comparison
    # With dropout, ranks that begin anew must not draw twice.
    torch.manual_seed(5)
    for step in range(6):
        fresh = mask.clone() if step % ranks == rank else mask
        at.ring_attention(*mine, key_padding_mask=fresh, dropout_p=0.2, **place)
    if rank == 0:
        hidden[0] = False
    with torch.no_grad():
        hidden[:] = False
    check(at.shard(hidden, **place))


def masks_with_holes_are_everybodys() -> None:
    """One rank with holes, a bias or a gradient: all ranks compute columns. With softcap: an error on all."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tokens = 16 * ranks
    x = torch.randn(1, tokens, 2, 16, generator=torch.Generator().manual_seed(1))
    mine = at.shard(x, group=world)
    no_hole = torch.zeros(1, tokens, dtype=torch.bool)
    hole = no_hole.clone()
    hole[0, tokens - 5] = True
    bias = torch.zeros(1, tokens)
    bias[0, tokens - 16 :] = 0.5
    for whole in (hole, bias):
        own = at.shard(whole, group=world)
        if whole is bias and rank < ranks - 1:
            own = torch.zeros(1, 16, dtype=torch.bool)  # the kinds may differ
        exact = at.ring_attention(*[x.double()] * 3, key_padding_mask=whole)
        o = at.ring_attention(*[mine] * 3, key_padding_mask=own, group=world)
        torch.testing.assert_close(o.double(), at.shard(exact, group=world), rtol=1e-5, atol=1e-5)
        words = ["softcap would also be applied to the columns"]
        refused(
            lambda own=own: at.ring_attention(*[mine] * 3, key_padding_mask=own, softcap=3.0, group=world), words
        )
    learned = torch.zeros(1, 16, requires_grad=rank == ranks - 1)  # it must not be taken for nothing
    leaf = mine.clone().requires_grad_()
    o = at.ring_attention(leaf, leaf, leaf, key_padding_mask=learned, group=world)
    o.backward(torch.arange(16.0)[:, None, None].expand_as(o))
    exact = [x.double().requires_grad_(), torch.zeros(1, tokens, dtype=torch.float64, requires_grad=True)]
    exact[1].data.fill_(1e-300)  # a bias, which does not change any result
    o = at.ring_attention(*exact[:1] * 3, key_padding_mask=exact[1])
    o.backward(torch.arange(16.0).double().repeat(ranks)[:, None, None].expand_as(o))
    found = [leaf.grad] if learned.grad is None else [leaf.grad, learned.grad]
    for f, e in zip(found, exact):
        torch.testing.assert_close(f.double(), at.shard(e.grad, group=world), rtol=1e-4, atol=1e-4)
    assert (learned.grad is not None) == (rank == ranks - 1)


def masks_of_other_ranks_change_under_checkpoints() -> None:
    """A rank that begins anew saves no more in forward than in recomputation, where no mask is new."""
    rank, world = dist.get_rank(), dist.group.WORLD
    mask = torch.zeros(1, 8, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        if rank == 1:  # holes, which are columns on all ranks
            mask[0, 2 : 3 + step] = True
        whole = torch.randn(1, 8, 2, 8, generator=generator)
        grads = []
        for kept in (False, True):  # the second one knows all masks
            x = whole.clone().requires_grad_()
            call = functools.partial(at.ring_attention, x, x, x, group=world, key_padding_mask=mask)
            o = call() if kept else checkpoint(call, use_reentrant=False)
            o.square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads), step


def errors_beside_masks_are_everybodys() -> None:
    """Also of what is wrong after the ranks have exchanged what they know of their masks."""
    rank, world = dist.get_rank(), dist.group.WORLD
    x = torch.randn(1, 16, 2, 16)
    good = torch.zeros(1, 16, dtype=torch.bool)
    good[:, :3] = rank == 0
    known = good.clone()
    at.ring_attention(x, x, x, key_padding_mask=known, group=world)
    for mask, (wrong, words) in itertools.product(
        (good, known),
        (
            ({"window": (3, 1), "is_causal": True}, ["window is (3, 1)"]),
            ({"pattern": "zig"}, ["zig"]),
            ({"scale": -1.0}, ["scale"]),
            ({"timeout": -1.0}, ["timeout"]),
            ({"placement": "zig"}, ["zig"]),
            ({"softcap": -1.0}, ["softcap"]),
            ({"key_padding_mask": good[:, :3]}, ["key_padding_mask is [1, 3]"]),
            ({"key_padding_mask": good.to_sparse()}, ["nested or sparse"]),
            ({"shared_gradient": "some"}, ["shared_gradient is 'some'"]),
            ({"key_padding_mask": None}, ["key_padding_mask (rank 0: 'given", "rank 1: 'none')"]),
            ({"cu_seqlens": [0, 20]}, ["key_padding_mask (rank 0: 'given", "rank 1: 'given, but not read')"]),
            ({"placement": "striped"}, ["placement (rank 0: 'contiguous', rank 1: 'striped')"]),
            ({"is_causal": True}, ["is_causal (rank 0: False, rank 1: True)"]),
        ),
    ):
        call = {"key_padding_mask": mask.clone() if mask is good else mask}
        call |= wrong if rank == 1 else {}
        refused(lambda call=call: at.ring_attention(x, x, x, group=world, **call), words)
    at.ring_attention(x, x, x, key_padding_mask=known, group=world)
    # Shards that do not fit the placement, where some ranks need not read their masks.
    for tokens in (0, 5):
        short = tokens if rank == 1 else 16
        own = torch.zeros(1, short, requires_grad=rank == 0)
        y = torch.randn(1, short, 2, 16, requires_grad=True)
        call = {"key_padding_mask": own, "placement": "zigzag", "group": world}
        refused(lambda: at.ring_attention(y, y, y, **call), ["the ranks hold [16, "])  # noqa: B023
    # Something unexpected in the second exchange, on one rank.
    read, here = _key_ranges._spans_of, torch.zeros(1, 6, dtype=torch.bool)

    def fails(*arguments: object) -> object:
        if rank == 1:
            raise MemoryError("of the other kind")
        return read(*arguments)

    _key_ranges._spans_of = fails
    y = torch.randn(1, 6, 2, 16)
    refused(lambda: at.ring_attention(y, y, y, key_padding_mask=here, group=world), ["of the other kind"])
    _key_ranges._spans_of = read
    at.ring_attention(y, y, y, key_padding_mask=here, group=world)
    # One rank has holes and no softcap, the other ones have a softcap.
    hole = good.clone()
    hole[0, 7] = True
    call = {"key_padding_mask": hole, "softcap": 0.0 if rank == 1 else 2.0}
    refused(lambda: at.ring_attention(x, x, x, group=world, **call), ["softcap"])
    at.ring_attention(x, x, x, group=world)


def padding_is_reproducible() -> None:
    """The same bits as in one process, with every kind of mask."""
    ranks = dist.get_world_size()
    tokens = 90
    *qkv, do = (torch.randn(2, tokens, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(4))
    for number, holes in enumerate((False, True) * 3):
        hidden = _mask([7, 0], [tokens, 70], tokens)
        hidden[0, 40] |= holes
        call = {**PATTERNS[number % 3], "reproducible": True}
        place = _placed(PLACEMENTS[(number + ranks) % 5], tokens)
        alone = _leaves(*qkv)
        o = at.ring_attention(*alone, key_padding_mask=hidden, **call)
        o.backward(do)
        mine = _leaves(*(at.shard(x, **place) for x in qkv))
        own = at.ring_attention(*mine, key_padding_mask=at.shard(hidden, **place), **call, **place)
        own.backward(at.shard(do, **place))
        for a, b in zip((own.detach(), *(x.grad for x in mine)), (o.detach(), *(x.grad for x in alone))):
            assert torch.equal(at.unshard(a, **place), b), number


def padding_with_keys_of_other_lengths() -> None:
    """Cross-attention, shards of any length, sinks, shared keys, and a softcap."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(4)
    sizes = [5 + 3 * r for r in range(ranks)]
    keys = [0 if r == 1 else 9 + r for r in range(ranks)]
    q = torch.randn(2, sum(sizes), 4, 16, generator=generator)
    k, v = torch.randn(2, 2, sum(keys), 2, 16, generator=generator)
    sinks = torch.randn(4, generator=generator)
    shared = torch.randn(2, 3, 2, 16, generator=generator)
    hidden = _mask([0, 2], [sum(keys) - 3, sum(keys)], sum(keys))
    for more in ({}, {"softcap": 5.0}, {"sinks": sinks}, {"shared_k": shared, "shared_v": shared}):
        exact_call = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in more.items()}
        exact = at.ring_attention(*(x.double() for x in (q, k, v)), key_padding_mask=hidden, **exact_call)
        parts = [q.split(sizes, 1)[rank], *(x.split(keys, 1)[rank] for x in (k, v, hidden))]
        with no_columns():
            o = at.ring_attention(*parts[:3], key_padding_mask=parts[3], group=world, **more)
        expected = exact.split(sizes, 1)[rank]
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
