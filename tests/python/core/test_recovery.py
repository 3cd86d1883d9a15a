"""When memory runs out: results are the same, or everybody gets an OutOfMemory that says what would fit."""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import annulus
import numpy as np
import pytest
from annulus import _core, monitor
from support import make_ring, on_ranks, problem

LONGNET = {"segment_lengths": [16, 64], "dilation_rates": [1, 4], "is_causal": True}


class Failing:
    """The allocations that fail, by their number; plans are allocations of 0 bytes."""

    def __init__(self) -> None:
        self.begin(lambda number, size, what: False)

    def begin(self, fails: Callable[[int, int, str], bool]) -> None:
        self.asked = self.failed = 0
        self._fails = fails

    def __call__(self, size: int, what: str) -> bool:
        fails = self._fails(self.asked, size, what)
        self.asked += 1
        self.failed += fails
        return not fails


@pytest.fixture
def failing() -> Iterator[Failing]:
    _core.drop_caches()  # those of other tests, too: memory that runs out would take them
    hook = Failing()
    _core.set_allocation_hook(hook)
    yield hook
    _core.set_allocation_hook(None)
    annulus.clear_cache()


def both(q: Any, k: Any, v: Any, do: Any, **options: Any) -> list[np.ndarray]:
    o, lse = annulus.attention(q, k, v, return_lse=True, **options)
    return [o, lse, *annulus.attention_backward(q, k, v, o, lse, do, **options)]


# Copies of shards fail on one rank alone, which is the ring's thread and not its caller's.
@pytest.mark.parametrize(
    ("ranks", "placement"), [(1, "contiguous"), (2, "zigzag"), (3, "striped")]
)
def test_attention_recovers_from_any_single_failure(
    failing: Failing, ranks: int, placement: str
) -> None:
    arrays = problem(tokens=66)
    options = {"ranks": ranks, "placement": placement, **LONGNET}
    expected = both(*arrays, **options)
    annulus.clear_cache()
    before = _core.memory_in_use()
    failing.begin(lambda number, size, what: False)
    both(*arrays, **options)
    for site in range(failing.asked):
        annulus.clear_cache()
        assert _core.memory_in_use() == before
        failing.begin(lambda number, size, what, site=site: number == site)
        for mine, theirs in zip(both(*arrays, **options), expected):
            np.testing.assert_array_equal(mine, theirs)
        assert failing.failed == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_recovers_from_any_failure_when_documents_change(failing: Failing, ranks: int) -> None:
    """A call with other documents takes the executor of the one before. Its memory may not be enough."""
    arrays = problem(tokens=66)
    options = {"ranks": ranks, "is_causal": True}
    annulus.clear_cache()
    expected = both(*arrays, **options)
    site = failed = 0
    while failed == site:
        annulus.clear_cache()
        failing.begin(lambda number, size, what: False)
        both(*arrays, **options, cu_seqlens=[0, 33, 66])
        failing.begin(lambda number, size, what, site=site: number == site)
        for mine, theirs in zip(both(*arrays, **options), expected):
            np.testing.assert_array_equal(mine, theirs)
        failed += failing.failed
        site += 1
    assert failed > 1


def test_attention_says_what_would_fit(failing: Failing) -> None:
    q, k, v, _ = problem()
    failing.begin(lambda number, size, what: size > 0)
    words = "tried in vain: caches dropped; 1 of 2 sequences"
    with pytest.raises(annulus.OutOfMemory, match=words) as info:
        annulus.attention(q, k, v, ranks=2)
    error = info.value
    assert isinstance(error, annulus.DeviceError)
    assert error.asked_bytes > 0 and error.needed_bytes > 0 and error.free_bytes > 0
    failing.begin(lambda number, size, what: False)
    annulus.attention(q, k, v, ranks=2)


def test_executor_says_how_it_recovered(failing: Failing) -> None:
    plans = iter([True, True])
    failing.begin(lambda number, size, what: what == "plans" and next(plans, False))
    ring = make_ring(16, 2, 8, batch=2)
    assert ring.recovery == "1 of 2 sequences at a time"
    assert make_ring(16, 2, 8, batch=2).recovery == ""
    failing.begin(lambda number, size, what: number == 0)
    with pytest.raises(annulus.OutOfMemory, match="plans"):
        make_ring(16, 2, 8, batch=2, recover=False)


