"""One rank of test_torch_distributed.py; runs under torchrun: torch_worker.py <case>..."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import transport_contract
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import annulus
import annulus.torch as at

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
    patterns = [{}, {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}]
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


def refused(call, words: list[str], seconds: float = 2.0) -> None:
    """Every rank gets a ConfigError with these words, soon."""
    begin = time.monotonic()
    try:
        call()
    except annulus.ConfigError as error:
        assert all(w in str(error) for w in words), error
    else:
        raise AssertionError(f"{words} on one rank went unnoticed")
    assert time.monotonic() - begin < seconds, (words, time.monotonic() - begin)


def errors_are_everybodys() -> None:
    """One rank's call is wrong, or another than the other ranks'."""
    rank, tokens = dist.get_rank(), 8 * dist.get_world_size()
    q = torch.randn(1, 8, 2, 16)
    more = torch.randn(2, 8, 2, 16)
    longnet = {"segment_lengths": [16, 32], "dilation_rates": [1, 2]}
    at.ring_attention(q, q, q, group=WORLD)  # the first call, which makes the ring, takes longer
    for wrong, words in (
        ({"v": q[:, :5]}, ["v is [1, 5, 2, 16]"]),
        # Right on each rank, but not the same.
        ({"is_causal": True}, ["is_causal (rank 0: False, rank 1: True)"]),
        ({"reproducible": True}, ["reproducible (rank 0: False, rank 1: True)"]),
        ({"q": q.half(), "k": q.half(), "v": q.half()}, ["torch.float32", "torch.float16"]),
        ({"q": more, "k": more, "v": more}, ["batch (rank 0: 1, rank 1: 2)"]),
        ({"k": q[:, :, :1], "v": q[:, :, :1]}, ["heads of k and v (rank 0: 2, rank 1: 1)"]),
        ({"scale": 0.5}, ["scale (rank 0: None, rank 1: 0.5)"]),
        ({"placement": "striped"}, ["placement (rank 0: 'contiguous', rank 1: 'striped')"]),
        (longnet, ["segment_lengths (rank 0: [], rank 1: [16, 32])", "dilation_rates", "pattern"]),
        ({"q": q.clone().requires_grad_()}, ["gradients are needed (rank 0: False, rank 1: True)"]),
        # What Python finds before the executor is asked.
        ({"q": q[0]}, ["q has 3 axes"]),
        ({"q": None}, ["q is a NoneType"]),
        ({"q": q.double(), "k": q.double(), "v": q.double()}, ["float64"]),
        ({"q": q.to_sparse()}, ["q is a torch.sparse_coo tensor"]),
        ({"placement": "zig-zag"}, ["zig-zag"]),
        ({"placement": ["zigzag"]}, ["placement is ['zigzag']"]),
        ({"scale": [1.0]}, ["scale is [1.0]"]),
        ({"scale": -1}, ["scale is -1: a finite number above 0 was expected"]),
        ({"is_causal": {}}, ["is_causal is {}"]),
        ({"schedule": "rign"}, ["rign"]),
        ({"timeout": -1}, ["timeout"]),
        ({"n_global": 2**64}, ["n_global"]),
        ({"n_global": tokens + 1}, ["n_global"]),
        (longnet | {"segment_lengths": [16.5, 32]}, ["segment_lengths"]),
        (longnet | {"segment_lengths": [2**64, 32]}, ["segment_lengths", str(2**64)]),
        (longnet | {"segment_lengths": [[16], 32]}, ["segment_lengths"]),
        (longnet | {"segment_lengths": 16}, ["segment_lengths is 16"]),
        (longnet | {"segment_lengths": [16]}, ["dilation_rates"]),
    ):
        for common in ({}, {"n_global": tokens}):
            call = {"q": q, "k": q, "v": q, "group": WORLD, **common} | (wrong if rank == 1 else {})
            refused(lambda: at.ring_attention(**call), words)
    n_global = tokens if rank == 1 else None
    refused(
        lambda: at.ring_attention(q, q, q, n_global=n_global, group=WORLD),
        [f"n_global (rank 0: None, rank 1: {tokens})"],
    )
    refused(
        lambda: at.ring_attention(q, q, q, n_global=tokens + 1, group=WORLD),
        [f"of {tokens + 1} tokens", str([8] * dist.get_world_size())],
    )
    at.ring_attention(q, q, q, group=WORLD)  # still alive

    # Some go forward, others back.
    x = q.clone().requires_grad_()
    o = at.ring_attention(x, x, x, group=WORLD)
    words = ["the call (rank 0: 'forward', rank 1: 'backward')"]
    refused(
        lambda: o.sum().backward() if rank == 1 else at.ring_attention(x, x, x, group=WORLD), words
    )
    o = at.ring_attention(x, x, x, group=WORLD)
    o.sum().backward()

    module = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, group=WORLD)
    x = torch.randn(1, 8, 32)
    for wrong, words in (
        ({"need_weights": True}, ["need_weights"]),
        ({"attn_mask": torch.zeros(8, 8)}, ["attn_mask"]),
        ({"key_padding_mask": torch.zeros(1, 7, dtype=torch.bool)}, ["key_padding_mask"]),
        (
            {"key_padding_mask": torch.ones(1, 8, dtype=torch.int64)},
            ["key_padding_mask is torch.int64"],
        ),
        ({"query": torch.randn(1, 8, 31)}, ["RuntimeError"]),
    ):
        call = {"query": x, "key": x, "value": x, "need_weights": False}
        call |= wrong if rank == 1 else {}
        refused(lambda: module(**call), words)
    module(x, x, x, need_weights=False)


def bad_luck_is_everybodys() -> None:
    """What goes wrong on one rank without anybody's doing: the environment, memory."""
    rank = dist.get_rank()
    q = torch.randn(1, 8, 2, 16)

    def call(**options) -> torch.Tensor:
        return at.ring_attention(q, q, q, group=WORLD, **options)

    if rank == 1:
        os.environ["ANNULUS_ISA"] = "abacus"  # heard at the first executor of a process
    refused(call, ["abacus"], seconds=10.0)  # connects, too
    os.environ.pop("ANNULUS_ISA", None)
    call()

    def fail(*_: object) -> None:
        raise MemoryError("no memory left")

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    kept = at._rings.pattern_of
    if rank == 1:
        at._rings.pattern_of = fail
    refused(lambda: call(is_causal=True), ["no memory left"])
    at._rings.pattern_of = kept
    call(is_causal=True)

    # When results are allocated, of a call that has its executor and of one that has not.
    kept = at._functional._result_like
    for options in ({"is_causal": True}, {"scale": 0.5}):
        if rank == 1:
            at._functional._result_like = no_memory
        refused(lambda: call(**options), ["can't allocate"])
        at._functional._result_like = kept
        call(**options)

    x = q.clone().requires_grad_()
    o = at.ring_attention(x, x, x, group=WORLD)
    if rank == 1:
        at._functional._result_like = no_memory
    refused(lambda: o.sum().backward(), ["can't allocate"])
    at._functional._result_like = kept
    o = at.ring_attention(x, x, x, group=WORLD)
    o.sum().backward()


