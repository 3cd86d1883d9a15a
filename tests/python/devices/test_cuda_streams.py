"""CUDA streams and graphs: the stream of the work, waits between streams, and the stream that owns memory."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import annulus
import pytest
from support import make_ring
from support.cuda import LIMITS, PATTERNS, results, tensors
from support.reference import relative_rms


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_work_goes_to_the_current_stream(cuda: types.ModuleType, passes: str) -> None:
    """Inputs are ready late and results are used at once, on streams without other waits."""
    from annulus.torch import ring_attention

    inputs = tensors(cuda, 700)
    expected = results(ring_attention, *inputs)
    streams = [cuda.cuda.Stream() for _ in range(3)]
    cuda.cuda.synchronize()
    found = []
    for stream in (*streams, *streams):
        with cuda.cuda.stream(stream):
            copies = [cuda.full_like(x, float("nan")) for x in inputs]
            cuda.cuda._sleep(20_000_000)  # about 10 ms
            for copy, x in zip(copies, inputs):
                copy.copy_(x)
            if passes == "both":
                found.append([x * 1.0 for x in results(ring_attention, *copies)])
            else:
                found.append([ring_attention(*copies[:3]) * 1.0])
            del copies  # their memory may be used again on this stream
    cuda.cuda.synchronize()
    for each in found:
        assert all(relative_rms(a, b) < 2e-5 for a, b in zip(each, expected))


def test_calls_do_not_wait(cuda: types.ModuleType) -> None:
    from annulus.torch import ring_attention

    q, k, v, _ = tensors(cuda, 256)
    ring_attention(q, k, v)
    cuda.cuda.synchronize()
    cuda.cuda._sleep(400_000_000)  # about 0.2 s
    ring_attention(q, k, v)
    assert not cuda.cuda.current_stream().query()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "longnet_causal"])
def test_a_graph_can_be_captured(cuda: types.ModuleType, name: str, dtype: str) -> None:
    import annulus.torch
    from annulus.torch import ring_attention

    inputs = [x.to(getattr(cuda, dtype)) for x in tensors(cuda, 512)]
    static = [x.clone().requires_grad_() for x in inputs[:3]]
    grad = inputs[3].clone()

    def step() -> tuple[Any, ...]:
        o = ring_attention(*static, **PATTERNS[name])
        return o, *cuda.autograd.grad(o, static, grad)

    side = cuda.cuda.Stream()
    side.wait_stream(cuda.cuda.current_stream())
    with cuda.cuda.stream(side):
        step()
    cuda.cuda.current_stream().wait_stream(side)
    graph = cuda.cuda.CUDAGraph()
    with cuda.cuda.graph(graph):
        captured = step()
    annulus.torch.clear_cache()  # the workspace of the graph is kept
    for scale in (1.0, 0.5):
        with cuda.no_grad():
            for x, y in zip((*static, grad), inputs):
                x.copy_(y * scale)
        graph.replay()
        expected = results(ring_attention, *(x * scale for x in inputs), **PATTERNS[name])
        for a, b in zip(captured, expected):
            assert relative_rms(a, b) < LIMITS[dtype]


def test_capturing_a_first_call_is_refused(cuda: types.ModuleType) -> None:
    from annulus.torch import ring_attention

    q, k, v, _ = tensors(cuda, 77)
    graph = cuda.cuda.CUDAGraph()
    with pytest.raises(annulus.ConfigError, match="make it once before capturing"):
        with cuda.cuda.graph(graph):
            cuda.zeros(1, device="cuda")
            ring_attention(q, k, v)


def a_stream_of_ones_own() -> tuple[Any, int]:
    """CUDA's runtime, and a stream that the test destroys."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            runtime = ctypes.CDLL(name)
        except OSError:
            continue
        stream = ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        return runtime, stream.value
    pytest.skip("there is no CUDA runtime to make a stream with")


def test_a_stream_may_be_destroyed_after_a_call(cuda: types.ModuleType) -> None:
    """The executor is kept, but not the stream."""
    q, k, v, _ = (x.bfloat16() for x in tensors(cuda, 256))
    expected = annulus.attention(q, k, v)
    ring = make_ring(256, 4, 64, batch=2, dtype="bfloat16", device="cuda")
    out, lse = cuda.empty_like(q), cuda.empty(2, 256, 4, device="cuda")
    cuda.cuda.synchronize()
    for call in (
        lambda number: annulus.attention(q, k, v, out=out, stream=number),
        lambda number: ring.forward(q, k, v, out, lse, stream=number),
    ):
        runtime, stream = a_stream_of_ones_own()
        call(stream)
        assert runtime.cudaStreamSynchronize(ctypes.c_void_p(stream)) == 0
        assert runtime.cudaStreamDestroy(ctypes.c_void_p(stream)) == 0
        assert cuda.equal(out, expected)
        assert cuda.equal(annulus.attention(q, k, v), expected)
        assert cuda.equal(ring.forward(q, k, v)[0], expected)


