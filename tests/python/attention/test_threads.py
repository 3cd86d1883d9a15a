"""Eight threads of one process use the same modules at the same time: all results are right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
from annulus import monitor  # noqa: E402

ROUNDS = 100
LONGNET = {"segment_lengths": [16, 48], "dilation_rates": [1, 3], "is_causal": True}


def at_once(bodies: list[Callable[[int], None]], background: list[Callable[[int], None]] = ()) -> None:
    """Runs each function on its own thread: ROUNDS times, or, in the background, until the others are done. Raises the
    first error."""
    errors: list[BaseException] = []
    over = threading.Event()
    start = threading.Barrier(len(bodies) + len(background))

    def run(body: Callable[[int], None], until_over: bool) -> None:
        start.wait()
        try:
            number = 0
            while not over.is_set() if until_over else number < ROUNDS and not errors:
                body(number)
                number += 1
                if until_over:
                    time.sleep(0.001)  # others need the interpreter, too
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    calls = [threading.Thread(target=run, args=(body, False)) for body in bodies]
    others = [threading.Thread(target=run, args=(body, True)) for body in background]
    for thread in calls + others:
        thread.start()
    for thread in calls:
        thread.join()
    over.set()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for f, e in zip(found, expected):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


def both_ways(module: torch.nn.Module, x: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """The output, and gradients of the input and the parameters. They are not in .grad, which threads would share."""
    leaf = x.clone().requires_grad_()
    o = module(leaf, leaf, leaf, **options)
    o = o[0] if isinstance(o, tuple) else o
    return [o.detach(), *torch.autograd.grad(o.square().sum(), [leaf, *module.parameters()])]


def test_eight_threads_use_the_same_modules(monitoring_off_afterwards: None) -> None:
    torch.manual_seed(1)
    plain = at.RingDilatedAttention(**LONGNET)
    heads = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, **LONGNET)
    advanced = at.RingAdvancedDistributedDilatedAttention(
        embed_dim=32, num_heads=2, segment_lengths=[16, 48], dilation_rates=[1, 3]
    )
    # Of several shapes: workspaces are shared, taken away from each other and dropped.
    q = [torch.randn(1, tokens, 2, 16) for tokens in (48, 96, 70)]
    x = [torch.randn(2, tokens, 32) for tokens in (48, 96, 70)]
    options = {"need_weights": False}
    wanted = {
        "plain": [both_ways(plain, each) for each in q],
        "heads": [both_ways(heads, each, **options) for each in x],
        "advanced": [both_ways(advanced, each, **options) for each in x],
    }

    def use_plain(number: int) -> None:
        close(both_ways(plain, q[number % 3]), wanted["plain"][number % 3])

    def use_heads(number: int) -> None:
        close(both_ways(heads, x[number % 3], **options), wanted["heads"][number % 3])

    def use_advanced(number: int) -> None:
        close(both_ways(advanced, x[number % 3], **options), wanted["advanced"][number % 3])

    def look(number: int) -> None:
        assert at.get_memory_info()["workspace_bytes"] >= 0
        assert advanced.get_memory_info()["cached_workspaces"] >= 0
        assert annulus.cache_info() is not None

    def drop(number: int) -> None:
        at.clear_cache() if number % 2 else advanced.clear_cache(force=number % 4 == 0)

    def watch(number: int) -> None:
        monitor.start(64 + number % 3)
        monitor.read()
        monitor.totals()
        monitor.summary()
        if number % 5 == 0:
            monitor.stop()
            monitor.clear()

    at_once([use_plain, use_plain, use_heads, use_heads, use_advanced], [look, drop, watch])


def test_threads_on_one_ring_get_right_results_or_are_refused() -> None:
    """A call during another thread's call is refused. The ring of the other call is aborted, so it may fail, too."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = at.RingDilatedAttention(**LONGNET)
        q = torch.randn(1, 48, 2, 16)
        wanted = both_ways(module, q)
        module.group = dist.group.WORLD
        counts = {"right": 0, "refused": 0}

        def use(number: int) -> None:
            try:
                close(both_ways(module, q), wanted)
                counts["right"] += 1
            except (annulus.ConfigError, annulus.TransportError) as error:
                assert "two threads of rank 0" in str(error), error
                counts["refused"] += 1

        background = [lambda _: at.get_memory_info(), lambda _: at.clear_cache()]
        at_once([use] * 6, background)
        assert counts["right"] + counts["refused"] == 6 * ROUNDS
        close(both_ways(module, q), wanted)
    finally:
        at.cleanup()
        dist.destroy_process_group()


def test_cleanup_is_safe_at_any_time() -> None:
    """Several threads call cleanup while others make and use rings, which get right results or an error."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = [dist.group.WORLD, *(dist.new_group() for _ in range(3))]
        q = torch.randn(1, 48, 2, 16)
        module = at.RingDilatedAttention(**LONGNET)
        wanted = both_ways(module, q)

        def use(group: object) -> Callable[[int], None]:
            module = at.RingDilatedAttention(group=group, **LONGNET)

            def body(number: int) -> None:
                try:
                    close(both_ways(module, q), wanted)
                except annulus.TransportError as error:
                    assert "closed" in str(error), error

            return body

        at_once([use(group) for group in groups], [lambda _: at.cleanup()] * 4)
    finally:
        at.cleanup()
        dist.destroy_process_group()
