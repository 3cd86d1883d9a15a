"""CUDA devices: tensors stay in place, work goes to the caller's stream, and missing devices are reported."""

from __future__ import annotations

import concurrent.futures
import math
import time
import types
from typing import Any

import annulus
import numpy as np
import pytest
from support import HANG, make_ring
from support.cuda import LIMITS, PATTERNS, results, tensors
from support.foreign import CudaArray
from support.reference import relative_rms

COMPLAINT = annulus.cuda_complaint()


# ---- without a device


def test_devices_are_listed_or_there_is_a_reason() -> None:
    devices = annulus.cuda_devices()
    assert bool(devices) == (COMPLAINT == "")
    for index, device in enumerate(devices):
        assert device["device"] == f"cuda:{index}" and device["memory_bytes"] > 0
    if not annulus.cuda_built():
        assert "this build has no CUDA" in COMPLAINT


@pytest.mark.skipif(COMPLAINT == "", reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_missing_device_says_why(device: str) -> None:
    with pytest.raises(annulus.DeviceError) as caught:
        make_ring(16, 2, 16, device=device)
    index = device.partition(":")[2] or "0"
    assert f"device is cuda:{index}: {COMPLAINT}" in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", ""])
def test_names_of_no_device_are_refused(device: str) -> None:
    with pytest.raises(annulus.ConfigError, match="expected 'cpu', 'cuda' or 'cuda:1'"):
        make_ring(16, 2, 16, device=device)


def test_the_device_may_be_pytorchs(torch: types.ModuleType) -> None:
    assert make_ring(16, 2, 16, device=torch.device("cpu")).memory_info["device"] == "cpu"
    with pytest.raises(annulus.ConfigError, match="device is 'meta'"):
        make_ring(16, 2, 16, device=torch.device("meta"))


def test_a_stream_means_nothing_on_the_cpu() -> None:
    x = np.ones((1, 16, 2, 16), np.float32)
    ring = make_ring(16, 2, 16)
    assert np.array_equal(ring.forward(x, x, x, stream=1)[0], x)
    assert np.array_equal(annulus.attention(x, x, x, stream=1), x)
    ring.synchronize()


def test_arrays_are_asked_for_on_the_stream_that_uses_them() -> None:
    for stream, expected in ((None, 1), (0, 1), (12345, 12345)):
        q, k = CudaArray(), CudaArray()
        with pytest.raises(annulus.ConfigError, match="results on CUDA devices are made for PyTorch only"):
            annulus.attention(q, k, CudaArray(), stream=stream)
        assert q.streams == k.streams == [expected]


def test_mixed_devices_name_the_array_and_both_devices() -> None:
    cpu = np.zeros((1, 12, 2, 16), np.float32)
    with pytest.raises(annulus.ConfigError, match="k is on cuda:0, expected cpu like q"):
        annulus.attention(cpu, CudaArray(), cpu)
    with pytest.raises(annulus.ConfigError, match="v is on cpu, expected cuda:0 like q"):
        annulus.attention(CudaArray(), CudaArray(), cpu)
    with pytest.raises(annulus.ConfigError, match="out is on cuda:0, expected cpu like q"):
        annulus.attention(cpu, cpu, cpu, out=CudaArray())
    with pytest.raises(annulus.ConfigError, match="v is on cuda:0, expected cpu like the executor"):
        make_ring(12, 2, 16).forward(cpu, cpu, CudaArray())


# ---- with one


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", PATTERNS)
def test_results_are_the_references(
    cuda: types.ModuleType, name: str, kv_heads: int, dtype: str
) -> None:
    from annulus.torch import ring_attention

    inputs = [x.to(getattr(cuda, dtype)) for x in tensors(cuda, 331, kv_heads=kv_heads)]
    found = results(ring_attention, *inputs, **PATTERNS[name])
    assert all(x.is_cuda and x.dtype == inputs[0].dtype for x in found)
    expected = results(ring_attention, *(x.double() for x in inputs), **PATTERNS[name])
    for a, b in zip(found, expected):
        assert relative_rms(a, b) < LIMITS[dtype]


HEAD_DIMS = (1, 2, 3, 7, 20, 33, 65, 80, 96, 100, 112, 160, 192, 250, 256, 257, 384, 511, 512)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_any_head_dim_is_the_references(cuda: types.ModuleType, dim: int, dtype: str) -> None:
    from annulus.torch import ring_attention

    inputs = [x.to(getattr(cuda, dtype)) for x in tensors(cuda, 331, kv_heads=2, dim=dim)]
    for name in ("dense", "longnet_causal", "window_longnet"):
        for mix in ("full", "detached"):
            options = {**PATTERNS[name], "mix_gradient": mix}
            if name == "longnet_causal":
                options["sinks"] = cuda.linspace(-1, 2, 4, device="cuda")
            found = results(ring_attention, *inputs, **options)
            expected = results(ring_attention, *(x.double() for x in inputs), **options)
            for a, b in zip(found, expected):
                assert relative_rms(a, b) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("dim", [1, 20, 33, 64, 100, 128, 250, 256, 300, 512])
def test_rows_may_begin_anywhere_and_nothing_behind_them_is_read(
    cuda: types.ModuleType, dim: int, dtype: str
) -> None:
    from annulus.torch import ring_attention

    inputs = [x.to(getattr(cuda, dtype)) for x in tensors(cuda, 150, kv_heads=2, dim=dim)]
    among_nans = []
    for x in inputs:
        wide = x.new_full((*x.shape[:-1], dim + 3), math.nan)
        among_nans.append(wide[..., 1 : 1 + dim].copy_(x))
    for name in ("causal", "longnet"):
        expected = results(ring_attention, *(x.double() for x in inputs), **PATTERNS[name])
        q, k, v, do = among_nans
        o, lse = ring_attention(q, k, v, return_lse=True, **PATTERNS[name])
        assert relative_rms(o, expected[0]) < LIMITS[dtype]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        found = cuda.autograd.grad(ring_attention(*leaves, **PATTERNS[name]), leaves, do)
        for x in leaves:
            x.requires_grad_(False)
        for a, b in zip(found, expected[1:]):
            assert relative_rms(a, b) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mix", ["full", "detached"])
@pytest.mark.parametrize("name", PATTERNS)
def test_sinks_and_their_gradients_are_the_references(
    cuda: types.ModuleType, name: str, mix: str, dtype: str
) -> None:
    from annulus.torch import ring_attention

    options = {**PATTERNS[name], "mix_gradient": mix}
    for dim in (64, 128, 20, 320):
        inputs = [x.to(getattr(cuda, dtype)) for x in tensors(cuda, 331, kv_heads=2, dim=dim)]
        values = cuda.tensor([1.0, -2.0, 4.0, -math.inf], device="cuda")
        found, expected = [], []
        for out, given in ((found, inputs), (expected, [x.double() for x in inputs])):
            sinks = values.clone().requires_grad_()
            out += results(ring_attention, *given, sinks=sinks, **options)
            out.append(sinks.grad)
        for a, b in zip(found, expected):
            assert relative_rms(a, b) < LIMITS[dtype]
        assert found[-1][3] == 0
        again = values.clone().requires_grad_()  # always the same bits
        results(ring_attention, *inputs, sinks=again, **options)
        assert cuda.equal(again.grad, found[-1])


@pytest.mark.parametrize("dtype", LIMITS)
def test_rows_without_keys_have_their_sink_as_log_sum_exp(
    cuda: types.ModuleType, dtype: str
) -> None:
    from annulus.torch import ring_attention

    q, k, v, _ = (x.to(getattr(cuda, dtype)) for x in tensors(cuda, 300))
    sinks = cuda.tensor([0.5, -1.0, -math.inf, math.nan], device="cuda")
    options = {"segment_lengths": [300], "dilation_rates": [2], "return_lse": True}
    o, lse = ring_attention(q, k, v, sinks=sinks, **options)
    for head in range(4):
        empty = cuda.arange(300, device="cuda") % 2 != head // 2
        if head == 3:
            assert bool(o[:, :, head].isnan().all()) and bool(lse[:, :, head].isnan().all())
        else:
            assert bool((o[:, empty, head] == 0).all())
            assert bool((lse[:, empty, head] == sinks[head]).all())
            assert bool(lse[:, ~empty, head].isfinite().all())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("dim", [64, 128])
def test_keys_outside_of_the_window_change_no_bit(
    cuda: types.ModuleType, dim: int, dtype: str
) -> None:
    """However large its values are, or if they are not finite."""
    from annulus.torch import ring_attention

    q, k, v, _ = (x.to(getattr(cuda, dtype)) for x in tensors(cuda, 1000, dim=dim))
    for window in ((100, 0), (40, 70)):
        o, lse = ring_attention(q, k, v, window=window, return_lse=True)
        for value in (1e4, math.nan, math.inf):
            changed = [k.clone(), v.clone()]
            for x in changed:
                x[:, 500] = value
            found, found_lse = ring_attention(q, *changed, window=window, return_lse=True)
            first, last = 500 - window[1], 500 + window[0]
            for a, b in ((found, o), (found_lse, lse)):
                assert cuda.equal(a[:, :first], b[:, :first])
                assert cuda.equal(a[:, last + 1 :], b[:, last + 1 :])
            if not math.isfinite(value):
                assert not found[:, first : last + 1].isfinite().any()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["dense", "causal", "longnet", "window"])
