"""Windows, compared with PyTorch's attention under a dense boolean mask; what a mask hides changes nothing."""

from __future__ import annotations

import pytest
from support.reference import relative_rms

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
from support import torch_reference  # noqa: E402
from support.dense_masks import check, tensors  # noqa: E402

# Both limits, one of them, none but the token itself, and more than there are tokens.
WINDOWS = [
    ((10, 0), True),
    ((31, -1), True),
    ((10, 5), False),
    ((0, 24), False),
    ((-1, 3), False),
    ((7, -1), False),
    ((0, 0), False),
    ((2**63 - 1, 2**40), False),
]
LENGTHS = [1, 37, 131, 301]


def allowed(tokens: int, window: tuple[int, int], causal: bool) -> torch.Tensor:
    """The dense mask: [query, key], True: the query attends to the key."""
    distance = torch.arange(tokens) - torch.arange(tokens)[:, None]
    before, after = window
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    if before >= 0:
        mask &= distance >= -before
    if after >= 0:
        mask &= distance <= after
    return mask & (distance <= 0) if causal else mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_a_window_is_the_dense_mask(window, causal: bool, dtype: torch.dtype) -> None:
    for number, tokens in enumerate(LENGTHS):
        q, k, v, do = inputs = tensors(tokens, dtype, kv_heads=(4, 2, 1)[number % 3])
        mask = allowed(tokens, window, causal)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = at.ring_attention(*leaves, window=window, is_causal=causal)
        check((o.detach(), *torch.autograd.grad(o, leaves, do)), inputs, mask)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
def test_a_window_is_the_same_on_every_ring(ranks: int, placement: str) -> None:
    for window, causal in WINDOWS:
        for tokens, dtype, schedule in ((131, torch.float32, "ring"), (37, torch.bfloat16, "gather")):
            q, k, v, do = inputs = tensors(tokens, dtype)
            call = {"window": window, "is_causal": causal, "ranks": ranks}
            call |= {"placement": placement, "schedule": schedule}
            o, lse = annulus.attention(q, k, v, return_lse=True, **call)
            found = (o, *annulus.attention_backward(q, k, v, o, lse, do, **call))
            check(found, inputs, allowed(tokens, window, causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dilation", "keys"), [(1, 7), (4, 4), (5, 100), (16, 3)])
def test_a_dilated_window_is_the_dense_mask(dilation: int, keys: int, dtype: torch.dtype) -> None:
    """Query t sees t - i * dilation, i < keys; also in segments, and on rings."""
    window = ((keys - 1) * dilation, 0)
    for tokens, segment, ranks in ((131, 131, 1), (131, 1000, 3), (90, 37, 1), (90, 37, 4), (7, 7, 2)):
        q, k, v, do = inputs = tensors(tokens, dtype)
        where = torch.arange(tokens)
        places = where % segment % dilation
        mask = allowed(tokens, window, causal=True)
        mask &= where // segment == (where // segment)[:, None]
        mask &= places == places[:, None]
        call = {"segment_lengths": [segment], "dilation_rates": [dilation], "offsets": "all"}
        call |= {"window": window, "is_causal": tokens != 90}
        if ranks == 1:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = at.ring_attention(*leaves, **call)
            check((o.detach(), *torch.autograd.grad(o, leaves, do)), inputs, mask)
            continue
        call |= {"ranks": ranks, "placement": "striped" if ranks == 3 else "contiguous"}
        o, lse = annulus.attention(q, k, v, return_lse=True, **call)
        found = (o, *annulus.attention_backward(q, k, v, o, lse, do, **call))
        check(found, inputs, mask)


def test_all_offsets_keep_every_branch_and_group_scale_counts_segment_lengths() -> None:
    q, k, v, do = tensors(90, torch.float32)
    call = {"segment_lengths": [30, 90], "dilation_rates": [1, 3], "offsets": "all"}
    pattern = annulus.Pattern.longnet(4, [30, 90], [1, 3], offsets="all")
    assert len(pattern.branches) == 4 and pattern.output_scale == 1
    for mix in ("full", "detached"):
        results = []
        for scale in (False, True):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = at.ring_attention(*leaves, mix_gradient=mix, group_scale=scale, **call)
            results.append((o.detach(), *torch.autograd.grad(o, leaves, do)))
        for plain, half in zip(*results):
            torch.testing.assert_close(plain / 2, half)
        if mix == "full":
            wide = [x.double().requires_grad_() for x in (q, k, v)]
            o = torch_reference.attention(*wide, pattern)
            exact = (o, *torch.autograd.grad(o, wide, do.double()))
            for f, e in zip(results[0], exact):
                assert relative_rms(f, e) < 2e-6
    with pytest.raises(annulus.ConfigError, match="1024 branches"):
        at.ring_attention(q, k, v, segment_lengths=[9999], dilation_rates=[1025], offsets="all")


def test_compiled_windows_are_the_same() -> None:
    q, k, v, do = tensors(131, torch.float32)

    def function(*x: torch.Tensor) -> torch.Tensor:
        return 2 * at.ring_attention(*x, window=(20, 0), is_causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for each in (function, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = each(*leaves)
        results.append((o, *torch.autograd.grad(o, leaves, do)))
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_a_hidden_key_changes_no_bit(window, causal: bool, dtype: torch.dtype) -> None:
    tokens = 131
    q, k, v, do = tensors(tokens, dtype)
    mask = allowed(tokens, window, causal)

    def attend(k: torch.Tensor, v: torch.Tensor):
        o, lse = annulus.attention(
            q, k, v, window=window, is_causal=causal, return_lse=True, ranks=2
        )
        dq, dk, dv = annulus.attention_backward(
            *(q, k, v, o, lse, do), window=window, is_causal=causal, ranks=2
        )
        return o, lse, dq, dk, dv

    before = attend(k, v)
    for key in (0, 64, 130):
        k2, v2 = k.clone(), v.clone()
        k2[:, key] = 1e4 * torch.randn(2, 2, 24, generator=torch.Generator().manual_seed(key))
        v2[:, key] = -3e4
        after = attend(k2, v2)
        blind = ~mask[:, key]
        for name, a, b in zip(("o", "lse", "dq"), before, after):
            assert torch.equal(a[:, blind], b[:, blind]), (name, key)
        # Keys that no query sees together with the changed one.
        apart = ~(mask[mask[:, key]].any(0))
        for name, a, b in zip(("dk", "dv"), before[3:], after[3:]):
            assert torch.equal(a[:, apart], b[:, apart]), (name, key)


def test_lse_is_the_natural_logarithm() -> None:
    q, k, v, _ = tensors(37, torch.float32, kv_heads=4)
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) * 24**-0.5
    for window, causal in WINDOWS:
        mask = allowed(37, window, causal)[:, None]
        exact = scores.masked_fill(~mask, -torch.inf).exp().sum(-1).log()
        call = {"window": window, "is_causal": causal, "return_lse": True}
        for _, lse in (at.ring_attention(q, k, v, **call), annulus.attention(q, k, v, **call)):
            assert lse.dtype == torch.float32
            torch.testing.assert_close(lse.double(), exact, rtol=2e-6, atol=2e-6)
