"""RingMultiheadDilatedAttention in place of torch.nn.MultiheadAttention: masks, additional keys, nested tensors."""

from __future__ import annotations

import copy
import io
import itertools

import annulus.torch as at
import pytest
import torch
from annulus import ConfigError
from annulus.torch import RingMultiheadDilatedAttention
from annulus.torch._mask_forms import MaskForm, mask_form
from support.reference import relative_rms
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS, KEYS = 20, 26
LONGNET = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
INF = torch.inf


def pair(heads: int = 4, embed_dim: int = 32, **options):
    """nn.MultiheadAttention and ours with the same parameters, none of them 0."""
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(embed_dim, heads, **options)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    ours = RingMultiheadDilatedAttention(embed_dim, heads, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check(theirs: nn.Module, ours: nn.Module, inputs: list[torch.Tensor], **call) -> None:
    """Outputs, weights and all gradients are equal."""
    leaves = [x for x in dict.fromkeys((*inputs, *call.values())) if getattr(x, "requires_grad", False)]
    results = []
    for module in (theirs, ours):
        o, weights = module(*inputs, **call)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o.dtype)
        results.append((o, weights, torch.autograd.grad(o, [*leaves, *module.parameters()], do)))
    (o1, w1, g1), (o2, w2, g2) = results
    torch.testing.assert_close(o2, o1, rtol=1e-5, atol=1e-5)
    assert (w1 is None) == (w2 is None)
    if w1 is not None:
        torch.testing.assert_close(w2, w1, rtol=1e-5, atol=1e-5)
    for a, b in zip(g1, g2):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=2e-5 * float(a.abs().max()))