def test_rows_with_nothing_but_minus_infinity_are_zero_whatever_the_values(
    cuda: types.ModuleType, name: str, dim: int, dtype: str
) -> None:
    from annulus.torch import ring_attention

    q, k, v, _ = (x.to(getattr(cuda, dtype)) for x in tensors(cuda, 331, dim=dim))
    q = q.abs() + 1
    k[:, :, 0, 0] = -math.inf
    v[:, 5, 0, 3] = math.nan
    v[:, 300, 0, 7] = math.inf
    o, lse = ring_attention(q, k, v, return_lse=True, **PATTERNS[name])
    assert (lse[:, :, 0] == -math.inf).all()
    assert (o[:, :, 0] == 0).all()
    assert o[:, :, 1:].isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["dense", "causal"])
def test_scores_may_grow_or_fall_from_tile_to_tile(
    cuda: types.ModuleType, name: str, dim: int, dtype: str
) -> None:
    """Hopper kernels take a row's highest score from the first tile, and must notice higher ones later."""
    from annulus.torch import ring_attention

    q, k, v, _ = tensors(cuda, 1000, dim=dim)
    rising = cuda.linspace(0.1, 6, 1000, device="cuda")
    for scale in (rising, rising.flip(0)):
        scaled = (q.abs() + 0.5, k.abs() * scale[:, None, None], v)
        inputs = [x.to(getattr(cuda, dtype)) for x in scaled]
        o, lse = ring_attention(*inputs, return_lse=True, **PATTERNS[name])
        expected, expected_lse = ring_attention(
            *(x.double() for x in inputs), return_lse=True, **PATTERNS[name]
        )
        assert relative_rms(o, expected) < LIMITS[dtype]
        assert relative_rms(lse, expected_lse) < 1e-4


