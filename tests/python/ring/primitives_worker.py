"""One rank of test_primitives.py; runs under torchrun: primitives_worker.py <case>..."""

from __future__ import annotations

import fractions
import threading
import time

import annulus
import annulus.torch as at
import numpy as np
import torch
import torch.distributed as dist
from annulus import monitor
from support.rank_cases import run_cases
from torch_failures import hear, refused, tell

WORLD = None
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64]


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """The tensors of a rank. Every rank can compute those of the others."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def ring() -> tuple[int, int, int, int]:
    """This rank, the number of ranks, the previous rank and the next rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return rank, ranks, (rank - 1) % ranks, (rank + 1) % ranks


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found, expected)
    assert torch.equal(found, expected), (found, expected)


# ---- values


def everybody_gets_the_previous_ranks_tensor() -> None:
    rank, _, previous, _ = ring()
    for number, dtype in enumerate(DTYPES):
        for shape in ((), (0,), (3, 0, 2), (1,), (5, 3), (2, 7, 3, 4)):
            mine = numbers(rank, *shape, dtype=dtype, seed=number)
            found = at.ring_pass(mine, WORLD)
            same(found, numbers(previous, *shape, dtype=dtype, seed=number))
            same(mine, numbers(rank, *shape, dtype=dtype, seed=number))
            assert found.is_contiguous() and found.data_ptr() != mine.data_ptr() or found.numel() == 0


def views_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Tensors [4, 6, 8] with other strides, or with the conjugate or negation bit."""
    return [
        x.transpose(0, 2),
        x[::2, 1:, ::3],
        x[:, :1].expand(4, 5, 8),
        x.permute(2, 0, 1)[1:],
        x[1],
        x[0, 0, 0],
        x.unfold(1, 3, 1),
        x.flip(0).t() if x.dim() == 2 else x.flip(0),
        torch._neg_view(x),
        torch.complex(x, x).conj(),
        torch.complex(x, x).conj().imag,
    ]


def strides_are_any() -> None:
    rank, _, previous, _ = ring()
    mine, theirs = (views_of(numbers(r, 4, 6, 8, dtype=torch.float32)) for r in (rank, previous))
    for found, expected in zip([at.ring_pass(x, WORLD) for x in mine], theirs):
        same(found, expected)
    for k, v in zip(range(len(mine)), reversed(range(len(mine)))):
        for found, i in zip(at.ring_pass_kv(mine[k], mine[v], WORLD), (k, v)):
            same(found, theirs[i])


def shapes_may_differ() -> None:
    """Sizes differ between ranks, and between k and v. Some or all ranks have nothing to send."""
    rank, _, previous, _ = ring()
    for lengths in ([5, 0, 17, 9], [0, 0, 0, 3], [0, 0, 0, 0]):
        shapes = [(2, n, 3) for n in lengths]
        same(at.ring_pass(numbers(rank, *shapes[rank]), WORLD), numbers(previous, *shapes[previous]))
        for others in ([(n + 1,) for n in lengths], [(0,)] * 4, [(r, n) for r, n in enumerate(lengths)]):
            k = numbers(rank, *shapes[rank], dtype=torch.bool)
            v = numbers(rank, *others[rank], seed=1)
            found = at.ring_pass_kv(k, v, WORLD)
            same(found[0], numbers(previous, *shapes[previous], dtype=torch.bool))
            same(found[1], numbers(previous, *others[previous], seed=1))


def as_many_passes_as_ranks_are_none() -> None:
    rank, ranks, _, _ = ring()
    k, v = numbers(rank, 3, 4 + rank), numbers(rank, 70_000, dtype=torch.bfloat16, seed=1)
    a, b, x = k, v, k
    for step in range(1, ranks + 1):
        a, b = at.ring_pass_kv(a, b, WORLD)
        x = at.ring_pass(x, WORLD)
        same(x, numbers((rank - step) % ranks, 3, 4 + (rank - step) % ranks))
    same(a, k)
    same(b, v)
    same(x, k)


def k_and_v_are_one_message() -> None:
    rank, ranks, _, _ = ring()
    k, v = numbers(rank, 2, 9, dtype=torch.bfloat16), numbers(rank, 5, dtype=torch.float32)
    at.ring_pass_kv(k, v, WORLD)
    if ranks == 1:
        return
    transport = at.ring._registry._groups[WORLD.group_name].transport
    sent = []
    for call in (lambda: at.ring_pass_kv(k, v, WORLD), lambda: at.ring_pass_kv(k[:0], v[:0], WORLD)):
        before = transport.counters()["messages_sent"]
        call()
        sent.append(transport.counters()["messages_sent"] - before)
    assert sent[0] == sent[1] + 1, sent  # an agreement needs as many for nothing


def results_may_be_written_to() -> None:
    rank, _, previous, _ = ring()
    k, v = (numbers(rank, 6, seed=s).requires_grad_() for s in (1, 2))
    a, b = at.ring_pass_kv(k, v, WORLD)
    a += 1
    b.mul_(2)
    x = at.ring_pass(k, WORLD)
    x[2] = 7.0
    same(a.detach(), numbers(previous, 6, seed=1) + 1)
    same(b.detach(), numbers(previous, 6, seed=2) * 2)
    (a.sum() + 3 * b.sum() + x.sum()).backward()
    expected = torch.full((6,), 2.0, dtype=torch.float64)
    expected[2] = 1.0
    same(k.grad, expected)
    same(v.grad, torch.full((6,), 6.0, dtype=torch.float64))


# ---- gradients


def loss_of(x: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss of the received tensor, with another function on each rank."""
    return ((rank + 1) * x.sin() * torch.arange(1, x.numel() + 1).view(x.shape)).sum()