def check_all(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Gradients of many parameters, some of which are 0 but for rounding."""
    largest = max(float(x.detach().abs().max()) for x in expected)
    for f, e in zip(found, expected):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5 * largest)


def causal(tokens: int, keys: int, diagonal: int = 1) -> torch.Tensor:
    return torch.ones(tokens, keys, dtype=torch.bool).triu(diagonal)


def random_mask(*shape: int) -> torch.Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.5
    mask[..., 2] = False  # nn.MultiheadAttention gives NaN to rows without keys
    return mask


def blocks(tokens: int, keys: int, *edges: tuple[int, int]) -> torch.Tensor:
    mask = torch.ones(tokens, keys, dtype=torch.bool)
    for (a, b), (c, d) in itertools.pairwise([(0, 0), *edges]):
        mask[a:c, b:d] = False
    return mask


DISTANCE = torch.arange(KEYS) - torch.arange(TOKENS)[:, None]
MASKS = [
    torch.zeros(TOKENS, KEYS),
    torch.zeros(TOKENS, KEYS).masked_fill(causal(TOKENS, KEYS), -INF),
    causal(TOKENS, KEYS, 1 + KEYS - TOKENS),
    (DISTANCE < -3) | (DISTANCE > 5),
    blocks(TOKENS, KEYS, (8, 10), (20, 26)),
    random_mask(TOKENS, KEYS),
    random_mask(12, TOKENS, KEYS),
    torch.randn(TOKENS, KEYS, generator=torch.Generator().manual_seed(4)),
    torch.randn(12, TOKENS, KEYS, generator=torch.Generator().manual_seed(4), requires_grad=True),
]
PADDING = torch.arange(KEYS) >= torch.tensor([[KEYS], [18], [7]])
PADDINGS = [None, PADDING, torch.randn(3, KEYS).masked_fill(PADDING, -INF)]
EXTRAS = [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda e: "+".join(e) or "plain")
@pytest.mark.parametrize("padding", range(3))
def test_masks_of_every_form(padding: int, extras: dict) -> None:
    for number, mask in enumerate([None, *MASKS]):
        batch_first = number % 2 == 0
        theirs, ours = pair(batch_first=batch_first, kdim=24, vdim=40, bias=number % 3 > 0, **extras)
        generator = torch.Generator().manual_seed(number)
        sizes = ((TOKENS, 32), (KEYS, 24), (KEYS, 40))
        inputs = [torch.randn(3, n, d, generator=generator) for n, d in sizes]
        inputs = [(x if batch_first else x.transpose(0, 1)).requires_grad_() for x in inputs]
        call = {"attn_mask": mask, "key_padding_mask": PADDINGS[padding]}
        if call["key_padding_mask"] is not None and mask is not None:
            call["key_padding_mask"] = call["key_padding_mask"].clone()
            if call["key_padding_mask"].dtype == torch.bool and mask.is_floating_point():
                # nn.MultiheadAttention warns where one mask is boolean and the other is not.
                call["key_padding_mask"] = torch.zeros(3, KEYS).masked_fill(PADDING, -INF)
            if mask.dtype == torch.bool and call["key_padding_mask"].is_floating_point():
                call["attn_mask"] = torch.zeros(mask.shape).masked_fill(mask, -INF)
            call["key_padding_mask"][:, :3] = 0
        empty = mask is not None and not extras and bool((_hidden(mask)[..., :3]).all(-1).any())
        if empty and padding:
            continue
        if number % 4 == 0:
            check(theirs, ours, inputs, **call, need_weights=False)
        else:
            check(theirs, ours, inputs, **call, average_attn_weights=number % 4 == 1)


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == -INF


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda e: "+".join(e) or "plain")
def test_inputs_without_a_batch(extras: dict) -> None:
    theirs, ours = pair(**extras)
    x = torch.randn(TOKENS, 32, requires_grad=True)
    for mask in (causal(TOKENS, TOKENS), random_mask(TOKENS, TOKENS), random_mask(4, TOKENS, TOKENS)):
        check(theirs, ours, [x, x, x], attn_mask=mask, key_padding_mask=torch.arange(TOKENS) > 12)
    check(theirs, ours, [x, x, x], average_attn_weights=False)


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda e: "+".join(e) or "plain")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, extras: dict) -> None:
    theirs, ours = (m.to(dtype) for m in pair(batch_first=True, **extras))
    x = torch.randn(3, TOKENS, 32).to(dtype)
    for mask in (None, causal(TOKENS, TOKENS), random_mask(TOKENS, TOKENS), torch.randn(TOKENS, TOKENS).to(dtype)):
        expected = theirs.double()(*[x.double()] * 3, attn_mask=_as(mask, torch.float64))[0]
        found, weights = ours(x, x, x, attn_mask=mask)
        assert found.dtype == weights.dtype == dtype
        assert relative_rms(found, expected) < (1e-12 if dtype == torch.float64 else 0.02)


def _as(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)


def test_rows_that_a_mask_hides_give_zeros() -> None:
    _, ours = pair(batch_first=True, bias=False)
    x = torch.randn(3, TOKENS, 32, requires_grad=True)
    mask = random_mask(TOKENS, TOKENS)
    mask[5] = True
    o, weights = ours(x, x, x, attn_mask=mask)
    assert not o[:, 5].any() and not weights[:, 5].any() and o.isfinite().all()
    (o.sum() + weights.square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in (x, *ours.parameters()))
    query = torch.randn(3, TOKENS, 32, requires_grad=True)
    ours(query, x, x, attn_mask=mask, need_weights=False)[0].sum().backward()
    assert not query.grad[:, 5].any() and query.grad[:, 4].any()


# ---- recognised masks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (torch.zeros(9, 9), MaskForm()),
        (causal(9, 9), MaskForm((-1, 0))),
        (causal(9, 9).expand(8, 9, 9), MaskForm((-1, 0))),
        (torch.zeros(9, 9).masked_fill(causal(9, 9), -INF), MaskForm((-1, 0))),
        (causal(9, 9).T, MaskForm((0, -1))),
        (causal(9, 9, 3), MaskForm((-1, 2))),
        (causal(9, 9, 3) | causal(9, 9, 2).T, MaskForm((1, 2))),
        (~torch.eye(9, dtype=torch.bool), MaskForm((0, 0))),
        (causal(9, 9, 0), None),  # not the token itself: the first row is empty, and queries would be before 0
        (causal(9, 9, 3) | ~causal(9, 9, 1), MaskForm((0, 1), 1)),  # ahead of the diagonal
        (causal(4, 9, 6), MaskForm((-1, 5), 0)),
        (causal(9, 4), MaskForm((-1, 0), 0)),
        (blocks(9, 9, (4, 4), (9, 9)), MaskForm(None, None, (0, 4, 9))),
        (blocks(9, 9, (4, 4), (7, 7)), MaskForm(None, None, (0, 4, 7))),
        (blocks(9, 9, (4, 4), (9, 9)) | causal(9, 9), MaskForm((-1, 0), None, (0, 4, 9))),
        (
            blocks(9, 9, (4, 4), (9, 9)) | causal(9, 9) | causal(9, 9, 2).T,
            MaskForm((1, 0), None, (0, 4, 9)),
        ),
        (blocks(9, 9, (4, 4), (6, 6), (9, 9)) | causal(9, 9), MaskForm((-1, 0), None, (0, 4, 6, 9))),
        (blocks(6, 9, (4, 2), (6, 9)), MaskForm(None, None, (0, 4, 6), (0, 2, 9))),
        (blocks(9, 9, (4, 2), (8, 9)), MaskForm(None, None, (0, 4, 8), (0, 2, 9))),
        (random_mask(9, 9), None),
        (torch.randn(9, 9), None),
        (torch.stack([causal(9, 9), causal(9, 9, 2)]), None),
        (torch.ones(9, 9, dtype=torch.bool), None),
        (torch.zeros(0, 9), MaskForm()),
    ],
)
def test_masks_are_recognised(mask: torch.Tensor, form: MaskForm | None) -> None:
    """None: the mask has no such form."""
    assert mask_form(mask) == form
    if mask.numel() > 0 and form is not None:  # one pair more, or less
        changed = mask.clone()
        pair = (..., 3, 1)
        hides = bool((changed[pair] != 0).any())
        changed[pair] = 0 if hides else True if mask.dtype == torch.bool else -INF
        assert mask_form(changed) != form and mask_form(mask) == form


def test_a_mask_that_is_written_to_is_looked_at_again() -> None:
    """Also where PyTorch does not count the write."""
    mask = causal(9, 9).clone()
    numbers = mask.numpy()
    with torch.inference_mode():
        inference = causal(9, 9).clone()
    for written, write in (
        (mask, mask.fill_),
        (mask, mask.data.fill_),
        (mask, numbers.fill),
        (inference, torch.inference_mode()(inference.fill_)),
    ):
        written.data.copy_(causal(9, 9))
        assert mask_form(written) == mask_form(written) == MaskForm((-1, 0))
        write(False)
        assert mask_form(written) == MaskForm()


def test_a_learned_mask_gets_its_gradient_whatever_its_values() -> None:
    """Learned biases often begin as zeros."""
    theirs, ours = pair(batch_first=True)
    x = torch.randn(3, TOKENS, 32)
    for mask in (torch.zeros(TOKENS, TOKENS), torch.zeros(12, TOKENS, TOKENS)):
        for hidden in (torch.zeros(TOKENS, TOKENS, dtype=torch.bool), causal(TOKENS, TOKENS)):
            learned = mask.masked_fill(hidden, -INF).requires_grad_()
            check(theirs, ours, [x, x, x], attn_mask=learned, need_weights=False)
            detached = RingMultiheadDilatedAttention(32, 4, batch_first=True, mix_gradient="detached", **LONGNET)
            with pytest.raises(ConfigError, match="attn_mask requires a gradient: .*detached"):
                detached(x, x, x, attn_mask=learned)
            with torch.no_grad():
                detached(x, x, x, attn_mask=learned)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"window": (6, 2)},
        {"cu_seqlens": [0, 7, 20]},
        LONGNET,
        {**LONGNET, "is_causal": True},
        {**LONGNET, "window": [6, 2]},
        {**LONGNET, "cu_seqlens": [0, 7, 18]},
        {"query_start": 2, "is_causal": True},
    ],
)
def test_a_mask_means_the_same_however_it_is_computed(options: dict, monkeypatch) -> None:
    """As arguments of the pattern, and as a matrix beside it. Weights, too."""
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(32, 4, batch_first=True, **options)
    x = torch.randn(3, TOKENS, 32)
    masks = [
        torch.zeros(TOKENS, TOKENS),
        causal(TOKENS, TOKENS),
        causal(TOKENS, TOKENS, 4),
        causal(TOKENS, TOKENS, 4) | ~causal(TOKENS, TOKENS, 2),
        causal(TOKENS, TOKENS, 2).T | causal(TOKENS, TOKENS, 3),
        blocks(TOKENS, TOKENS, (5, 5), (17, 17)),
        blocks(TOKENS, TOKENS, (5, 5), (20, 20)) | causal(TOKENS, TOKENS),
        blocks(TOKENS, TOKENS, (5, 3), (20, 20)),
    ]
    flags = (False,) if "window" in options else (False, True)  # a causal window has after = 0

    def results() -> list[tuple[torch.Tensor, torch.Tensor]]:
        calls = [{"attn_mask": m, "is_causal": c} for m in masks for c in flags]
        return [module(x, x, x, need_weights=True, **call) for call in calls]

    found = results()
    monkeypatch.setattr("annulus.torch._multihead.mask_form", lambda mask: None)
    for (o, weights), (o2, weights2) in zip(found, results()):
        torch.testing.assert_close(o, o2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, weights2, rtol=1e-5, atol=1e-5)
    # The weights are those of the output.
    _, _, v = module._project(x, x, x)
    o, weights = module(
        x, x, x, attn_mask=masks[1], need_weights=True, average_attn_weights=False
    )
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
    torch.testing.assert_close(module.out_proj(mixed), o, rtol=1e-5, atol=1e-5)


def test_padded_keys_may_hold_anything_with_weights() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(3, TOKENS, 32)
    padding = (torch.arange(TOKENS) >= 12).expand(3, -1)
    for call in ({}, {"attn_mask": torch.randn(TOKENS, TOKENS)}):
        results = []
        for value in (0.0, torch.nan):
            keys = x.clone()
            keys[:, 12:] = value
            results.append(ours(x, keys, keys, padding, **call))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_refused_masks_say_why() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(3, TOKENS, 32)
    detached = RingMultiheadDilatedAttention(32, 4, batch_first=True, mix_gradient="detached", **LONGNET)
    detached(x, x, x, attn_mask=causal(TOKENS, TOKENS))
    with pytest.raises(ConfigError, match="attn_mask is not a causal mask.*detached"):
        detached(x, x, x, attn_mask=random_mask(TOKENS, TOKENS))
    with pytest.raises(ConfigError, match=r"attn_mask is \[20, 19\]: \[20, 20\], or \[12, 20, 20\]"):
        ours(x, x, x, attn_mask=torch.zeros(20, 19))
    with pytest.raises((AssertionError,), match="to be 3-D but found 2-D and 3-D"):
        ours(x, x[0], x)
    for call, words in (
        ({"attn_mask": torch.zeros(20, 20).to_sparse()}, "attn_mask is a nested or sparse tensor"),
        ({"attn_mask": torch.zeros(20, 20, device="meta")}, "is on meta"),
        ({"attn_mask": torch.zeros(20, 20), "is_causal": "x"}, "is_causal is 'x'"),
        ({"attn_mask": torch.randn(20, 20), "is_causal": 1}, "is_causal is 1"),
        ({"rotary": (1, 2)}, r"rotary is \(1, 2\): a pair of tensors"),
        ({"rotary": (x, x, x)}, "rotary has shapes"),
    ):
        with pytest.raises(ConfigError, match=words):
            ours(x, x, x, **call)
    _, ours = pair(batch_first=True, kdim=24, vdim=40)
    good = {"query": x, "key": torch.randn(3, 9, 24), "value": torch.randn(3, 9, 40)}
    ours(**good)
    for name in good:
        with pytest.raises(ConfigError, match=f"{name} has 33 features"):
            ours(**{**good, name: torch.randn(3, 9, 33)})


def test_dropout_with_every_mask_in_training_only() -> None:
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(32, 4, dropout=0.5, batch_first=True, add_zero_attn=True)
    x = torch.randn(3, TOKENS, 32)
    for mask in (None, causal(TOKENS, TOKENS), random_mask(TOKENS, TOKENS), random_mask(12, TOKENS, TOKENS)):
        call = {"attn_mask": mask, "need_weights": False}
        module.train()
        torch.manual_seed(5)
        first, second = (module(x, x, x, **call)[0] for _ in range(2))
        torch.manual_seed(5)
        assert torch.equal(module(x, x, x, **call)[0], first) and not torch.equal(first, second)
        mean = torch.stack([module(x, x, x, **call)[0] for _ in range(400)]).mean(0)
        module.eval()
        expected = module(x, x, x, **call)[0]
        torch.testing.assert_close(mean, expected, rtol=0, atol=0.1)
        assert torch.equal(module(x, x, x, **call)[0], expected)
    with pytest.raises(ConfigError, match="dropout is 0.5 and add_bias_kv is True"):
        RingMultiheadDilatedAttention(32, 4, dropout=0.5, add_bias_kv=True)


def test_dropout_is_read_in_every_call() -> None:
    """As nn.MultiheadAttention does: code sets the attribute."""
    x = torch.randn(3, TOKENS, 32)
    module = RingMultiheadDilatedAttention(32, 4, dropout=0.5, batch_first=True)
    same = RingMultiheadDilatedAttention(32, 4, batch_first=True)
    same.load_state_dict(module.state_dict())
    module.dropout, same.dropout = 0.0, 0.5
    first, second = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)
    first, second = (same(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    same.eval()
    assert torch.equal(same(x, x, x)[0], module(x, x, x)[0])


# ---- additional keys -----------------------------------------------------------------------------


def test_additional_keys_are_seen_by_every_pattern() -> None:
    """Beside dilated branches, windows and sinks, and where the sequence hides everything."""
    torch.manual_seed(0)
    for options in (LONGNET, {"window": (2, 0)}, {"cu_seqlens": [0, 7, 15]}):
        module = RingMultiheadDilatedAttention(
            32, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True, sinks=True, **options
        )
        nn.init.normal_(module.sinks)
        wide = copy.deepcopy(module).double()  # computed with a matrix
        x = torch.randn(3, TOKENS, 32, requires_grad=True)
        padding = torch.zeros(3, TOKENS, dtype=torch.bool)
        padding[1] = True
        results = []
        for m, y in ((module, x), (wide, x.double())):
            o, weights = m(y, y, y, padding, need_weights=True)
            results.append((o, weights, *torch.autograd.grad(o.square().sum(), [x, *m.parameters()])))
            assert weights.shape == (3, TOKENS, TOKENS + 2)
        for f, e in zip(*results):
            torch.testing.assert_close(f.double(), e.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("extras", EXTRAS[1:], ids="+".join)
def test_state_dicts_copies_and_files(extras: dict) -> None:
    theirs, ours = pair(batch_first=True, kdim=24, vdim=40, **extras)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = [torch.randn(3, TOKENS, d) for d in (32, 24, 40)]
    expected = ours(*x)[0]
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert torch.equal(other(*x)[0], expected)
        other._reset_parameters()
        if "add_bias_kv" in extras:
            assert not torch.equal(other.bias_k, ours.bias_k)
    again = nn.MultiheadAttention(32, 4, batch_first=True, kdim=24, vdim=40, **extras)
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(again(*x)[0], expected, rtol=1e-5, atol=1e-5)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_packed_weights_can_be_read_apart() -> None:
    """As F.multi_head_attention_forward does where _qkv_same_embed_dim is False."""
    _, ours = pair()
    for weight, expected in zip(
        (ours.q_proj_weight, ours.k_proj_weight, ours.v_proj_weight), ours.in_proj_weight.chunk(3)
    ):
        assert torch.equal(weight, expected)
    _, apart = pair(kdim=24)
    assert apart.in_proj_weight is None and isinstance(apart.k_proj_weight, nn.Parameter)
    assert apart.k_proj_weight.shape == (32, 24)


# ---- nested tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("options", [{}, LONGNET, {"is_causal": True}, *EXTRAS[1:]], ids="+".join)
def test_nested_tensors_are_their_sequences(layout: torch.layout, options: dict) -> None:
    """Each computed as if it were alone."""
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(32, 4, batch_first=True, **options)
    parts = [torch.randn(n, 32, requires_grad=True) for n in (5, 1, 20, 9)]
    nested = torch.nested.as_nested_tensor(parts, layout=layout)
    out, weights = module(nested, nested, nested)
    assert out.is_nested and out.layout == layout and weights is None
    alone = [module(x, x, x, need_weights=False)[0] for x in parts]
    for a, b in zip(out.unbind(), alone):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad(sum(x.square().sum() for x in of), [*parts, *module.parameters()])
        for of in (out.unbind(), alone)
    ]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    if layout == torch.jagged:
        assert (nested + out).is_nested  # they share their offsets, as a residual connection needs


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_keys_of_other_lengths(layout: torch.layout) -> None:
    _, ours = pair(batch_first=True, kdim=24, vdim=24)
    queries = [torch.randn(n, 32) for n in (5, 3, 8)]
    keys = [torch.randn(n, 24) for n in (2, 9, 4)]
    query, key = (torch.nested.as_nested_tensor(x, layout=layout) for x in (queries, keys))
    out, _ = ours(query, key, key)
    for a, q, k in zip(out.unbind(), queries, keys):
        torch.testing.assert_close(a, ours(q, k, k, need_weights=False)[0], rtol=1e-5, atol=1e-5)
    longer = torch.nested.as_nested_tensor([torch.randn(len(x) + 1, 24) for x in keys], layout=layout)
    for inputs, call, words in (
        ((query, key, key), {"need_weights": True}, "need_weights"),
        ((query, key, key), {"key_padding_mask": torch.zeros(3, 9)}, "key_padding_mask"),
        ((query, key, key), {"attn_mask": torch.zeros(8, 9)}, "attn_mask"),
        ((query, key, key), {"n_global": 77}, "n_global"),
        ((query, key, longer), {}, "tokens"),
        ((query, key, torch.zeros(3, 9, 24)), {}, "three nested tensors or none"),
    ):
        with pytest.raises(ConfigError, match=words):
            ours(*inputs, **call)


def test_nested_tensors_of_no_sequences_are_refused() -> None:
    _, ours = pair(batch_first=True)
    wrong = torch.nested.as_nested_tensor([torch.randn(n, 33) for n in (2, 3)], layout=torch.strided)
    with pytest.raises(ConfigError, match="query has 33 features"):
        ours(wrong, wrong, wrong)
    nothing = torch.nested.as_nested_tensor([], layout=torch.strided)
    with pytest.raises(ConfigError, match="nested tensor of no sequences"):
        ours(nothing, nothing, nothing)


# ---- in the layers of PyTorch --------------------------------------------------------------------


def test_decoder_layers_and_transformers() -> None:
    torch.manual_seed(3)
    theirs = nn.Transformer(32, 4, 1, 2, 48, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    for layer in (*ours.encoder.layers, *ours.decoder.layers):
        for name in ("self_attn", "multihead_attn"):
            if hasattr(layer, name):
                mine = RingMultiheadDilatedAttention(32, 4, batch_first=True)
                mine.load_state_dict(getattr(layer, name).state_dict())
                setattr(layer, name, mine)
    source, target = torch.randn(3, KEYS, 32), torch.randn(3, TOKENS, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    calls = [
        {},
        {"tgt_mask": mask, "tgt_is_causal": True},
        {"tgt_mask": mask, "memory_mask": torch.randn(TOKENS, KEYS), "src_mask": torch.randn(KEYS, KEYS)},
        {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING, "tgt_mask": mask == -INF},
    ]
    for mode, call in itertools.product((True, False), calls):
        results = []
        for model in (theirs, ours):
            model.train(mode)
            model.zero_grad()
            o = model(source, target, **call)
            o.square().sum().backward()
            results.append((o, *(p.grad for p in model.parameters())))
        check_all(*reversed(results))


@pytest.mark.parametrize("extras", [{}, EXTRAS[3]], ids=lambda e: "+".join(e) or "plain")
def test_compiled_exported_and_autocast(extras: dict) -> None:
    _, ours = pair(batch_first=True, **extras)
    x = torch.randn(3, TOKENS, 32, requires_grad=True)
    mask, padding = random_mask(TOKENS, TOKENS), torch.arange(TOKENS) >= torch.tensor([[20], [13], [9]])

    def function(x: torch.Tensor, mask: torch.Tensor | None, padding: torch.Tensor | None):
        return ours(x, x, x, padding, attn_mask=mask, need_weights=False)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for call in ((None, None), (mask, None), (None, padding), (causal(TOKENS, TOKENS), padding)):
        a, b = function(x, *call), compiled(x, *call)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(o.square().sum(), [x, *ours.parameters()]) for o in (a, b)]
        check_all(*grads)
    ours.eval()
    with torch.no_grad():
        exported = torch.export.export(ours, (x, x, x, padding, False, mask)).module()
        torch.testing.assert_close(exported(x, x, x, padding, False, mask)[0], function(x, mask, padding))
    with torch.autocast("cpu", torch.bfloat16):
        half = function(x, mask, padding)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), function(x, mask, padding), rtol=5e-2, atol=5e-2)


def test_compiled_masks_apply_with_is_causal_too() -> None:
    _, ours = pair(batch_first=True)
    x, y = torch.randn(3, TOKENS, 32), torch.randn(3, KEYS, 32)

    def function(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ours(x, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for keys in (x, y):
        for mask in (torch.randn(TOKENS, keys.shape[1]), random_mask(TOKENS, keys.shape[1])):
            torch.testing.assert_close(compiled(x, keys, mask), function(x, keys, mask), rtol=1e-5, atol=1e-5)


def test_masks_that_cannot_be_looked_at() -> None:
    """Inside transforms, and tensors without values."""
    _, ours = pair(batch_first=True)
    x, mask = torch.randn(3, TOKENS, 32), torch.randn(3, TOKENS, TOKENS)

    def one(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ours(x, x, x, attn_mask=mask, need_weights=False)[0]

    expected = torch.stack([one(*of_entry) for of_entry in zip(x, mask)])
    torch.testing.assert_close(torch.func.vmap(one)(x, mask), expected, rtol=1e-5, atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(y) for y in (x[0], mask[0])]
        assert one(*fake).shape == x[0].shape


def test_modules_take_masks_with_each_call() -> None:
    module = at.RingDilatedAttention(window=(3, 0))
    q = torch.randn(1, TOKENS, 4, 8)
    call = {"cu_seqlens": [0, 7, 20], "window": None}
    assert torch.equal(module(q, q, q, **call), at.ring_attention(q, q, q, **call))
    bias = torch.randn(TOKENS, TOKENS)
    expected = at.ring_attention(q, q, q, attn_bias=bias, window=(3, 0))
    assert torch.equal(module(q, q, q, attn_bias=bias), expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        module(q, q, q, dropout=1)