@pytest.mark.parametrize("dtype", LIMITS)
def test_detached_mixing_is_the_references(cuda: types.ModuleType, dtype: str) -> None:
    from annulus.torch import ring_attention

    options = {**PATTERNS["longnet_causal"], "mix_gradient": "detached"}
    inputs = [x.to(getattr(cuda, dtype)) for x in tensors(cuda, 331)]
    found = results(ring_attention, *inputs, **options)
    expected = results(ring_attention, *(x.double() for x in inputs), **options)
    for a, b in zip(found, expected):
        assert relative_rms(a, b) < LIMITS[dtype]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_deterministic_gives_the_same_bits_every_time(
    cuda: types.ModuleType, name: str, dim: int
) -> None:
    from annulus.torch import ring_attention

    # Many tiles of keys for every query, so that their sums could come in another order.
    inputs = [x.bfloat16() for x in tensors(cuda, 3001, heads=8, kv_heads=2, dim=dim)]
    options = {**PATTERNS[name], "deterministic": True}
    if len(options.get("segment_lengths", ())) == 2:
        options["segment_lengths"] = [640, 2560]
    expected = results(ring_attention, *inputs, **{**options, "deterministic": False})
    first = results(ring_attention, *inputs, **options)
    for a, b in zip(first, expected):
        assert relative_rms(a, b) < LIMITS["bfloat16"]
    for _ in range(5):
        again = results(ring_attention, *inputs, **options)
        assert all(cuda.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_strides_are_used_in_place(cuda: types.ModuleType, dtype: str) -> None:
    from annulus.torch import ring_attention

    q, k, v, do = (x.to(getattr(cuda, dtype)) for x in tensors(cuda, 200))
    expected = results(ring_attention, q, k, v, do)
    packed = cuda.stack([q, k, v], 2)  # as of one projection
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    odd = [cuda.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]  # rows at 2 or 4 bytes
    last = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]  # copied
    for views in (packed.unbind(2), heads_first, odd, last):
        leaves = [x.detach().requires_grad_() for x in views]
        o = ring_attention(*leaves)
        gradients = cuda.autograd.grad(o, leaves, do)
        for a, b in zip((o, *gradients), expected):
            assert relative_rms(a, b) < LIMITS[dtype]


