"""One rank of test_ring_cache_processes.py; runs under torchrun: ring_cache_worker.py <case>..."""

from __future__ import annotations

import datetime
import gc
import weakref

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from annulus.torch.ring import ProcessGroupTransport
from support.rank_cases import run_cases


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(**options: object) -> at.RingCache:
    usual = {"capacity": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "block": 4}
    return at.RingCache(dist.group.WORLD, **usual | options)


def replicated_tokens_give_every_rank_the_same_bits() -> None:
    q, k, v = (numbers(1, 40, heads, 16, seed=heads) for heads in (4, 2, 3))
    v = v[:, :, :2]
    with make() as cache:
        cache.append(k[:, :30], v[:, :30])
        for t in range(30, 40):
            o = cache.step(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
            wanted = at.ring_attention(q[:, : t + 1], k[:, : t + 1], v[:, : t + 1], is_causal=True)
            torch.testing.assert_close(o, wanted[:, t:], rtol=2e-5, atol=2e-6)
            others = [torch.empty_like(o) for _ in range(dist.get_world_size())]
            dist.all_gather(others, o)
            assert all(torch.equal(o, other) for other in others)


def sharded_tokens_go_to_the_ranks_that_keep_them() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (numbers(1, 33, heads, 16, seed=heads + 7) for heads in (4, 2, 2))
    placement = annulus.Placement.striped(33, ranks)
    own = placement.positions(rank)
    with make() as cache:
        transport = cache.core.transport
        before = transport.counters()["bytes_sent"]
        predicted = cache.core.predicted_append_bytes(33, placement=placement)
        cache.append(k[:, own], v[:, own], placement=placement)
        assert transport.counters()["bytes_sent"] - before == predicted
        o = cache.attend(q[:, own], placement=placement)
        wanted = at.ring_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(o, wanted[:, own], rtol=2e-5, atol=2e-6)


def mistakes_of_one_rank_are_errors_on_all() -> None:
    rank = dist.get_rank()
    k = numbers(1, 3, 2, 16, seed=5)
    wrong = k.requires_grad_() if rank == 0 else k
    with make() as cache:
        try:
            cache.append(wrong, k.detach())
            raise AssertionError("nobody has refused it")
        except annulus.ConfigError as error:
            assert "k requires a gradient" in str(error), error
        cache.append(k.detach(), k.detach())
        assert cache.lengths == [3]
        q = k.detach().repeat(1, 1, 2, 1)
        try:
            cache.step(q, k.detach(), k.detach(), **{"twice": True} if rank == 1 else {})
            raise AssertionError("nobody has refused it")
        except annulus.ConfigError as error:
            assert "twice" in str(error), error
    for name, value in (("device", "nonsense"), ("dtype", torch.int64), ("block", 0), ("timeout", -1.0)):
        try:
            make(**{name: value} if rank == 1 else {})
            raise AssertionError("nobody has refused it")
        except annulus.ConfigError as error:
            assert name in str(error), error


def closed_caches_have_freed_everything() -> None:
    """Also after long messages, which the library prepares once and keeps."""
    q, k = numbers(1, 60, 4, 16, seed=1), numbers(1, 60, 2, 16, seed=2)
    gc.disable()
    with make() as cache:
        cache.step(q, k, k)
        transport = weakref.ref(cache.core.transport)
    assert transport().failed and repr(cache) == "<RingCache: closed>"
    for call in (lambda c=cache: c.step(q, k, k), lambda c=cache: c.lengths):
        try:
            call()
            raise AssertionError("the cache is open")
        except annulus.ConfigError as error:
            assert "this cache is closed" in str(error), error
    cache.close()
    del cache, call
    assert transport() is None
    dropped = make()
    dropped.step(q, k, k)
    transport = weakref.ref(dropped.core.transport)
    dist.barrier()  # no rank is in its last call
    del dropped
    assert transport() is None
    gc.enable()


def dropped_transports_wait_briefly() -> None:
    """The garbage collector may drop them in any line of a program."""
    limits = []

    class Noting(ProcessGroupTransport):
        def finish_sends(self) -> None:
            limits.append(self.wait_limit)
            super().finish_sends()

    for closed in (True, False):
        transport = Noting(timeout=1000)
        dist.barrier()
        if closed:
            transport.close()
        del transport
    assert limits[0] >= datetime.timedelta(seconds=1000) > 100 * limits[1], limits


if __name__ == "__main__":
    run_cases(globals())
