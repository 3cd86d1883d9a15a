"""CUDA streams and graphs: whose stream the work is on, who waits for whom, whose memory it is."""

from __future__ import annotations

import types
from typing import Any

import pytest
from cuda_support import LIMITS, PATTERNS, results, tensors
from reference import relative_rms

import annulus


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_work_goes_to_the_current_stream(cuda: types.ModuleType, passes: str) -> None:
    """Inputs that are made late and results that are used at once, on streams that nobody waits for."""
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
    annulus.torch.clear_cache()  # its workspace is not among what is dropped
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


def test_first_calls_on_a_side_stream_find_their_tables(cuda: types.ModuleType) -> None:
    """Forward alone, with tables of some megabytes that have just been made."""
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