def test_executors_and_attention_take_cuda_arrays(cuda: types.ModuleType) -> None:
    q, k, v, do = tensors(cuda, 100, kv_heads=2)
    ring = make_ring(100, 4, 64, batch=2, kv_heads=2, device="cuda:0")
    out = cuda.empty_like(q)
    o, lse = ring.forward(q, k, v, out)
    assert o is out and lse.is_cuda and lse.dtype == cuda.float32
    host = [x.cpu() for x in (q, k, v, do)]
    expected, expected_lse = annulus.attention(*host[:3], return_lse=True)
    assert relative_rms(o, expected) < 2e-5 and relative_rms(lse, expected_lse) < 2e-5
    found, found_lse = annulus.attention(q, k, v, return_lse=True)
    assert cuda.equal(found, o) and cuda.equal(found_lse, lse)
    assert cuda.equal(annulus.attention(q, k, v), o)
    gradients = annulus.attention_backward(q, k, v, o, lse, do)
    for a, b, c in zip(
        gradients,
        ring.backward(q, k, v, o, lse, do),
        annulus.attention_backward(*host[:3], expected, expected_lse, host[3]),
    ):
        assert a.is_cuda and relative_rms(a, c) < 2e-5 and relative_rms(b, c) < 2e-5


def test_virtual_ranks_share_a_device(cuda: types.ModuleType) -> None:
    q, k, v, do = tensors(cuda, 260)
    expected, lse = annulus.attention(q, k, v, is_causal=True, return_lse=True)
    wanted = annulus.attention_backward(q, k, v, expected, lse, do, is_causal=True)
    for placement in ("contiguous", "striped"):
        split = {"ranks": 3, "placement": placement, "is_causal": True}
        assert relative_rms(annulus.attention(q, k, v, **split), expected) < 2e-5
        found = annulus.attention_backward(q, k, v, expected, lse, do, **split)
        assert all(relative_rms(a, b) < 2e-5 for a, b in zip(found, wanted))
    with pytest.raises(annulus.ConfigError, match="'zigzag' are no views"):
        annulus.attention(q, k, v, ranks=3, placement="zigzag")


def test_tensors_of_two_devices_are_refused(cuda: types.ModuleType) -> None:
    from annulus.torch import ring_attention

    q, k, v, _ = tensors(cuda, 32)
    with pytest.raises(annulus.ConfigError, match="k is on cpu, but q is on cuda:0"):
        ring_attention(q, k.cpu(), v)
    ring = make_ring(32, 4, 64, batch=2, device="cuda")
    with pytest.raises(annulus.ConfigError, match="v is on cpu, expected cuda:0 like the executor"):
        ring.forward(q, k, v.cpu())
    with pytest.raises(annulus.ConfigError, match="lse is on cpu, expected cuda:0"):
        ring.forward(q, k, v, None, cuda.empty(2, 32, 4))
    ring.forward(q, k, v)  # the executor still works


