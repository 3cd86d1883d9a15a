"""annulus.RingCache on arrays of one process, and annulus.torch.RingCache without a group; between processes:
ring/test_ring_cache_processes.py. What a cache computes is tested in C++ (tests/kv_cache)."""

from __future__ import annotations

import threading

import annulus
import numpy as np
import pytest
from annulus import ConfigError
from support import on_ranks

RNG = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, **more: object
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of the last rows of a sequence."""
    start = k.shape[1] - q.shape[1]
    return annulus.attention(q, k, v, is_causal=True, query_start=start, return_lse=True, **more)


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


def test_a_prompt_in_chunks_then_tokens() -> None:
    q, k, v = normal(2, 50, 6, 24), normal(2, 50, 2, 24), normal(2, 50, 2, 24)
    cache = annulus.RingCache(batch=2, capacity=64, heads=6, kv_heads=2, head_dim=24, block=8)
    at = 0
    for size in (20, 13, 0, 1, 1, 15):
        o, lse = cache.step(q[:, at : at + size], k[:, at : at + size], v[:, at : at + size])
        at += size
        if size > 0:
            wanted_o, wanted_lse = expected(q[:, at - size : at], k[:, :at], v[:, :at])
            close(o, wanted_o)
            close(lse, wanted_lse)
        assert cache.lengths == [at, at]
    assert "2 entries of up to 64 tokens" in repr(cache)


def test_entries_have_lengths_of_their_own_and_start_anew() -> None:
    cache = annulus.RingCache(batch=2, capacity=32, heads=2, head_dim=16, window=(4, -1))
    k, v = normal(2, 9, 2, 16), normal(2, 9, 2, 16)
    k[1, 5:] = np.nan  # never read
    cache.append(k, v, lengths=[9, 5])
    assert cache.lengths == [9, 5]
    q = normal(2, 2, 2, 16)
    o, lse = cache.attend(q, lengths=[2, 1])
    close(o[:1], expected(q[:1], k[:1], v[:1], window=(4, -1))[0])
    close(o[1:, :1], expected(q[1:, :1], k[1:, :5], v[1:, :5], window=(4, -1))[0])
    assert (o[1, 1] == 0).all() and np.isneginf(lse[1, 1]).all()
    cache.truncate(0)
    cache.copy_entry(1, 0)
    assert cache.lengths == [5, 5]
    o, _ = cache.attend(np.stack([q[1], q[1]]), lengths=[1, 1])
    assert (o[0] == o[1]).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_threads(ranks: int) -> None:
    q, k, v = normal(1, 31, 4, 16), normal(1, 31, 2, 16), normal(1, 31, 2, 16)
    wanted, _ = expected(q[:, 30:], k, v)
    placement = annulus.Placement.zigzag(30, ranks)
    found: dict[int, tuple[np.ndarray, int, int]] = {}

    def rank_of(transport: annulus.Transport) -> None:
        rank = transport.rank()
        cache = annulus.RingCache(transport, capacity=40, heads=4, kv_heads=2, head_dim=16, block=4)
        own = placement.positions(rank)
        predicted = cache.predicted_append_bytes(30, placement=placement)
        before = transport.counters()["bytes_sent"]
        cache.append(k[:, own], v[:, own], placement=placement)
        sent = transport.counters()["bytes_sent"] - before
        o, _ = cache.step(q[:, 30:], k[:, 30:], v[:, 30:])
        found[rank] = (o, predicted, sent)

    threads = [
        threading.Thread(target=rank_of, args=(t,)) for t in annulus.make_in_process_ring(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == ranks
    for o, predicted, sent in found.values():
        close(o, wanted)
        assert (o == found[0][0]).all() and predicted == sent > 0


def test_mistakes_say_what_was_expected() -> None:
    cache = annulus.RingCache(capacity=8, heads=4, kv_heads=2, head_dim=16)
    k = normal(1, 3, 2, 16)
    for body, text in (
        (lambda: cache.append(k[:, :, :1], k), r"k is \[1, 3, 1, 16\], expected \[1, 3, 2, 16\]"),
        (lambda: cache.append(k.astype(np.float64), k), "k is float64"),
        (lambda: cache.append(normal(1, 9, 2, 16), normal(1, 9, 2, 16)), "has room for 8"),
        (lambda: cache.attend(normal(1, 1, 4, 16)), "append their keys first"),
        (lambda: cache.append(k, k, lengths=[4]), "entry 0 has 4 new tokens, expected 0 to the 3 tokens of this call"),
        (lambda: cache.append(k, k, lengths=[]), r"lengths is \[\], expected a whole number for each entry"),
        (lambda: cache.truncate(1), "entry is 1, expected 0 to 0"),
        (lambda: annulus.RingCache(capacity=0, heads=4, head_dim=16), "capacity is 0"),
        (lambda: annulus.RingCache(capacity=8, heads=4, kv_heads=3, head_dim=16), "kv_heads is 3"),
        (lambda: annulus.RingCache(capacity=8, heads=4, head_dim=16, device="tpu"), "device is 'tpu'"),
    ):
        with pytest.raises(ConfigError, match=text):
            body()
    with pytest.raises(TypeError, match="capacity is 'many': a whole number was expected"):
        annulus.RingCache(capacity="many", heads=4, head_dim=16)
    with pytest.raises(TypeError, match="a Placement was expected"):
        cache.append(k, k, placement="zigzag")
    cache.append(k, k)
    assert cache.lengths == [3]


def test_objects_of_another_class_on_one_rank_are_an_error_on_all() -> None:
    k, q = normal(1, 3, 2, 16), normal(1, 1, 4, 16)

    def body(transport: annulus.Transport) -> list[str]:
        def make(**wrong: object) -> annulus.RingCache:
            mine = wrong if transport.rank() == 1 else {}
            return annulus.RingCache(transport, capacity=8, heads=4, kv_heads=2, head_dim=16, **mine)

        cache = make()
        cache.append(k, k)
        found = []
        for call, text in (
            (lambda: make(causal="no"), "causal is 'no'"),
            (lambda **wrong: cache.append(k, k, **wrong), "stream is 's'"),
            (lambda **wrong: cache.attend(q, **wrong), "stream is 's'"),
            (lambda **wrong: cache.step(q, k[:, :1], k[:, :1], **wrong), "stream is 's'"),
        ):
            wrong = {"stream": "s"} if "stream" in text and transport.rank() == 1 else {}
            with pytest.raises(TypeError if transport.rank() == 1 else ConfigError, match=text):
                call(**wrong)
            found.append(text)
        cache.append(k, k)
        return found

    for found in on_ranks(annulus.make_in_process_ring(3), body):
        assert not isinstance(found, Exception) and len(found) == 4, found


def test_a_closed_cache_has_freed_its_memory() -> None:
    k, q = normal(1, 3, 2, 16), normal(1, 1, 4, 16)
    with annulus.RingCache(capacity=8, heads=4, kv_heads=2, head_dim=16) as cache:
        cache.append(k, k)
        transport = cache.transport
    for call in (lambda: cache.append(k, k), lambda: cache.attend(q), lambda: cache.lengths):
        with pytest.raises(ConfigError, match="this cache is closed"):
            call()
    assert repr(cache) == "<RingCache: closed>"
    cache.close()
    annulus.RingCache(transport, capacity=8, heads=4, head_dim=16)  # others may use it


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import annulus.torch as at

    cache = at.RingCache(capacity=16, heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    q, k, v = (torch.randn(1, 10, heads, 32).bfloat16() for heads in (4, 2, 2))
    o, lse = cache.step(q, k, v, return_lse=True)
    assert o.dtype is torch.bfloat16 and lse.dtype is torch.float32 and cache.lengths == [10]
    wanted = at.ring_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, wanted, rtol=2e-2, atol=1e-2)
    assert torch.equal(cache.attend(q[:, 9:]), cache.attend(q[:, 9:], lengths=[1]))
    k.requires_grad_()
    with pytest.raises(ConfigError, match="k requires a gradient, and a cache has none"):
        cache.append(k, v)
    with torch.no_grad():
        cache.append(k[:, :1], v[:, :1])
    assert cache.lengths == [11]
