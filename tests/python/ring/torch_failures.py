"""Failures on one rank of a group or between its threads: cases of torch_worker.py."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist


def refused(call, words: list[str]) -> None:
    """Every rank gets a ConfigError with these words. A rank that waited in vain would get a TransportError."""
    try:
        call()
    except annulus.ConfigError as error:
        assert all(w in str(error) for w in words), error
    else:
        raise AssertionError(f"{words} on one rank went unnoticed")


def tell(what: str) -> None:
    """Tells the other ranks that an event has happened on this rank. A sleep would be too short on a busy machine."""
    dist.distributed_c10d._get_default_store().set(f"test/{what}", "")


def hear(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([f"test/{what}"])


class Undecodable:
    """Lengths from a file whose name cannot be encoded."""

    def __iter__(self):
        raise FileNotFoundError(2, "No such file", "lengths\udcff")


def errors_are_everybodys() -> None:
    """The call of one rank is wrong, or differs from those of the other ranks."""
    rank, tokens = dist.get_rank(), 8 * dist.get_world_size()
    q = torch.randn(1, 8, 2, 16)
    more = torch.randn(2, 8, 2, 16)
    longnet = {"segment_lengths": [16, 32], "dilation_rates": [1, 2]}
    at.ring_attention(
        q, q, q, group=dist.group.WORLD
    )  # the first call, which makes the ring, takes longer
    for wrong, words in (
        ({"v": q[:, :5]}, ["v is [1, 5, 2, 16]"]),
        # Right on each rank, but not the same.
        ({"is_causal": True}, ["is_causal (rank 0: False, rank 1: True)"]),
        ({"reproducible": True}, ["reproducible (rank 0: False, rank 1: True)"]),
        ({"window": (3, 0)}, ["window (rank 0: None, rank 1: [3, 0])"]),
        ({"q": q.half(), "k": q.half(), "v": q.half()}, ["torch.float32", "torch.float16"]),
        ({"q": more, "k": more, "v": more}, ["batch (rank 0: 1, rank 1: 2)"]),
        ({"k": q[:, :, :1], "v": q[:, :, :1]}, ["heads of k and v (rank 0: 2, rank 1: 1)"]),
        ({"scale": 0.5}, ["scale (rank 0: None, rank 1: 0.5)"]),
        ({"placement": "striped"}, ["placement (rank 0: 'contiguous', rank 1: 'striped')"]),
        (longnet, ["segment_lengths (rank 0: [], rank 1: [16, 32])", "dilation_rates", "pattern"]),
        ({"q": q.clone().requires_grad_()}, ["gradients are needed (rank 0: False, rank 1: True)"]),
        ({"sinks": torch.zeros(2)}, ["ranks disagree about whether sinks are passed"]),
        # What Python finds before the executor is asked.
        ({"sinks": torch.zeros(3)}, ["sinks is [3]: one number per head of q, [2], was expected"]),
        ({"sinks": 0.0}, ["sinks is a float"]),
        ({"q": q[0]}, ["q has 3 axes"]),
        ({"q": None}, ["q is a NoneType"]),
        ({"q": q.double(), "k": q.double(), "v": q.double()}, ["float64"]),
        ({"q": q.to_sparse()}, ["q is a torch.sparse_coo tensor"]),
        ({"placement": "zig-zag"}, ["zig-zag"]),
        ({"placement": ["zigzag"]}, ["placement is ['zigzag']"]),
        ({"scale": [1.0]}, ["scale is [1.0]"]),
        ({"scale": -1}, ["scale is -1: a number above 0"]),
        ({"is_causal": {}}, ["is_causal is {}"]),
        ({"window": (3, -2)}, ["window is (3, -2)"]),
        ({"window": (3, 1), "is_causal": True}, ["window is (3, 1) and is_causal is True"]),
        ({"schedule": "rign"}, ["rign"]),
        ({"scale": 1e39}, ["scale is 1e+39"]),
        ({"timeout": -1}, ["timeout"]),
        ({"timeout": float("inf")}, ["timeout is inf"]),
        ({"timeout": 1e300}, ["timeout is 1e+300"]),
        ({"n_global": 2**64}, ["n_global"]),
        ({"n_global": tokens + 1}, ["n_global"]),
        (longnet | {"segment_lengths": [16.5, 32]}, ["segment_lengths"]),
        (longnet | {"segment_lengths": [2**64, 32]}, ["segment_lengths", str(2**64)]),
        (longnet | {"segment_lengths": [[16], 32]}, ["segment_lengths"]),
        (longnet | {"segment_lengths": 16}, ["segment_lengths is 16"]),
        (longnet | {"segment_lengths": [16]}, ["dilation_rates"]),
        (longnet | {"segment_lengths": Undecodable()}, ["FileNotFoundError", "lengths"]),
        ({"pattern": "\u65e5" * 1000}, ["pattern is '\u65e5"]),
        ({"pattern": "x" + "\u65e5" * 1000}, ["pattern is 'x\u65e5"]),
        ({"pattern": "xx" + "\u65e5" * 1000}, ["pattern is 'xx\u65e5"]),
    ):
        for common in ({}, {"n_global": tokens}):
            call = {"q": q, "k": q, "v": q, "group": dist.group.WORLD, **common} | (
                wrong if rank == 1 else {}
            )
            refused(lambda: at.ring_attention(**call), words)
    n_global = tokens if rank == 1 else None
    refused(
        lambda: at.ring_attention(q, q, q, n_global=n_global, group=dist.group.WORLD),
        [f"n_global (rank 0: None, rank 1: {tokens})"],
    )
    refused(
        lambda: at.ring_attention(q, q, q, n_global=tokens + 1, group=dist.group.WORLD),
        [f"of {tokens + 1} tokens", str([8] * dist.get_world_size())],
    )
    at.ring_attention(q, q, q, group=dist.group.WORLD)  # still alive

    # What cannot be done is no ConfigError where it was tried; the ring goes on.
    try:
        if rank == 1:
            torch.func.grad(lambda x: at.ring_attention(x, x, x, group=dist.group.WORLD).sum())(q)
        else:
            at.ring_attention(q, q, q, group=dist.group.WORLD)
    except NotImplementedError:
        assert rank == 1
    except annulus.ConfigError as error:
        assert rank != 1 and "NotImplementedError" in str(error), error
    else:
        raise AssertionError("nobody complained")
    at.ring_attention(q, q, q, group=dist.group.WORLD)

    # Some go forward, others back.
    x = q.clone().requires_grad_()
    o = at.ring_attention(x, x, x, group=dist.group.WORLD)
    words = ["the call (rank 0: 'forward', rank 1: 'backward')"]
    refused(
        lambda: (
            o.sum().backward() if rank == 1 else at.ring_attention(x, x, x, group=dist.group.WORLD)
        ),
        words,
    )
    o = at.ring_attention(x, x, x, group=dist.group.WORLD)
    o.sum().backward()

    module = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, group=dist.group.WORLD)
    x = torch.randn(1, 8, 32)
    for wrong, words in (
        ({"need_weights": True}, ["need_weights"]),
        ({"attn_mask": torch.zeros(8, 8)}, ["attn_mask"]),
        ({"key_padding_mask": torch.zeros(1, 7, dtype=torch.bool)}, ["key_padding_mask"]),
        (
            {"key_padding_mask": torch.ones(1, 8, dtype=torch.int64)},
            ["key_padding_mask is torch.int64"],
        ),
        ({"query": torch.randn(1, 8, 31)}, ["query has 31 features"]),
        ({"query": torch.randn(1, 8, 32).double()}, ["RuntimeError"]),
    ):
        call = {"query": x, "key": x, "value": x, "need_weights": False}
        call |= wrong if rank == 1 else {}
        refused(lambda: module(**call), words)
    module(x, x, x, need_weights=False)


def arguments_are_everybodys() -> None:
    """Errors before the operator: unknown arguments, wrong types, gradients, shards."""
    rank, group = dist.get_rank(), dist.group.WORLD
    q = torch.randn(1, 8, 2, 16)
    x = torch.randn(1, 8, 32)
    plain = at.RingDilatedAttention(group=group)
    module = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, group=group)
    at.ring_attention(q, q, q, group=group)

    def attend() -> torch.Tensor:
        return at.ring_attention(q, q, q, group=group)

    def heads(**options: object) -> object:
        return module(x, x, x, need_weights=False, **options)

    def whole() -> torch.Tensor:
        return at.unshard(q, group=group)

    for wrong, right, words in (
        (
            lambda: at.ring_attention(q, q, q, group=group, segment_length=[16]),
            attend,
            "segment_length",
        ),
        (lambda: at.ring_attention(q, q, group=group), attend, "'v'"),
        (lambda: at.ring_attention(q, q, q, True, group=group), attend, "positional"),
        (lambda: at.ring_attention("q", "k", "v", group=group), attend, "q is a str"),
        (lambda: plain(q, q, q, causal=True), attend, "causal"),
        (lambda: plain(q, q), attend, "value"),
        (lambda: module(x, x, need_weights=False), heads, "value"),
        (lambda: heads(mask=None), heads, "'mask'"),
        (lambda: module(None, x, x, need_weights=False), heads, "NoneType"),
        (lambda: at.unshard(None, group=group), whole, "x is a NoneType"),
        (lambda: at.unshard(q, group=group, axis=1), whole, "'axis'"),
        (lambda: at.unshard(q, group=group, dim=4), whole, "dim is 4"),
        (lambda: at.unshard(q.to_sparse(), group=group), whole, "sparse"),
        (lambda: at.unshard(q, group=group, placement="zig"), whole, "'zig'"),
        (
            lambda: at.unshard(q, group=group, placement="striped"),
            whole,
            "placement (rank 0: 'contiguous', rank 1: 'striped')",
        ),
        (whole, attend, "the call (rank 0: 'forward', rank 1: 'unshard')"),
        (attend, whole, "the call (rank 0: 'unshard', rank 1: 'forward')"),
        # A mask becomes lengths, or columns of q and k and another scale: that is not what people passed.
        (
            lambda: heads(key_padding_mask=torch.zeros(1, 8, dtype=torch.bool)),
            heads,
            "about key_padding_mask (rank 0: 'none', rank 1: 'given, and new'): every",
        ),
    ):
        refused(wrong if rank == 1 else right, [words])
        attend(), heads(), whole()  # as good as before

    def gradient(made: torch.Tensor) -> None:
        a = q.clone().requires_grad_()
        at.ring_attention(a, a, a, group=group).backward(made if rank == 1 else torch.ones_like(q))

    sparse = torch.ones_like(q).to_sparse()
    words = ["gradient of the output is a torch.sparse_coo tensor"]
    refused(lambda: gradient(sparse), words)
    gradient(torch.ones_like(q).double())  # of whatever dtype: autograd sees to that

    # Sharding does not talk: what is wrong is an error here, and the others go on.
    if rank == 1:
        refused(lambda: at.shard(None, group=group), ["shard: x is a NoneType"])
    attend()

    # A sum of gradients takes sparse ones, too.
    a = q.clone().requires_grad_()
    summed = at.unshard(a, group=group)
    ones = torch.ones_like(summed)
    summed.backward(ones.to_sparse() if rank == 1 else ones)
    assert torch.equal(a.grad, torch.full_like(q, dist.get_world_size()))


def memory_is_everybodys() -> None:
    """If memory runs out on one rank, all ranks use less, or all raise OutOfMemory."""
    rank, group = dist.get_rank(), dist.group.WORLD
    q = torch.randn(1, 8, 2, 16)

    def call(unlucky_plans: int, **options) -> torch.Tensor:
        """Calls while this number of attempts of rank 1 find no memory."""
        at.clear_cache()
        left = [unlucky_plans if rank == 1 else 0]

        def admit(size: int, what: str) -> bool:
            left[0] -= what == "plans"
            return what != "plans" or left[0] < 0

        annulus._core.set_allocation_hook(admit)
        try:
            return at.ring_attention(q, q, q, group=group, **options)
        finally:
            annulus._core.set_allocation_hook(None)

    expected = call(0)
    # As asked, without caches, by heads, by the ring schedule.
    attempts = 4
    for plans in range(1, attempts):
        error = (call(plans) - expected).abs().max()
        assert error == 0 if plans < attempts - 1 else error < 1e-6, (plans, error)
        assert at.get_memory_info()["recovered_workspaces"] == 1
    try:
        call(attempts)
    except annulus.OutOfMemory as error:
        assert all(w in str(error) for w in ("tried in vain", "more ranks")), error
        assert rank == 1 or "rank 1 refused" in str(error), error
    else:
        raise AssertionError(f"rank {rank} has noticed nothing")
    half = call(attempts, allow_half=True)
    assert half.dtype == torch.float32 and 0 < (half - expected).abs().max() < 0.05
    assert torch.equal(call(0), expected)


def bad_luck_is_everybodys() -> None:
    """Errors on one rank that the caller has not caused: the environment, memory."""
    rank = dist.get_rank()
    q = torch.randn(1, 8, 2, 16)

    def call(**options) -> torch.Tensor:
        return at.ring_attention(q, q, q, group=dist.group.WORLD, **options)

    refused(lambda: call(scale=-1 if rank == 1 else 1), ["scale is -1"])
    # The environment is heard at the first executor of a process, the instruction set first.
    for name, value, words in (
        ("ANNULUS_ISA", "abacus", ["abacus"]),
        ("ANNULUS_THREADS", "0", ["ANNULUS_THREADS"]),
    ):
        before = os.environ.pop(name, None)
        if rank == 1:
            os.environ[name] = value
        dist.barrier()
        refused(call, words)
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    call()

    def fail(*_: object) -> None:
        raise MemoryError("no memory left")

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    kept = at.ring._group_ring.pattern_of
    if rank == 1:
        at.ring._group_ring.pattern_of = fail
    dist.barrier()
    refused(lambda: call(is_causal=True), ["no memory left"])
    at.ring._group_ring.pattern_of = kept
    call(is_causal=True)

    # When results are allocated, of a call that has its executor and of one that has not.
    kept = at._operator._result_like
    for options in ({"is_causal": True}, {"scale": 0.5}):
        if rank == 1:
            at._operator._result_like = no_memory
        refused(lambda: call(**options), ["can't allocate"])
        at._operator._result_like = kept
        call(**options)

    x = q.clone().requires_grad_()
    o = at.ring_attention(x, x, x, group=dist.group.WORLD)
    if rank == 1:
        at._operator._result_like = no_memory
    refused(lambda: o.sum().backward(), ["can't allocate"])
    at._operator._result_like = kept
    o = at.ring_attention(x, x, x, group=dist.group.WORLD)
    o.sum().backward()


def an_unexpected_error_ends_the_ring() -> None:
    """Between two agreements a rank cannot refuse a call. The other ranks must not wait nevertheless."""
    rank = dist.get_rank()
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=dist.group.WORLD)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    kept = at.ring._group_ring.claims_of
    if rank == 1:
        at.ring._group_ring.claims_of = fail
    try:
        at.ring_attention(q, q, q, group=dist.group.WORLD, is_causal=True)
    except (annulus.TransportError, RuntimeError) as error:
        assert "a bug" in str(error), error
        assert rank == 1 or error.rank == 1, error
    else:
        raise AssertionError("a bug on one rank went unnoticed")
    at.ring._group_ring.claims_of = kept
    dist.barrier()
    at.ring_attention(q, q, q, group=dist.group.WORLD, is_causal=True)


def closing_lets_messages_arrive() -> None:
    """A rank whose last call is over closes its ring while another still has to receive a message of that call."""
    rank = dist.get_rank()
    transport = at.ProcessGroupTransport(dist.group.WORLD, timeout=60)
    message = bytearray(b"last words")
    if rank == 0:
        finish_sends = transport.finish_sends

        def finish_after_telling() -> None:
            tell("rank 0 closes")
            finish_sends()

        transport.finish_sends = finish_after_telling
        transport.send(1, 5, memoryview(message)).wait()
        transport.close()
        tell("rank 0 closes")
    elif rank == 1:
        hear("rank 0 closes")
        found = bytearray(len(message))
        transport.receive(0, 5, memoryview(found)).wait()
        assert found == message
    transport.close()


def two_threads() -> None:
    """The calls of two threads have any order on other ranks. No rank gets rows of the wrong call."""
    rank = dist.get_rank()
    q = torch.randn(1, 256, 2, 16)
    expected = at.ring_attention(q, q, q, group=dist.group.WORLD)
    outcomes = []

    def call(late: float = 0.0) -> None:
        time.sleep(late)
        try:
            outcomes.append(at.ring_attention(q, q, q, group=dist.group.WORLD))
        except annulus.Error as error:
            outcomes.append(error)

    if rank == 0:  # both wait for rank 1: the first in the ring, the second would, too
        threads = [threading.Thread(target=call, args=(late,)) for late in (0.0, 0.5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tell("two threads of rank 0 are back")
        kinds = {type(x) for x in outcomes}
        assert kinds == {annulus.ConfigError, annulus.TransportError}, outcomes
        assert all("two threads of rank 0" in str(x) for x in outcomes), outcomes
    else:
        if rank == 1:
            hear("two threads of rank 0 are back")
        call()
        assert isinstance(outcomes[0], annulus.TransportError), outcomes
        assert outcomes[0].rank == 0 and "two threads of rank 0" in str(outcomes[0]), outcomes
    dist.barrier()
    assert torch.equal(at.ring_attention(q, q, q, group=dist.group.WORLD), expected)  # made anew


def rings_are_made_anew() -> None:
    """After a timeout, a cleanup, and a new process group."""
    rank = dist.get_rank()
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=dist.group.WORLD)
    # Without n_global the exchange of lengths fails, with it the construction of an executor.
    for options in ({}, {"n_global": 8 * dist.get_world_size(), "is_causal": True}):
        dist.barrier()
        if rank == 1:
            hear(f"rank 0 has waited in vain {options}")
        failed = False
        for timeout in (0.5, 120):  # whoever noticed first waits for the others in the second call
            try:
                at.ring_attention(q, q, q, group=dist.group.WORLD, timeout=timeout, **options)
            except annulus.TransportError:
                assert timeout == 0.5
                failed = True
                if rank == 0:
                    tell(f"rank 0 has waited in vain {options}")
        assert failed
    for _ in range(5):
        at.ring_attention(q, q, q, group=dist.group.WORLD)
        at.cleanup()
    # Nobody has to come to a call that one rank alone makes, and it ends in time.
    if rank == 0:
        begin = time.monotonic()
        try:
            at.ring_attention(q, q, q, group=dist.group.WORLD, timeout=1.0)
        except annulus.TransportError as error:
            assert error.rank == 1 and time.monotonic() - begin > 0.9, error
        else:
            raise AssertionError("a ring of one rank out of several worked")
    dist.barrier()
    at.ring_attention(q, q, q, group=dist.group.WORLD)


def forked_children_end() -> None:
    """A child has the connections of its parent, but not the threads that could close them."""
    q = torch.randn(1, 8, 2, 16)
    at.ring_attention(q, q, q, group=dist.group.WORLD)
    child = os.fork()
    if child == 0:
        gc.collect()
        at.ring_attention(q, q, q)  # alone
        os._exit(7)
    for _ in range(3000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 7, status
    at.ring_attention(q, q, q, group=dist.group.WORLD)


def death(how: str) -> None:
    """Rank 1 leaves. All others get a TransportError that names it, and another one at their next call. Unless rank 1
    is stopped, they get it long before their timeout, for which the test does not wait."""
    q = torch.randn(1, 600, 4, 64)
    at.ring_attention(q, q, q, group=dist.group.WORLD)
    for call in range(1000):
        if dist.get_rank() == 1 and call == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "silent":
                time.sleep(3600)  # the parent ends it
            at.ring._registry._groups[dist.group.WORLD.group_name].transport.abort("out of coffee")
            time.sleep(3600)
        timeout = 10.0 if how == "silent" else 3600.0
        try:
            at.ring_attention(q, q, q, group=dist.group.WORLD, timeout=timeout)
        except annulus.TransportError as error:
            assert error.rank == 1, error
            if how == "gave_up":
                assert "out of coffee" in str(error), error
            print(f"rank {dist.get_rank()} lost rank {error.rank} ({how})", flush=True)
            break
    else:
        raise AssertionError("nobody missed rank 1")
    for _ in range(2):
        try:
            at.ring_attention(q, q, q, group=dist.group.WORLD, timeout=4.0)
        except annulus.TransportError as error:
            assert error.rank == 1 and "The ring before this one failed" in str(error), error
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