def test_pytorch_counts_the_workspace(cuda: types.ModuleType) -> None:
    import annulus.torch
    from annulus.torch import ring_attention

    annulus.torch.clear_cache()
    q, k, v, _ = (x.bfloat16() for x in tensors(cuda, 2048))
    q.requires_grad_()
    before = cuda.cuda.memory_allocated()
    o = ring_attention(q, k, v)
    cuda.cuda.synchronize()
    info = annulus.torch.get_memory_info()
    assert info["device"] == "cuda:0" and info["state_bytes"] > 0
    total = cuda.cuda.get_device_properties(0).total_memory
    assert info["workspace_bytes"] / total < info["device_utilization"] < 1.0
    held = cuda.cuda.memory_allocated() - before
    assert held >= info["workspace_bytes"]
    annulus.torch.clear_cache()
    assert cuda.cuda.memory_allocated() - before <= held - info["state_bytes"]
    del o


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_info_is_what_was_allocated(cuda: types.ModuleType, dtype: str, ranks: int) -> None:
    def requested() -> int:
        return cuda.cuda.memory_stats()["requested_bytes.all.current"]

    cuda.cuda.synchronize()
    before = requested()

    def make(transport: annulus.Transport) -> annulus.RingAttention:
        return annulus.RingAttention(
            annulus.Pattern.longnet(4, [256, 1024], [1, 2], causal=True),
            annulus.Placement.striped(4000, ranks),
            transport=transport,
            head_dim=64,
            dtype=dtype,
            device="cuda",
        )

    with concurrent.futures.ThreadPoolExecutor(ranks) as threads:
        rings = list(threads.map(make, annulus.make_in_process_ring(ranks)))
    held = requested() - before
    counted = sum(ring.memory_info["workspace_bytes"] for ring in rings)
    # Each of a few dozen pieces may begin at a multiple of 256 bytes; what the host keeps is counted, too.
    assert abs(held - counted) <= 0.01 * counted + 20_000 * ranks


def test_what_pytorch_keeps_for_later_is_no_shortage(cuda: types.ModuleType) -> None:
    from annulus.torch import clear_cache, ring_attention
    from annulus.torch.ring import _registry

    clear_cache()
    cuda.cuda.empty_cache()
    most = cuda.empty(int(0.95 * cuda.cuda.mem_get_info()[0]), dtype=cuda.uint8, device="cuda")
    del most  # PyTorch keeps it
    time.sleep(0.2)  # the memory report is up to a tenth of a second old
    assert cuda.cuda.mem_get_info()[0] < 0.1 * cuda.cuda.mem_get_info()[1]
    lengths = range(64, 64 + 8)
    for tokens in lengths:
        q, k, v, _ = tensors(cuda, tokens)
        ring_attention(q, k, v)
    assert len(_registry._local.pool.executors()) == len(lengths)
    cuda.cuda.empty_cache()


def test_too_much_memory_is_a_device_error_that_says_for_what(cuda: types.ModuleType) -> None:
    _, total = cuda.cuda.mem_get_info()
    cuda.cuda.set_per_process_memory_fraction((cuda.cuda.memory_reserved() + 2**28) / total)
    try:
        with pytest.raises(annulus.DeviceError, match="out of memory: [0-9]+ bytes for fp32 accumulators"):
            annulus.RingAttention(
                annulus.Pattern.longnet(4, [64], [1]),
                annulus.Placement.contiguous(1_000_000, 1),
                transport=annulus.make_in_process_ring(1)[0],
                head_dim=64,
                dtype="bfloat16",
                device="cuda",
                max_qkv_elements=2**60,
            )
    finally:
        cuda.cuda.set_per_process_memory_fraction(1.0)


def test_autocast_says_the_dtype(cuda: types.ModuleType) -> None:
    from annulus.torch import ring_attention

    q, k, v, _ = tensors(cuda, 64)
    with cuda.autocast("cuda", dtype=cuda.bfloat16):
        assert ring_attention(q, k, v).dtype == cuda.bfloat16
    with cuda.autocast("cpu", dtype=cuda.bfloat16):
        assert ring_attention(q, k, v).dtype == cuda.float32


def test_compiles_without_breaks(cuda: types.ModuleType) -> None:
    from annulus.torch import ring_attention

    def layer(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q * 1.5, k, v, **PATTERNS["longnet_causal"]).sin()

    inputs = tensors(cuda, 192)
    compiled = cuda.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(results(compiled, *inputs), results(layer, *inputs)):
        assert relative_rms(a, b) < 2e-5


def test_the_operators_pass_pytorchs_own_checks(cuda: types.ModuleType) -> None:
    import annulus.torch as at

    q, k, v, _ = tensors(cuda, 48)
    at._fast_path._calls.clear()
    at.ring_attention(q.requires_grad_(), k, v, is_causal=True)
    (call,) = at._fast_path._calls.values()
    cuda.library.opcheck(cuda.ops.annulus.attend, (q, k, v, None, None, call.config.text))