def test_results_are_memory_of_the_stream_that_writes_them(cuda: types.ModuleType) -> None:
    q, k, v, _ = (x.bfloat16() for x in tensors(cuda, 1024))
    expected = annulus.attention(q, k, v)
    side = cuda.cuda.Stream()
    cuda.cuda.synchronize()
    for _ in range(5):
        late = cuda.full_like(q, 1.0)
        cuda.cuda._sleep(20_000_000)
        copy = late * 2.0  # reads it about 10 ms from now
        del late  # its memory may be reused on this stream only
        o = annulus.attention(q, k, v, stream=side.cuda_stream)
        cuda.cuda.synchronize()
        assert (copy == 2).all() and cuda.equal(o, expected)
        with cuda.cuda.stream(side):
            cuda.cuda._sleep(20_000_000)
        o = annulus.attention(q, k, v, stream=side.cuda_stream)
        del o  # before it is written
        other = cuda.full_like(q, 3.0)
        cuda.cuda.synchronize()
        assert (other == 3).all()


def test_every_threads_own_stream_is_not_the_ranks(cuda: types.ModuleType) -> None:
    q, k, v, _ = tensors(cuda, 64)
    expected = annulus.attention(q, k, v)
    cuda.cuda.synchronize()
    assert cuda.equal(annulus.attention(q, k, v, stream=2), expected)
    with pytest.raises(annulus.ConfigError, match="stream is 2, every thread's own one"):
        annulus.attention(q, k, v, ranks=2, stream=2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_graph_keeps_the_workspace_of_attention(cuda: types.ModuleType, ranks: int) -> None:
    q, k, v, _ = (x.bfloat16() for x in tensors(cuda, 333))
    options = {**PATTERNS["longnet"], "ranks": ranks}
    graph = cuda.cuda.CUDAGraph()
    with pytest.raises(annulus.ConfigError, match="make it once before capturing"):
        with cuda.cuda.graph(cuda.cuda.CUDAGraph()):
            cuda.zeros(1, device="cuda")
            annulus.attention(q, k, v, **options)
    expected = annulus.attention(q, k, v, **options)
    cuda.cuda.synchronize()
    with cuda.cuda.graph(graph):
        o = annulus.attention(q, k, v, **options)
    annulus.clear_cache()
    junk = [cuda.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]  # where it was
    graph.replay()
    cuda.cuda.synchronize()
    assert relative_rms(o, expected) < LIMITS["bfloat16"]
    del junk


def test_executors_may_go_while_their_stream_is_captured(cuda: types.ModuleType) -> None:
    q, k, v, _ = tensors(cuda, 128)
    side = cuda.cuda.Stream()
    cuda.cuda.synchronize()
    with cuda.cuda.stream(side):
        ring = make_ring(128, 4, 64, batch=2, device="cuda")
        ring.forward(q, k, v)
        annulus.attention(q, k, v)
    x = cuda.ones(4, device="cuda")
    graph = cuda.cuda.CUDAGraph()
    with cuda.cuda.graph(graph, stream=side):
        y = x + 1
        del ring
        annulus.clear_cache()
        z = y + 1
    graph.replay()
    cuda.cuda.synchronize()
    assert (z == 3).all()


def test_first_calls_on_a_side_stream_find_their_tables(cuda: types.ModuleType) -> None:
    """Forward only, with new tables of some megabytes."""
    side = cuda.cuda.Stream()
    for tokens in range(60_000, 60_008):
        q, k, v = (cuda.randn(1, tokens, 4, 8, device="cuda") for _ in range(3))
        options = {"segment_lengths": [8, 24], "dilation_rates": [1, 3]}
        cuda.cuda.synchronize()
        with cuda.cuda.stream(side):
            first = annulus.attention(q, k, v, **options)
            again = annulus.attention(q, k, v, **options)
        side.synchronize()
        assert cuda.equal(first, again)
        annulus.clear_cache()