def test_one_rank_without_memory_moves_all(failing: Failing) -> None:
    q, k, v, _ = problem(tokens=64, batch=2, heads=2)

    def body(transport: annulus.Transport) -> tuple[str, np.ndarray]:
        ring = annulus.RingAttention(
            annulus.Pattern.dense(2),
            annulus.Placement.contiguous(64, 2),
            transport=transport,
            batch=2,
            kv_heads=2,
            head_dim=16,
        )
        mine = slice(32 * transport.rank(), 32 * (transport.rank() + 1))
        return ring.recovery, ring.forward(q[:, mine], k[:, mine], v[:, mine])[0]

    expected = [o for _, o in on_ranks(annulus.make_in_process_ring(2), body)]
    # The first two plans of one thread, whichever comes first: one rank's.
    unlucky: list[int] = []

    def fails(number: int, size: int, what: str) -> bool:
        if what != "plans" or unlucky.count(threading.get_ident()) >= 2:
            return False
        if unlucky and unlucky[0] != threading.get_ident():
            return False
        unlucky.append(threading.get_ident())
        return True

    failing.begin(fails)
    results = on_ranks(annulus.make_in_process_ring(2), body)
    for (how, o), theirs in zip(results, expected):
        assert how == "1 of 2 sequences at a time"
        np.testing.assert_array_equal(o, theirs)


# ---- what the stream of events says of it


@pytest.fixture
def stream() -> Iterator[Callable[[str], list[monitor.Event]]]:
    """The events of a kind so far."""
    monitor.clear()
    monitor.start()
    yield lambda kind: [event for event in monitor.read()[0] if event.kind == kind]
    monitor.stop()
    monitor.clear()


def test_attempts_are_in_the_stream(failing: Failing, stream: Callable) -> None:
    """Of every rank, in their order, those that were in vain as failed; and what all of it was for."""
    for plans, attempts in (
        (1, ["drop caches"]),
        (2, ["drop caches", "split batch"]),
        (3, ["drop caches", "split batch", "split heads"]),
        (4, ["drop caches", "split batch", "split heads", "smaller working set"]),
        (5, ["drop caches", "split batch", "split heads", "smaller working set", "gave up"]),
    ):
        monitor.clear()
        asked = threading.local()

        def fails(number: int, size: int, what: str, plans: int = plans, asked=asked) -> bool:
            asked.plans = getattr(asked, "plans", 0) + (what == "plans")
            return what == "plans" and asked.plans <= plans

        def body(transport: annulus.Transport) -> str:
            ring = annulus.RingAttention(
                annulus.Pattern.dense(2),
                annulus.Placement.contiguous(64, 2),
                transport=transport,
                batch=2,
                head_dim=16,
                schedule="gather",
            )
            return ring.recovery

        failing.begin(fails)
        outcomes = on_ranks(annulus.make_in_process_ring(2), body)
        given_up = attempts[-1] == "gave up"
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, annulus.OutOfMemory if given_up else str), outcome
            mine = [event for event in stream("recovery") if event.rank == rank]
            assert [event.name for event in mine] == attempts
            failed = len(attempts) - 1
            assert [event.failed for event in mine] == [True] * failed + [False]
            assert monitor.summary()[rank]["recoveries"] == len(attempts)


def test_caches_are_in_the_stream(failing: Failing, stream: Callable) -> None:
    q, k, v, _ = problem()
    told = lambda: [(event.name, event.bytes > 0) for event in stream("cache")]  # noqa: E731
    for _ in range(2):
        annulus.attention(q, k, v)
    assert told() == [("miss", False), ("hit", True)]
    annulus.clear_cache()
    assert told()[2:] == [("clear", True)]
    capacity = 20
    for tokens in range(1, capacity + 3):
        annulus.attention(q[:, :tokens], k[:, :tokens], v[:, :tokens])
    assert annulus.cache_info()["size"] == capacity
    assert told()[3:].count(("evict", True)) == 2
    # What memory that ran out has cost.
    monitor.clear()
    failing.begin(lambda number, size, what: number == 0)
    annulus.attention(q, k, v, ranks=2)
    assert ("clear", True) in told() and stream("recovery")