def test_checkpointing_computes_the_same(cuda: types.ModuleType) -> None:
    from annulus.torch import ring_attention
    from torch.utils.checkpoint import checkpoint

    inputs = tensors(cuda, 192)

    def kept(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(lambda *x: ring_attention(*x, is_causal=True), q, k, v, use_reentrant=False)

    for a, b in zip(results(kept, *inputs), results(ring_attention, *inputs, is_causal=True)):
        assert relative_rms(a, b) < 2e-5


@pytest.mark.parametrize("masked", [False, True])
def test_the_module_agrees_with_the_cpu(cuda: types.ModuleType, masked: bool) -> None:
    from annulus.torch import RingMultiheadDilatedAttention

    module = RingMultiheadDilatedAttention(128, 4, batch_first=True)
    x = cuda.randn(2, 60, 128)
    mask = None
    if masked:
        mask = cuda.zeros(2, 60, dtype=cuda.bool)
        mask[1, 40:] = True
    expected, weights = module(x, x, x, key_padding_mask=mask, is_causal=True)
    expected.sum().backward()
    gradient = module.in_proj_weight.grad.clone()
    module.zero_grad()
    module.cuda()
    y = x.cuda()
    found, found_weights = module(
        y, y, y, key_padding_mask=None if mask is None else mask.cuda(), is_causal=True
    )
    found.sum().backward()
    assert found.is_cuda and relative_rms(found, expected) < 1e-4
    assert relative_rms(found_weights, weights) < 1e-4
    assert relative_rms(module.in_proj_weight.grad, gradient) < 1e-3


def test_padding_is_lengths(cuda: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is read when it is new or has changed; another read would wait for the device."""
    from annulus.torch import _functional, ring_attention

    q, k, v = (x.cuda() for x in tensors(cuda, 192)[:3])
    keys = cuda.arange(192)
    mask = ((keys < 5) | (keys > 150)).expand(q.shape[0], -1).contiguous().cuda()
    expected = ring_attention(q[:, :], k[:, 5:151], v[:, 5:151])
    widened = _functional.widened
    for kind in (mask, cuda.zeros(mask.shape, device="cuda").masked_fill(mask, -cuda.inf)):
        monkeypatch.setattr(_functional, "widened", None)
        o = ring_attention(q, k, v, key_padding_mask=kind)
        cuda.cuda.set_sync_debug_mode("error")
        try:
            again = ring_attention(q, k, v, key_padding_mask=kind[:])
        finally:
            cuda.cuda.set_sync_debug_mode("default")
        assert cuda.equal(o, again) and relative_rms(o, expected) < 2e-5
        kind.copy_(kind.flip(1))
        flipped = ring_attention(q, k, v, key_padding_mask=kind)
        assert relative_rms(flipped, ring_attention(q, k[:, 41:187], v[:, 41:187])) < 2e-5
        monkeypatch.setattr(_functional, "widened", widened)
    # A graph reads the mask whenever it is replayed.
    holes = keys.expand(q.shape[0], -1).cuda() % 7 == 1
    ring_attention(q, k, v, key_padding_mask=holes)
    held = mask.clone()
    graph = cuda.cuda.CUDAGraph()
    with cuda.cuda.graph(graph):
        o = ring_attention(q, k, v, key_padding_mask=held)
    for values in (mask, holes, mask.flip(1)):
        held.copy_(values)
        graph.replay()
        assert relative_rms(o, ring_attention(q, k, v, key_padding_mask=values.clone())) < 2e-5


def test_the_process_ends_quietly(cuda: types.ModuleType) -> None:
    """Executors may outlive the interpreter's modules."""
    import subprocess
    import sys

    code = """
import torch, annulus, annulus.torch
q = torch.randn(1, 64, 2, 64, device="cuda", requires_grad=True)
annulus.torch.ring_attention(q, q, q).sum().backward()
annulus.attention(q, q, q)
ring = annulus.RingAttention(annulus.Pattern.dense(2), annulus.Placement.contiguous(64, 1), head_dim=64,
                             transport=annulus.make_in_process_ring(1)[0], device="cuda")
ring.forward(q, q, q)
torch.kept = ring
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and done.stderr == ""