def messages_are_few() -> None:
    """One agreement per pass, and the rows: with lengths of one's own as with n_global."""
    ranks = dist.get_world_size()
    rounds = (ranks - 1).bit_length()
    q = torch.randn(1, 8, 2, 16).requires_grad_()
    for options in ({}, {"n_global": 8 * ranks}):
        at.ring_attention(q, q, q, group=WORLD, **options).sum().backward()
        transport = at._rings._groups[WORLD.group_name].transport
        before = transport.counters()["messages_sent"]
        o = at.ring_attention(q, q, q, group=WORLD, **options)
        forward = transport.counters()["messages_sent"]
        o.sum().backward()
        backward = transport.counters()["messages_sent"]
        assert forward - before == rounds + ranks - 1, forward - before
        assert backward - forward == rounds + 2 * (ranks - 1), backward - forward


def lengths_that_change() -> None:
    """On one rank alone: the others cannot see it from their own shards."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for first in (5, 9, 5, 5, 0, 9, 0):
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


def two_threads() -> None:
    """Calls of two threads meet the other ranks' in any order. No rank gets rows of the wrong one."""
    rank = dist.get_rank()
    q = torch.randn(1, 256, 2, 16)
    expected = at.ring_attention(q, q, q, group=WORLD)
    begun, outcomes = threading.Event(), []

    def call(late: bool) -> None:
        if late:
            begun.wait()
            time.sleep(0.5)
        else:
            begun.set()
        try:
            outcomes.append(at.ring_attention(q, q, q, group=WORLD))
        except annulus.Error as error:
            outcomes.append(error)

    begin = time.monotonic()
    if rank == 0:  # both wait for rank 1: the first in the ring, the second would, too
        threads = [threading.Thread(target=call, args=(late,)) for late in (False, True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kinds = {type(x) for x in outcomes}
        assert kinds == {annulus.ConfigError, annulus.TransportError}, outcomes
        assert all("two threads of rank 0" in str(x) for x in outcomes), outcomes
    else:
        time.sleep(1.0 if rank == 1 else 0.0)
        call(False)
        assert isinstance(outcomes[0], annulus.TransportError), outcomes
        assert outcomes[0].rank == 0 and "two threads of rank 0" in str(outcomes[0]), outcomes
    assert time.monotonic() - begin < 5
    dist.barrier()
    assert torch.equal(at.ring_attention(q, q, q, group=WORLD), expected)  # made anew


def groups_that_not_everybody_is_in() -> None:
    """Ranks may be in different numbers of groups."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, peer]) for peer in range(1, ranks)]
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=WORLD)
    for peer, pair in enumerate(pairs, 1):
        if rank in (0, peer):
            at.ring_attention(q, q, q, group=pair)


def rings_are_made_anew() -> None:
    """After a timeout, a cleanup, and a new process group."""
    rank = dist.get_rank()
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=WORLD)
    # Without n_global the exchange of lengths fails, with it the construction of an executor.
    for options in ({}, {"n_global": 8 * dist.get_world_size(), "is_causal": True}):
        dist.barrier()
        if rank == 1:
            time.sleep(2)
        failed = False
        for timeout in (0.5, 20):  # whoever noticed first waits for the others in the second call
            begin = time.monotonic()
            try:
                at.ring_attention(q, q, q, group=WORLD, timeout=timeout, **options)
            except annulus.TransportError:
                assert timeout == 0.5 and time.monotonic() - begin < 4
                failed = True
        assert failed
    for _ in range(5):
        at.ring_attention(q, q, q, group=WORLD)
        at.cleanup()
    # Nobody has to come to a call that one rank alone makes, and it ends in time.
    if rank == 0:
        begin = time.monotonic()
        try:
            at.ring_attention(q, q, q, group=WORLD, timeout=1.0)
        except annulus.TransportError as error:
            assert error.rank == 1 and 0.9 < time.monotonic() - begin < 5, error
        else:
            raise AssertionError("a ring of one rank out of several worked")
    dist.barrier()
    at.ring_attention(q, q, q, group=WORLD)


def alone() -> None:
    """A group of one rank, which has nobody to talk to."""
    q = torch.randn(1, 8, 2, 16)
    o = at.ring_attention(q, q, q, group=WORLD)
    assert torch.equal(o, at.ring_attention(q, q, q))
    at._rings._groups[WORLD.group_name].transport.abort("out of tea")
    assert torch.equal(o, at.ring_attention(q, q, q, group=WORLD))


def group_made_again() -> None:
    """Without cleanup() in between. Over stores of its own: PyTorch's groups now and then meet the addresses of
    the ones before them in torchrun's. Last of its process: the worker's own group is gone."""
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


def groups_beside_data_parallelism() -> None:
    """2 x 2: rings of two within data parallelism of two, by a DeviceMesh; DDP averages over all."""
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


def death(how: str) -> None:
    """Rank 1 goes; everybody else gets a TransportError that names it, long before the timeout, and another one
    when it goes on to call."""
    q = torch.randn(1, 600, 4, 64)
    at.ring_attention(q, q, q, group=WORLD)
    for call in range(1000):
        if dist.get_rank() == 1 and call == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "silent":
                time.sleep(20)
                os._exit(0)
            at._rings._groups[WORLD.group_name].transport.abort("out of coffee")
            time.sleep(20)
            os._exit(0)
        begin = time.monotonic()
        try:
            at.ring_attention(q, q, q, group=WORLD, timeout=4.0)
        except annulus.TransportError as error:
            took = time.monotonic() - begin
            assert took < (6 if how == "silent" else 3), took
            assert error.rank == 1, error
            if how == "gave_up":
                assert "out of coffee" in str(error), error
            print(f"rank {dist.get_rank()} lost rank {error.rank} ({how})", flush=True)
            break
    else:
        raise AssertionError("nobody missed rank 1")
    for _ in range(2):
        try:
            at.ring_attention(q, q, q, group=WORLD, timeout=1.5)
        except annulus.TransportError as error:
            assert error.rank == 1 and "The ring before this one ended so" in str(error), error
            print(f"rank {dist.get_rank()} misses rank {error.rank} ({how})", flush=True)
        else:
            raise AssertionError("a ring without rank 1 worked")
    time.sleep(1)  # the others find out for themselves
    os._exit(0)


def death_killed() -> None:
    death("killed")


def death_gave_up() -> None:
    death("gave_up")


def death_silent() -> None:
    death("silent")


def contract(name: str) -> None:
    """One check of transport_contract.py on a ring of its own."""
    transport = at.ProcessGroupTransport(WORLD, timeout=30)
    transport_contract.CHECKS[name](transport)
    dist.barrier()  # closing is leaving: the others may still wait for this rank
    transport.close()


def main() -> None:
    global WORLD
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    WORLD = dist.group.WORLD
    for case in sys.argv[1:]:
        function, *arguments = case.split(":")
        globals()[function](*arguments)
        print(f"rank {dist.get_rank()}: {case} done", flush=True)
    at.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
