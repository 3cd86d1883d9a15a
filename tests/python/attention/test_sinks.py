"""Sinks: a logit per query head that takes part in the softmax and has no value, as in gpt-oss."""

from __future__ import annotations

import annulus
import annulus.torch as at
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from annulus import ConfigError, Pattern, Placement
from support.reference import relative_rms

LONGNET = {"segment_lengths": [16, 32, 64], "dilation_rates": [1, 2, 4], "is_causal": True}


def tensors(
    tokens: int = 70, dtype: torch.dtype = torch.float32, kv_heads: int = 2, dim: int = 16
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, sinks and the gradient of o."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, h, dim) for h in (4, kv_heads, kv_heads, 4)]
    q, k, v, do = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    sinks = 2 * torch.randn(4, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, sinks)], do


def transformers_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    causal: bool = True,
    before: int = 1000,
) -> torch.Tensor:
    """The eager attention of gpt-oss in transformers: the sink is one more column of scores, which is dropped."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(ones.triu(1) | ones.tril(-before - 1), -torch.inf)
    column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    both = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    weights = F.softmax(both, dim=-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def results(function, inputs, do):
    o = function(*inputs)
    return (o, *torch.autograd.grad(o, inputs, do))


def ring(q, k, v, sinks, **options):
    return at.ring_attention(q, k, v, sinks=sinks, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_transformers(causal: bool, kv_heads: int) -> None:
    inputs, do = tensors(kv_heads=kv_heads)
    found = results(lambda *x: ring(*x, is_causal=causal), inputs, do)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(lambda *x: transformers_attention(*x, causal), wide, do.double())
    for f, e in zip(found, expected):
        assert relative_rms(f, e) < 2e-6


@pytest.mark.parametrize("before", [0, 5, 63])
def test_equals_transformers_in_a_sliding_window(before: int) -> None:
    inputs, do = tensors()
    found = results(lambda *x: ring(*x, is_causal=True, window=(before, 0)), inputs, do)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(
        lambda *x: transformers_attention(*x, before=before), wide, do.double()
    )
    for f, e in zip(found, expected):
        assert relative_rms(f, e) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_as_exact_as_transformers_in_16_bits(dtype: torch.dtype) -> None:
    inputs, do = tensors(dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(transformers_attention, wide, do.double())
    found = results(lambda *x: ring(*x, is_causal=True), inputs, do)
    peer = results(transformers_attention, inputs, do)
    for f, p, e in zip(found, peer, expected):
        assert relative_rms(f, e) < 1.1 * relative_rms(p, e)


@pytest.mark.parametrize("mix", ["full", "detached"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        LONGNET,
        {**LONGNET, "group_scale": True},
        {"is_causal": True, "cu_seqlens": [0, 20, 33, 61]},  # and padding behind them
        {"segment_lengths": [70], "dilation_rates": [4], "offsets": "all", "window": (12, 8)},
    ],
)
def test_float64_is_the_reference(options: dict, mix: str) -> None:
    """Also the reference of float32, which is another code."""
    inputs, do = tensors()
    options = {**options, "mix_gradient": mix}
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(lambda *x: ring(*x, **options), wide, do.double())
    for f, e in zip(results(lambda *x: ring(*x, **options), inputs, do), expected):
        assert relative_rms(f, e) < 3e-6


def test_gradcheck_in_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(1, 12, h, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (2, 1, 1)
    ]
    inputs.append(torch.randn(2, generator=generator, dtype=torch.float64, requires_grad=True))
    options = {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "is_causal": True}
    assert torch.autograd.gradcheck(lambda *x: ring(*x, **options), inputs)


def test_minus_infinity_is_no_sink() -> None:
    (q, k, v, _), do = tensors()
    none = torch.full((4,), -torch.inf, requires_grad=True)
    o, *grads, dsinks = results(lambda *x: ring(*x, **LONGNET), [q, k, v, none], do)
    expected = results(lambda *x: at.ring_attention(*x, **LONGNET), [q, k, v], do)
    assert all(torch.equal(f, e) for f, e in zip((o, *grads), expected))
    assert torch.equal(dsinks, torch.zeros(4))


def test_rows_without_keys_give_zero() -> None:
    (q, k, v, sinks), do = tensors()
    options = {"segment_lengths": [70], "dilation_rates": [2], "offsets": "interleaved"}
    o, lse = ring(q, k, v, sinks, return_lse=True, **options)
    for head in range(4):
        empty = torch.arange(70) % 2 != head % 2
        assert torch.equal(o[:, empty, head], torch.zeros(2, 35, 16))
        assert torch.equal(lse[:, empty, head], sinks[head].expand(2, 35))
        assert not torch.equal(lse[:, ~empty, head], sinks[head].expand(2, 35))
    grads = torch.autograd.grad(o, (q, sinks), do)
    do_of_empty = do.masked_fill(o == 0, torch.nan)  # no one asks for it
    again = torch.autograd.grad(ring(q, k, v, sinks, **options), (q, sinks), do_of_empty)
    assert all(torch.equal(a, b) for a, b in zip(grads, again))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_ones_poison_their_head(bad: float) -> None:
    (q, k, v, _), _ = tensors()
    o = ring(q, k, v, torch.tensor([0.0, bad, 1.0, -torch.inf]))
    assert o.isnan().all((0, 1, 3)).tolist() == [False, True, False, False]
    assert o.isnan().any((0, 1, 3)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_and_stride(dtype: torch.dtype) -> None:
    (q, k, v, _), do = tensors(dtype=torch.bfloat16)
    sinks = torch.randn(8, 3).to(dtype).requires_grad_()
    view = sinks[::2, 1]
    (found,) = torch.autograd.grad(ring(q, k, v, view), sinks, do)
    plain = view.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(ring(q, k, v, plain), plain, do)
    assert found.dtype == dtype
    assert torch.equal(found[::2, 1], expected.to(dtype))
    ones = torch.ones(1, requires_grad=True)
    (total,) = torch.autograd.grad(ring(q, k, v, ones.expand(4)), ones, do)
    four = torch.ones(4, requires_grad=True)
    (each,) = torch.autograd.grad(ring(q, k, v, four), four, do)
    assert total.item() == pytest.approx(each.sum().item(), rel=1e-6)


def test_gradient_of_the_sinks_alone() -> None:
    inputs, do = tensors()
    expected = results(ring, inputs, do)[-1]
    q, k, v, sinks = inputs
    o = ring(q.detach(), k.detach(), v.detach(), sinks)
    assert torch.equal(torch.autograd.grad(o, sinks, do)[0], expected)
    with torch.no_grad():
        assert torch.equal(ring(*inputs), o)


@pytest.mark.parametrize("mix", ["full", "detached"])
def test_operators_pass_pytorchs_own_checks(mix: str) -> None:
    (q, k, v, sinks), do = tensors()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        attend = torch.ops.annulus.attend
        patch.setattr(torch.ops.annulus, "attend", lambda *x: calls.append(x) or attend(*x))
        patch.setattr(at._fast_path, "only_autograd_active", lambda *x: False)
        by_operator = results(
            lambda *x: ring(*x, mix_gradient=mix, **LONGNET), [q, k, v, sinks], do
        )
    torch.library.opcheck(attend, calls[0])
    directly = results(lambda *x: ring(*x, mix_gradient=mix, **LONGNET), [q, k, v, sinks], do)
    assert all(torch.equal(a, b) for a, b in zip(by_operator, directly))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_takes_it_as_one_operator(dynamic: bool) -> None:
    def function(q, k, v, sinks):
        return 2 * ring(q * 1.5, k, v, sinks - 1, **LONGNET)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (70, 33, 5):
        inputs, do = tensors(tokens)
        for found, expected in zip(results(compiled, inputs, do), results(function, inputs, do)):
            assert torch.equal(found, expected)


def test_vmap_and_autocast() -> None:
    (q, k, v, sinks), _ = tensors()
    stacked = torch.stack([q, q.flip(1)])
    o = torch.vmap(lambda q: ring(q, k, v, sinks))(stacked)
    assert torch.equal(o[1], ring(q.flip(1), k, v, sinks))
    with torch.autocast("cpu", torch.bfloat16):
        o = ring(q, k, v, sinks)
    assert torch.equal(o, ring(q.bfloat16(), k.bfloat16(), v.bfloat16(), sinks))


def test_no_tokens_give_a_gradient_of_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        q = torch.zeros(2, 0, 4, 16, dtype=dtype)
        sinks = torch.zeros(4, requires_grad=True)
        ring(q, q, q, sinks).sum().backward()
        assert torch.equal(sinks.grad, torch.zeros(4))


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        ([0.0] * 4, "sinks is a list: a torch.Tensor was expected"),
        (torch.zeros(3), r"sinks is \[3\]: one number per head of q, \[4\], was expected"),
        (torch.zeros(4, 1), r"sinks is \[4, 1\]"),
        (torch.zeros(4, dtype=torch.int64), "sinks is torch.int64: floating point was expected"),
        (torch.zeros(4, device="meta"), "sinks is on meta, but q is on cpu"),
        (torch.zeros(4).to_sparse(), "sinks is a nested or sparse tensor"),
    ],
)
def test_mistakes(sinks: object, words: str) -> None:
    (q, k, v, good), _ = tensors()
    ring(q, k, v, good)
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            ring(q, k, v, sinks)


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
def test_numpy_arrays_on_some_ranks(placement: str) -> None:
    inputs, do = tensors()
    expected = [x.detach().numpy() for x in results(lambda *x: ring(*x, **LONGNET), inputs, do)]
    q, k, v, sinks = (x.detach().numpy() for x in inputs)
    for ranks in (1, 2, 4):
        options = {**LONGNET, "sinks": sinks, "ranks": ranks, "placement": placement}
        o, lse = annulus.attention(q, k, v, return_lse=True, **options)
        found = (o, *annulus.attention_backward(q, k, v, o, lse, do.numpy(), **options))
        assert all(isinstance(x, np.ndarray) and x.dtype == np.float32 for x in found)
        for f, e in zip(found, expected):
            assert f.shape == e.shape and relative_rms(f, e) < 2e-6
    assert found[-1].shape == (4,)


def test_nothing_to_compute_gives_zeros() -> None:
    q, lse = np.zeros((2, 0, 4, 16), np.float32), np.zeros((2, 0, 4), np.float32)
    sinks = np.zeros(4, np.float32)
    *_, dsinks = annulus.attention_backward(q, q, q, q, lse, q, sinks=sinks)
    assert np.array_equal(dsinks, np.zeros(4))


def test_executor_and_reference() -> None:
    inputs, do = tensors()
    pattern = Pattern.longnet(4, [16, 32, 64], [1, 2, 4], causal=True)
    q, k, v, sinks = (x.detach() for x in inputs)
    executor = annulus.RingAttention(
        pattern,
        Placement.contiguous(70, 1),
        transport=annulus.make_in_process_ring(1)[0],
        batch=2,
        kv_heads=2,
        head_dim=16,
    )
    o, lse = executor.forward(q, k, v, sinks=sinks)
    dsinks = torch.empty(4)
    found = executor.backward(q, k, v, o, lse, do, sinks=sinks, dsinks=dsinks)
    assert found[3] is dsinks
    assert all(
        torch.equal(f, e)
        for f, e in zip((o, *found), results(lambda *x: ring(*x, **LONGNET), inputs, do))
    )
    wide = [x.double().numpy() for x in (q, k, v, do)]
    exact = annulus.reference_backward(*wide, pattern, sinks=sinks.double().numpy())
    assert relative_rms(dsinks, exact[3]) < 2e-6
    assert len(annulus.reference_backward(*wide, pattern)) == 3
    assert len(executor.backward(q, k, v, *executor.forward(q, k, v), do)) == 3
    for wrong, words in (
        ({"sinks": sinks[:3]}, r"sinks is \[3\], expected \[4\]: one number per query head"),
        ({"sinks": sinks[None]}, r"sinks is \[1, 4\], expected 1 axis: \[heads\]"),
        ({"sinks": sinks.double()}, "sinks is float64"),
        ({"sinks": sinks.half()}, "sinks is fp16, expected fp32"),
        ({"dsinks": dsinks}, "dsinks is given, but sinks is not"),
    ):
        with pytest.raises(ConfigError, match=words):
            executor.backward(q, k, v, o, lse, do, **wrong)
    with pytest.raises(ConfigError, match=r"sinks is float16 \[4\], expected float32 \[4\]"):
        annulus.attention(q, k, v, sinks=sinks.half())


# ---- modules -------------------------------------------------------------------------------------


def test_module_without_parameters_takes_them() -> None:
    (q, k, v, sinks), _ = tensors()
    module = at.RingDilatedAttention(**LONGNET)
    assert torch.equal(module(q, k, v, sinks=sinks), ring(q, k, v, sinks, **LONGNET))


@pytest.mark.parametrize("masked", [False, True])
def test_multihead_learns_them(masked: bool) -> None:
    torch.manual_seed(3)
    module = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, sinks=True)
    assert torch.equal(module.state_dict()["sinks"], torch.zeros(4))
    with torch.no_grad():
        module.sinks.copy_(torch.tensor([1.0, -2.0, 3.0, -torch.inf]))
    x = torch.randn(2, 20, 64)
    mask = torch.arange(20) >= torch.tensor([[20], [13]]) if masked else None
    out, weights = module(x, x, x, mask, average_attn_weights=False)
    q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(2, (3, 4, 16)).unbind(2)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    plain = at.RingMultiheadDilatedAttention(64, 4, batch_first=True)
    assert "sinks" not in plain.state_dict()
    torch.testing.assert_close(out, module.out_proj(expected.flatten(2)), rtol=1e-4, atol=1e-5)
    total = weights.sum(-1)
    assert bool((total[:, :3] < 0.999).all()) and torch.allclose(total[:, 3], torch.ones(2, 20))
    if masked:
        assert torch.equal(weights[1, :, :, 13:], torch.zeros(4, 20, 7))
    else:
        torch.testing.assert_close(
            expected, transformers_attention(q, k, v, module.sinks, False), rtol=1e-4, atol=1e-5
        )
    out.sum().backward()
    assert bool((module.sinks.grad[:3] != 0).all()) and module.sinks.grad[3] == 0
    module._reset_parameters()
    assert torch.equal(module.sinks, torch.zeros(4))
    with pytest.raises(ConfigError, match="sinks is 1"):
        at.RingMultiheadDilatedAttention(64, 4, sinks=1)