def test_every_kind_of_event_is_seen(failing: Failing, stream: Callable) -> None:
    failing.begin(lambda number, size, what: number == 0)
    both(*problem(tokens=66), ranks=3, schedule="ring", **LONGNET)
    for kind in monitor.KINDS:
        assert stream(kind), kind


class TestTorch:
    @pytest.fixture
    def at(self, torch: types.ModuleType) -> Iterator[types.ModuleType]:
        import annulus.torch as at

        at.clear_cache()
        yield at
        at.clear_cache()

    @staticmethod
    def gradients(torch: types.ModuleType, at: types.ModuleType, **options: Any) -> list[Any]:
        q, k, v, do = (torch.from_numpy(x) for x in problem(kv_heads=4))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = at.ring_attention(*leaves, **LONGNET, **options)
        o.backward(do)
        return [o.detach(), *(x.grad for x in leaves)]

    @pytest.mark.parametrize("mix", ["full", "detached"])
    @pytest.mark.parametrize("rungs", [1, 2, 3, 4])
    def test_gradients_are_the_same(
        self,
        torch: types.ModuleType,
        at: types.ModuleType,
        failing: Failing,
        caplog: pytest.LogCaptureFixture,
        rungs: int,
        mix: str,
    ) -> None:
        if mix == "detached" and rungs > 2:
            rungs = 2  # heads stay together
        expected = self.gradients(torch, at, mix_gradient=mix)
        at.clear_cache()
        left = [rungs]

        def fails(number: int, size: int, what: str) -> bool:
            left[0] -= what == "plans"
            return what == "plans" and left[0] >= 0

        failing.begin(fails)
        with caplog.at_level(logging.WARNING, "annulus"):
            results = self.gradients(torch, at, mix_gradient=mix)
        assert all(torch.equal(a, b) for a, b in zip(results, expected))
        ways = {1: "caches dropped", 2: "1 of 2 sequences", 3: "2 of 4 K/V heads", 4: "1 of 4 K/V"}
        assert ways[rungs] in caplog.text
        assert at.get_memory_info()["recovered_workspaces"] == 1

    def test_half_is_used_where_it_is_allowed(
        self,
        torch: types.ModuleType,
        at: types.ModuleType,
        stream: Callable,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for mix in ("full", "detached"):
            expected = self.gradients(torch, at, mix_gradient=mix)
            at.clear_cache()
            # What only float32 needs here: an executor that was never made for it.
            half = _core.RingAttention

            def only_half(*args: Any, **options: Any) -> Any:
                if options["dtype"] == torch.float32:
                    raise annulus.OutOfMemory("not for float32")
                return half(*args, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(at.ring._executors, "RingAttention", only_half)
                with pytest.raises(annulus.OutOfMemory, match="not for float32"):
                    self.gradients(torch, at, mix_gradient=mix)
                with caplog.at_level(logging.WARNING, "annulus"):
                    results = self.gradients(torch, at, mix_gradient=mix, allow_half=True)
                assert "computed in bfloat16" in caplog.text
                told = [(event.kind, event.name, event.rank) for event in stream("recovery")]
                assert told == [("recovery", "half precision", 0)] * 2  # forward and backward
                monitor.clear()
                for mine, theirs in zip(results, expected):
                    assert mine.dtype == torch.float32
                    error = (mine - theirs).norm() / theirs.norm()
                    assert 0 < error < 0.02, error
            at.clear_cache()

    def test_results_are_worth_the_caches(
        self, torch: types.ModuleType, at: types.ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v, _ = (torch.from_numpy(x) for x in problem(kv_heads=4))
        expected = at.ring_attention(q, k, v)
        assert at.get_memory_info()["cached_workspaces"] == 1
        real = torch.empty_like
        errors = [RuntimeError("DefaultCPUAllocator: can't allocate memory")]

        def scarce(*args: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop()
            return real(*args, **options)

        monkeypatch.setattr(torch, "empty_like", scarce)
        assert torch.equal(at.ring_attention(q, k, v), expected)
        assert not errors

        def never(*args: Any, **options: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(torch, "empty_like", never)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            at.ring_attention(q, k, v)
        assert at.get_memory_info()["cached_workspaces"] == 0