def gradients_go_the_other_way() -> None:
    rank, ranks, _, following = ring()
    x = numbers(rank, 3, 2 + rank).requires_grad_()
    loss_of(at.ring_pass(x, WORLD), rank).backward()
    expected = x.detach().clone().requires_grad_()
    loss_of(expected, following).backward()
    same(x.grad, expected.grad)
    # Of several passes, with strides, and with gradients that have others: expanded, sparse.
    for passes in range(1, ranks + 2):
        x = numbers(rank, 4, 6).requires_grad_()
        y = x.t()
        for _ in range(passes):
            y = at.ring_pass(y, WORLD)
        holder = (rank + passes) % ranks
        (y.sum() * (rank + 1)).backward()
        same(x.grad, torch.full((4, 6), holder + 1.0, dtype=torch.float64))
    x = numbers(rank, 4).requires_grad_()
    ones = torch.ones(4, dtype=torch.float64)
    at.ring_pass(x, WORLD).backward(ones.to_sparse() if rank == 0 else ones)
    same(x.grad.to_dense(), ones)


def gradients_are_the_numerical_ones() -> None:
    """The derivative of the sum of all ranks' losses, by central differences in float64."""
    rank, ranks, _, _ = ring()
    k, v = (numbers(rank, 2, 2, seed=s).requires_grad_() for s in (1, 2))

    def loss(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            k, v = at.ring_pass_kv(k * v.sin(), v.t().tanh() * 2, WORLD)
        return loss_of(k, rank) + loss_of(v, rank + 3)

    def everybodys(k: torch.Tensor, v: torch.Tensor) -> float:
        with torch.no_grad():
            total = loss(k, v)
        dist.all_reduce(total)
        return float(total)

    loss(k, v).backward()
    step = 1e-6
    for owner in range(ranks):
        for which in range(2):
            for i in range(4):
                sides = []
                for shift in (step, -step):
                    moved = [k.detach().clone(), v.detach().clone()]
                    if rank == owner:
                        moved[which].view(-1)[i] += shift
                    sides.append(everybodys(*moved))
                if rank == owner:
                    found = float((k, v)[which].grad.view(-1)[i])
                    expected = (sides[0] - sides[1]) / (2 * step)
                    assert abs(found - expected) <= 1e-5 * (1 + abs(expected)), (found, expected)


def gradients_have_gradients() -> None:
    rank, ranks, _, _ = ring()
    x = numbers(rank, 3).requires_grad_()
    y = at.ring_pass(x, WORLD)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    torch.testing.assert_close(g.detach(), 3 * x.detach() ** 2)
    (g**2).sum().backward()  # what a rank gives back goes to the next one, and from there to this one
    torch.testing.assert_close(x.grad, 36 * x.detach() ** 3)
    if ranks == 1:
        return
    # The graphs of all ranks have to be alike: here the gradient of one is a constant.
    y = at.ring_pass(x, WORLD)
    loss = y.sum() if rank == 0 else (y**3).sum()
    words = ["whether tensor needs a gradient (rank 0: False, rank 1: True)"]
    refused(lambda: torch.autograd.grad(loss, x, create_graph=True), words)


def some_need_no_gradient() -> None:
    rank, ranks, _, following = ring()
    k, v = numbers(rank, 3, seed=1).requires_grad_(), numbers(rank, 4, seed=2)
    a, b = at.ring_pass_kv(k, v, WORLD)
    (a * b.sum()).sum().backward()
    same(k.grad, numbers(rank, 4, seed=2).sum().expand(3))
    assert v.grad is None
    # One output alone is used, on one rank.
    k, v = (numbers(rank, 3, seed=s).requires_grad_() for s in (1, 2))
    a, b = at.ring_pass_kv(k, v, WORLD)
    (a.sum() if rank == 0 else a.sum() + b.sum()).backward()
    if ranks > 1:
        same(v.grad, torch.full((3,), 0.0 if following == 0 else 1.0, dtype=torch.float64))
    # Whole numbers and bits have none.
    k, mask = numbers(rank, 3).requires_grad_(), numbers(rank, 3, dtype=torch.int64) > 0
    a, b = at.ring_pass_kv(k, mask, WORLD)
    assert not b.requires_grad
    torch.where(b, a, 0).sum().backward()
    same(k.grad, mask.double())
    with torch.no_grad():
        assert not at.ring_pass(k, WORLD).requires_grad


def compiled_code_steps_aside() -> None:
    rank, _, previous, following = ring()
    compiled = torch.compile(lambda x: 2 * at.ring_pass(x * 3, WORLD), backend="aot_eager")
    for n in (3, 5):
        x = numbers(rank, n).requires_grad_()
        y = compiled(x)
        torch.testing.assert_close(y.detach(), 6 * numbers(previous, n))
        y.sum().backward()
        same(x.grad, torch.full((n,), 6.0, dtype=torch.float64))


def timeouts_are_any_numbers() -> None:
    """Also with one rank."""
    rank, _, previous, _ = ring()
    for timeout in (np.float32(60), np.int64(60), fractions.Fraction(60), torch.tensor(60.0)):
        for mine in (timeout, timeout if rank == 0 else 60.0):
            same(at.ring_pass(numbers(rank, 3), WORLD, timeout=mine), numbers(previous, 3))
            at.check_ring(WORLD, timeout=mine)


# ---- what goes wrong


def wrong_on_one_rank() -> None:
    rank = dist.get_rank()
    x = numbers(0, 4, 3)
    q = torch.randn(1, 8, 2, 16)

    def one(*a: object, **b: object) -> object:
        return at.ring_pass(*(a or (x,)), group=WORLD, **b)

    def two(*a: object, **b: object) -> object:
        return at.ring_pass_kv(*(a or (x, x)), group=WORLD, **b)

    def check(**b: object) -> object:
        return at.check_ring(WORLD, **b)

    def attend() -> object:
        return at.ring_attention(q, q, q, group=WORLD)

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = dist.tensor.DTensor.from_local(x, mesh, run_check=False)
    needy = x.clone().requires_grad_()
    here = "whether tensor needs a gradient (rank 0: False, rank 1: True)"
    for wrong, right, words in (
        (lambda: one(None), one, ["ring_pass: tensor is a NoneType"]),
        (lambda: one([1.0]), one, ["tensor is a list"]),
        (lambda: one(x.to_sparse()), one, ["sparse"]),
        (lambda: one(x.to("meta")), one, ["tensor is on meta"]),
        (lambda: one(torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)), one, ["tensor is torch.qint8"]),
        (lambda: one(sharded), one, ["tensor is a DTensor", "to_local()"]),
        (lambda: two(x, sharded), two, ["v is a DTensor"]),
        (lambda: one(x.float()), one, ["the dtype of tensor (rank 0: 'torch.float64', rank 1: 'torch.float32')"]),
        (lambda: one(x[0]), one, ["the number of axes of tensor (rank 0: 2, rank 1: 1)"]),
        (lambda: one(needy), one, [here]),
        (lambda: one(x, timeout=-1), one, ["timeout is -1"]),
        (lambda: one(x, timeout="5"), one, ["timeout is '5'"]),
        (lambda: one(x, dim=1), one, ["'dim'"]),
        (lambda: at.ring_pass(x, WORLD, 3), one, ["positional"]),
        (lambda: at.ring_pass(group=WORLD), one, ["'tensor'"]),
        (lambda: torch.func.vmap(lambda y: at.ring_pass(y, WORLD))(x), one, ["inside torch.func.vmap"]),
        (lambda: two(x, None), two, ["ring_pass_kv: v is a NoneType"]),
        (lambda: two(x, x.long()), two, ["the dtype of v (rank 0: 'torch.float64', rank 1: 'torch.int64')"]),
        (lambda: two(x[0], x), two, ["the number of axes of k"]),
        (lambda: two(x, needy), two, ["whether v needs a gradient"]),
        (lambda: at.ring_pass_kv(x, x, WORLD, 3), two, ["positional"]),
        (lambda: check(timeout=0), check, ["check_ring: timeout is 0"]),
        (lambda: check(bytes=1), check, ["'bytes'"]),
        (one, two, ["the call (rank 0: 'ring_pass_kv', rank 1: 'ring_pass')"]),
        (two, check, ["the call (rank 0: 'check_ring', rank 1: 'ring_pass_kv')"]),
        (one, attend, ["the call (rank 0: 'forward', rank 1: 'ring_pass')"]),
        (attend, check, ["the call (rank 0: 'check_ring', rank 1: 'forward')"]),
    ):
        refused(wrong if rank == 1 else right, words)
        one(), two()  # as good as before

    def gradient(made: object) -> None:
        a = x.clone().requires_grad_()
        y = at.ring_pass(a, WORLD)
        torch.autograd.backward(y, made if rank == 1 else torch.ones_like(y))

    a = x.clone().requires_grad_()
    y = at.ring_pass(a, WORLD)
    words = ["the call (rank 0: 'ring_pass', rank 1: 'backward of ring_pass')"]
    refused(lambda: y.sum().backward() if rank == 1 else one(), words)
    gradient(torch.ones_like(x))
    check()


def what_is_no_group_is_refused_here() -> None:
    x = torch.ones(3)
    for call in (
        lambda: at.ring_pass(x, "world"),
        lambda: at.ring_pass_kv(x, x, 0),
        lambda: at.check_ring(dist.GroupMember.NON_GROUP_MEMBER),
    ):
        refused(call, ["group is"])


def two_threads_on_one_group() -> None:
    """One call gets a ConfigError, the other one a TransportError on all ranks. No tensor goes to the wrong call."""
    rank, ranks, previous, _ = ring()
    for turn, call in enumerate(
        (lambda: at.ring_pass(numbers(rank, 9), WORLD), lambda: at.check_ring(WORLD))
    ):
        call()
        outcomes: list[object] = []

        def attempt(call=call, outcomes=outcomes) -> None:
            try:
                outcomes.append(call())
            except annulus.Error as error:
                outcomes.append(error)

        done = f"two threads of rank 0 are back from call {turn}"
        if rank == 0:
            threads = [threading.Thread(target=attempt) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            tell(done)
            kinds = {type(x) for x in outcomes}
            assert kinds == {annulus.ConfigError, annulus.TransportError}, outcomes
            assert all("two threads of rank 0" in str(x) for x in outcomes), outcomes
        else:
            if rank == 1:
                hear(done)
            attempt()
            assert isinstance(outcomes[0], annulus.TransportError), outcomes
            assert outcomes[0].rank == 0 and "two threads of rank 0" in str(outcomes[0]), outcomes
        dist.barrier()
        call()  # over a ring that is made anew
    same(at.ring_pass(numbers(rank, 9), WORLD), numbers(previous, 9))


def groups_without_a_store_get_one() -> None:
    """Groups like those of the MPI backend, which this PyTorch lacks: their store is a placeholder."""
    rank, ranks, previous, _ = ring()
    group = dist.new_group()
    kept = dist.distributed_c10d._world.pg_map
    backend, _ = kept[group]
    kept[group] = backend, dist.PrefixStore("default_pg/", dist.Store())
    try:
        for _ in range(2):
            same(at.ring_pass(numbers(rank, 5), group), numbers(previous, 5))
            at.cleanup()
            dist.barrier()
        assert at.check_ring(group).ranks == ranks
    finally:
        kept[group] = backend, dist.distributed_c10d._get_default_store()
        at.cleanup()


# ---- reports


def reports_are_the_same_on_all_ranks() -> None:
    rank, ranks, _, _ = ring()
    group = dist.new_group(list(range(ranks))[::-1]) if ranks > 1 else WORLD
    report = at.check_ring(group, timeout=60)
    every: list = [None] * ranks
    dist.all_gather_object(every, report)
    assert all(each == report for each in every), every
    assert report.ranks == ranks == len(report.hosts) == len(report.devices)
    assert sorted(report.processes) == list(range(ranks))
    neighbours = {(r, (r + step) % ranks) for r in range(ranks) for step in (1, -1)} if ranks > 1 else set()
    assert [(link.source, link.target) for link in report.links] == sorted(neighbours)
    assert all(link.latency > 0 and link.bandwidth > 0 for link in report.links)
    text = str(report)
    assert f"Ring of {ranks} rank" in text and report.device_path in text
    assert text.count("MB/s") == len(report.links)
    if not torch.cuda.is_available():
        assert report.device_path.startswith("none ("), report.device_path
    # The group is as good as before.
    same(at.ring_pass(numbers(rank, 3), WORLD), numbers((rank - 1) % ranks, 3))


def damaged(change: str) -> None:
    """Wrong blocks are an error on all ranks, which names the sender and the receiver."""
    rank, ranks, _, _ = ring()
    at.check_ring(WORLD)
    transport = at.ring._registry._groups[WORLD.group_name].transport
    kept = {name: getattr(at.ring._report, name) for name in ("check_blocks", "exchange")}
    if change == "blocks" and rank == 1:
        found = {"forward_ok": False, "backward_ok": True, "detail": "forward: byte 7 of 4096 is 3, expected 4"}
        at.ring._report.check_blocks = lambda t: (kept["check_blocks"](t), found)[1]
    if change == "tensors" and rank == 1:

        def exchange(t: object, sends: list, receives: list) -> None:
            kept["exchange"](t, sends, receives)
            receives[0][1][5] = 77

        at.ring._report.exchange = exchange
    try:
        at.check_ring(WORLD)
    except annulus.TransportError as error:
        assert error.rank == 0 and "rank 1: " in str(error), error
        assert ("byte 7" if change == "blocks" else "received a wrong tensor from rank 0") in str(error), error
    else:
        raise AssertionError(f"damaged {change} went unnoticed")
    for name, function in kept.items():
        setattr(at.ring._report, name, function)
    at.check_ring(WORLD)
    assert transport is at.ring._registry._groups[WORLD.group_name].transport  # nothing was lost


# ---- threads


def rings_of_several_groups_are_made_at_once() -> None:
    """One thread for each group, in another order on every rank. The groups share a store, whose client does one
    operation at a time, also one that waits for other ranks."""
    rank, _, previous, _ = ring()
    for _ in range(3):
        groups = [dist.new_group() for _ in range(4)]
        found: list[torch.Tensor] = []
        dist.barrier()

        def call(group: object, found: list = found) -> None:
            found.append(at.ring_pass(numbers(rank, 3), group))

        threads = [threading.Thread(target=call, args=(g,)) for g in groups[rank:] + groups[:rank]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(groups)
        for x in found:
            same(x, numbers(previous, 3))


def threads_with_groups_of_their_own() -> None:
    """Eight threads: calls over four groups, a module without a group, monitoring, statistics, and functions that
    drop workspaces. All results are right."""
    rank, ranks, previous, _ = ring()
    groups = [dist.new_group() for _ in range(4)]
    torch.manual_seed(5)
    q, k, v, do = torch.randn(4, 1, 48, 2, 16).unbind()
    options = {"is_causal": True, "segment_lengths": [16, 48], "dilation_rates": [1, 3]}

    def both_ways(group: object, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        o = at.RingDilatedAttention(group=group, **options)(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, tensors[3])]

    whole = both_ways(None, [q, k, v, do])
    mine = [at.shard(x, group=WORLD) for x in (q, k, v, do)]
    wanted = [at.shard(x, group=WORLD) for x in whole]
    rounds = 15
    wrong: list[object] = []
    over = threading.Event()

    def right(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        for f, e in zip(found, expected):
            torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)

    def over_a_group(group: object) -> None:
        for i in range(rounds):
            right(both_ways(group, mine), wanted)
            same(at.ring_pass(numbers(rank, 3, seed=i), group), numbers(previous, 3, seed=i))
        at.check_ring(group)

    def alone() -> None:
        while not over.is_set():
            right(both_ways(None, [q, k, v, do]), whole)
            time.sleep(0.005)

    def watch() -> None:
        while not over.is_set():
            monitor.start(256)
            monitor.read()
            monitor.summary()
            monitor.totals()
            monitor.stop()
            time.sleep(0.005)  # the others need the interpreter, too

    def look() -> None:
        while not over.is_set():
            assert at.get_memory_info()["workspace_bytes"] >= 0
            time.sleep(0.005)

    def drop() -> None:
        while not over.is_set():
            at.clear_cache()
            time.sleep(0.005)

    def guarded(body: object, *arguments: object) -> None:
        try:
            body(*arguments)
        except BaseException as error:  # noqa: BLE001 (raised below)
            wrong.append(error)
            over.set()

    callers = [threading.Thread(target=guarded, args=(over_a_group, group)) for group in groups]
    others = [threading.Thread(target=guarded, args=(body,)) for body in (alone, watch, look, drop)]
    for thread in callers + others:
        thread.start()
    for thread in callers:
        thread.join()
    over.set()
    for thread in others:
        thread.join()
    if wrong:
        raise wrong[0]


if __name__ == "__main__":
    run_cases(globals())
