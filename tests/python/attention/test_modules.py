"""The modules, compared with torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402
from annulus import ConfigError  # noqa: E402
from annulus.torch import RingDilatedAttention, RingMultiheadDilatedAttention  # noqa: E402
from torch import nn  # noqa: E402

LONGNET = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
PADDING = torch.arange(50)[None] > torch.tensor([[49], [30], [7]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(50)


def pair(
    embed_dim: int = 64, heads: int = 4, **options
) -> tuple[nn.MultiheadAttention, RingMultiheadDilatedAttention]:
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(embed_dim, heads, **options)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    ours = RingMultiheadDilatedAttention(embed_dim, heads, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check_equal(theirs: nn.Module, ours: nn.Module, inputs: list[torch.Tensor], **call) -> None:
    leaves = [x for x in dict.fromkeys(inputs)]
    o1, w1 = theirs(*inputs, **call)
    o2, w2 = ours(*inputs, **call)
    assert o1.shape == o2.shape
    torch.testing.assert_close(o2, o1, rtol=1e-5, atol=1e-5)
    assert (w1 is None) == (w2 is None)
    if w1 is not None:
        torch.testing.assert_close(w2, w1, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(o1)
    g1 = torch.autograd.grad(o1, leaves + list(theirs.parameters()), weight)
    g2 = torch.autograd.grad(o2, leaves + list(ours.parameters()), weight)
    for a, b in zip(g1, g2):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": CAUSAL},
        {"attn_mask": CAUSAL == -torch.inf, "need_weights": False},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.zeros(50, 50)},
        {"key_padding_mask": PADDING},
        {
            "key_padding_mask": torch.zeros(3, 50).masked_fill(PADDING, -torch.inf),
            "need_weights": False,
        },
        {"key_padding_mask": torch.randn(3, 50), "need_weights": False},
        {"key_padding_mask": PADDING, "attn_mask": CAUSAL == -torch.inf, "need_weights": False},
    ],
    ids=lambda c: "+".join(c) or "plain",
)
def test_equals_multihead_attention(bias: bool, batch_first: bool, call: dict) -> None:
    theirs, ours = pair(bias=bias, batch_first=batch_first)
    x = torch.randn((3, 50, 64) if batch_first else (50, 3, 64), requires_grad=True)
    check_equal(theirs, ours, [x, x, x], **call)


def test_equals_multihead_attention_without_a_batch_and_for_separate_inputs() -> None:
    theirs, ours = pair()
    x = torch.randn(50, 64, requires_grad=True)
    check_equal(theirs, ours, [x, x, x])
    check_equal(theirs, ours, [torch.randn(50, 3, 64, requires_grad=True) for _ in range(3)])
    theirs, ours = pair(kdim=24, vdim=40)
    inputs = [torch.randn(50, 3, d, requires_grad=True) for d in (64, 24, 40)]
    check_equal(theirs, ours, inputs)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(("head_dim", "heads"), [(1, 1), (1, 4), (2, 3), (5, 2), (33, 2), (509, 1)])
@pytest.mark.parametrize("call", [{}, {"key_padding_mask": PADDING}], ids=["plain", "padded"])
def test_takes_any_head_dim(head_dim: int, heads: int, call: dict) -> None:
    theirs, ours = pair(head_dim * heads, heads, batch_first=True)
    x = torch.randn(3, 50, head_dim * heads, requires_grad=True)
    check_equal(theirs, ours, [x, x, x], **call)


def test_state_dicts_go_both_ways() -> None:
    theirs, ours = pair()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(a, b)
    assert isinstance(ours, nn.MultiheadAttention)


def test_rows_without_any_key_give_zeros() -> None:
    _, ours = pair(batch_first=True, bias=False)
    x = torch.randn(2, 50, 64, requires_grad=True)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[1] = True
    o, _ = ours(x, x, x, key_padding_mask=mask, need_weights=False)
    assert torch.equal(o[1], torch.zeros(50, 64))
    o.sum().backward()
    assert torch.equal(x.grad[1], torch.zeros(50, 64)) and x.grad[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "biases", [(60000.0,), (-60000.0,), (30000.0, 20000.0), (-20000.0, -30000.0)], ids=str
)
def test_large_biases_are_added_in_every_dtype(biases: tuple, dtype: torch.dtype) -> None:
    """Divided by the scale they exceed the range of float16. Two biases keep their order, also if all keys have one."""
    theirs = nn.MultiheadAttention(64, 1, batch_first=True, dtype=dtype)
    ours = RingMultiheadDilatedAttention(64, 1, batch_first=True, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    mask = torch.full((2, 9), biases[-1], dtype=dtype) if len(biases) > 1 else x.new_zeros(2, 9)
    mask[:, 3] = biases[0]
    expected, _ = theirs(x, x, x, key_padding_mask=mask, need_weights=False)
    found, _ = ours(x, x, x, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_and_dilation(dtype: torch.dtype) -> None:
    """Padded keys do not change the outputs."""
    torch.manual_seed(3)
    ours = RingMultiheadDilatedAttention(64, 4, batch_first=True, dtype=dtype, **LONGNET)
    x = torch.randn(3, 50, 64).to(dtype)
    call = {"key_padding_mask": PADDING, "need_weights": False}
    o, _ = ours(x, x, x, **call)
    other = x.masked_fill(PADDING[..., None], 7.0)
    o2, _ = ours(other, other, other, **call)
    assert torch.equal(o[~PADDING], o2[~PADDING])
    full, _ = ours(x, x, x, need_weights=False)
    assert torch.equal(
        o[0], ours(x[:1], x[:1], x[:1], **call | {"key_padding_mask": PADDING[:1]})[0][0]
    )
    torch.testing.assert_close(
        o[0], full[0], rtol=0.02, atol=2e-6 if dtype == torch.float32 else 0.02
    )


def encoder(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_works_in_a_transformer_encoder(mode: str) -> None:
    torch.manual_seed(2)
    theirs = encoder(nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True))
    ours = copy.deepcopy(theirs)
    for layer in ours.layers:
        mine = RingMultiheadDilatedAttention(64, 4, batch_first=True)
        mine.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = mine
    getattr(theirs, mode)()
    getattr(ours, mode)()
    x = torch.randn(3, 50, 64)
    with torch.set_grad_enabled(mode == "train"):
        for call in (
            {},
            {"mask": CAUSAL},
            {"mask": CAUSAL, "is_causal": True},
            {"src_key_padding_mask": PADDING},
        ):
            a, b = theirs(x, **call), ours(x, **call)
            keep = (
                ~PADDING if "src_key_padding_mask" in call else torch.ones(3, 50, dtype=torch.bool)
            )
            torch.testing.assert_close(b[keep], a[keep], rtol=1e-5, atol=1e-5)


def test_dilation_is_not_bypassed_by_the_fused_layer() -> None:
    """In evaluation mode, nn.TransformerEncoderLayer would compute dense attention with the weights itself."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    layer.self_attn = RingMultiheadDilatedAttention(64, 4, batch_first=True, **LONGNET)
    stack = encoder(layer)  # copies the layer
    x = torch.randn(3, 50, 64)
    expected = stack(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(stack.eval()(x), expected, rtol=1e-6, atol=1e-6)


def test_trains_in_an_encoder_layer() -> None:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    layer.self_attn = RingMultiheadDilatedAttention(
        64, 4, batch_first=True, is_causal=True, **LONGNET
    )
    x, y = torch.randn(2, 40, 64), torch.randn(2, 40, 64)
    optimizer = torch.optim.Adam(layer.parameters(), 3e-3)
    losses = []
    for _ in range(40):
        loss = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_magneto_options() -> None:
    torch.manual_seed(5)
    plain = RingMultiheadDilatedAttention(64, 4, batch_first=True)
    magneto = RingMultiheadDilatedAttention(
        64, 4, batch_first=True, layer_norm=True, gamma_init=0.5
    )
    assert set(magneto.state_dict()) - set(plain.state_dict()) == {
        "layer_norm.weight",
        "layer_norm.bias",
    }
    q, k, v = magneto.in_proj_weight.chunk(3)
    deviation = (2 / (64 + 64)) ** 0.5  # Xavier's
    for weight, gain in ((q, 1), (k, 1), (v, 0.5), (magneto.out_proj.weight, 0.5)):
        assert weight.std().item() == pytest.approx(gain * deviation, rel=0.05)
    x = torch.randn(2, 30, 64)
    heads: list[torch.Tensor] = []
    magneto.layer_norm.register_forward_hook(lambda m, i, o: heads.append(o))
    magneto(x, x, x, need_weights=False)
    torch.testing.assert_close(heads[0].mean(-1), torch.zeros(2, 30), atol=1e-5, rtol=0)


def test_ring_dilated_attention_is_ring_attention() -> None:
    q, k, v = (torch.randn(1, 40, 4, 16) for _ in range(3))
    module = RingDilatedAttention([8, 16], [1, 2], is_causal=True, offsets="interleaved")
    assert torch.equal(
        module(q, k, v),
        at.ring_attention(q, k, v, is_causal=True, offsets="interleaved", **LONGNET),
    )
    assert torch.equal(
        module(q, k, v, is_causal=False),
        at.ring_attention(q, k, v, offsets="interleaved", **LONGNET),
    )
    assert not list(module.parameters()) and "dilation_rates=[1, 2]" in repr(module)


def test_modules_can_be_stored() -> None:
    _, ours = pair(batch_first=True)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.randn(2, 20, 64)
    assert torch.equal(again(x, x, x)[0], ours(x, x, x)[0])
    again._reset_parameters()  # nn.MultiheadAttention's, which people call
    assert not torch.equal(again.in_proj_weight, ours.in_proj_weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"add_bias_kv": 1}, "add_bias_kv is 1"),
        ({"add_zero_attn": None}, "add_zero_attn is None"),
        ({"num_heads": 5}, "num_heads 5"),
        ({"embed_dim": 1026, "num_heads": 2}, "embed_dim / num_heads is 513: at most 512"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": True}, "num_heads is True"),
        ({"num_heads": 4.0}, "num_heads is 4.0"),
        ({"embed_dim": -64}, "embed_dim is -64"),
        ({"embed_dim": None}, "embed_dim is None"),
        ({"embed_dim": 2**40}, "embed_dim is 1099511627776"),
        ({"kdim": 0}, "kdim is 0"),
        ({"vdim": "64"}, "vdim is '64'"),
        ({"bias": "no"}, "bias is 'no'"),
        ({"batch_first": 1}, "batch_first is 1"),
        ({"layer_norm": None}, "layer_norm is None"),
        ({"layer_norm": True, "layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
        ({"layer_norm": True, "layer_norm_eps": -1e-5}, "layer_norm_eps is -1e-05"),
        ({"gamma_init": float("inf")}, "gamma_init is inf"),
        ({"gamma_init": -1.0}, "gamma_init is -1.0"),
        ({"segment_lengths": {16, 8}, "dilation_rates": [1, 2]}, "segment_lengths is {.*sequence"),
        ({"segment_lengths": [16], "dilation_rates": 1}, "dilation_rates is 1"),
    ],
)
def test_unsupported_options_are_errors(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RingMultiheadDilatedAttention(**({"embed_dim": 64, "num_heads": 4} | options))


def test_unsupported_calls_are_errors() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(3, 50, 64)
    with pytest.raises(ConfigError, match=r"\[50, 50\]"):
        ours(x, x, x, attn_mask=torch.zeros(49, 50))
    with pytest.raises(ConfigError, match="key_padding_mask"):
        ours(x, x, x, key_padding_mask=torch.zeros(3, 49, dtype=torch.bool))
    wide = RingMultiheadDilatedAttention(512, 1, batch_first=True)
    with pytest.raises(ConfigError, match="at most 509"):
        wide(*[torch.randn(3, 50, 512)] * 3, key_padding_mask=torch.arange(50).expand(3, -1) % 2 == 1)
    wide(*[torch.randn(3, 50, 512)] * 3, key_padding_mask=PADDING)
    with pytest.raises(ConfigError, match="key has 40 tokens, value 50"):
        ours(x, x[:, :40], x)
    # A tokenizer's attention_mask: nn.MultiheadAttention refuses it, too.
    for mask in ((~PADDING).long(), (~PADDING).to(torch.uint8)):
        with pytest.raises(ConfigError, match="key_padding_mask is torch.*attention_mask == 0"):
            ours(x, x, x, key_padding_mask=mask)
    for name in ("key_padding_mask", "attn_mask"):
        with pytest.raises(ConfigError, match=f"{name} is a ndarray"):
            ours(x, x, x, **{name: PADDING.numpy()})
    with pytest.raises(ConfigError, match="attn_mask is torch.int64"):
        ours(x, x, x, attn_mask=torch.zeros(50, 50, dtype=torch.int64))


@pytest.mark.parametrize("leading", [(), (12,), (3,), (1,), (3, 4), (1, 1)])
def test_takes_attn_masks_of_the_shapes_that_multihead_attention_takes(leading: tuple) -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(3, 50, 64)
    mask = CAUSAL.expand(*leading, 50, 50)
    if leading in ((), (12,)):  # 3 sequences x 4 heads
        found, expected = (m(x, x, x, attn_mask=mask)[0] for m in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return
    with pytest.raises((RuntimeError, AssertionError)):
        theirs(x, x, x, attn_mask=mask)
    with pytest.raises(ConfigError, match="attn_mask"):
        ours(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_have_the_dtype_of_the_module(dtype: torch.dtype) -> None:
    theirs, ours = (m.to(dtype) for m in pair(batch_first=True))
    x = torch.randn(3, 50, 64).to(dtype)
    for call in ({}, {"key_padding_mask": PADDING}):
        (_, found), (_, expected) = ours(x, x, x, **call), theirs(x, x, x, **call)
        assert found.dtype == expected.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


def test_swapped_into_an_encoder_that_makes_nested_tensors() -> None:
    """An encoder decides on nested tensors when it is constructed, before its layers are replaced."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 20, 64)
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[0, 15:] = True
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        ours = at.RingMultiheadDilatedAttention(64, 4, batch_first=True)
        ours.load_state_dict(encoder.layers[0].self_attn.state_dict())
        encoder.layers[0].self_attn = ours
        found = encoder.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("low", [-5000.0, -10000.0, -1e6])
def test_keys_with_low_biases_are_not_ignored(low: float) -> None:
    theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    ours = at.RingMultiheadDilatedAttention(64, 4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 64)
    mask = torch.full((2, 6), low)
    mask[1, 3:] = -torch.inf
    expected, found = (m(x, x, x, key_padding_mask=mask)[0] for m in (theirs, ours))
    # A score of about 1 beside 1e6 has steps of a sixteenth.
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 if low > -1e5 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_keys_are_zeros_at_any_scale(dtype: torch.dtype) -> None:
    module = at.RingMultiheadDilatedAttention(64, 4, batch_first=True, scale=0.01, bias=False).to(
        dtype
    )
    x = torch.randn(2, 40, 64).to(dtype)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1] = True
    o, weights = module(x, x, x, key_padding_mask=padding)
    assert torch.equal(o[1], torch.zeros_like(o[1])) and torch.equal(
        weights[1], torch.zeros_like(weights[1])
    )
    alone, _ = module(x[:1], x[:1], x[:1])
    torch.testing.assert_close(
        o[0], alone[0], rtol=0.02, atol=1e-5 if dtype == torch.float32 else 0.01
    )


def test_weights_are_those_inside_the_window() -> None:
    """Also without is_causal, and with a mask of keys."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(3, 50, 64)
    distance = torch.arange(50) - torch.arange(50)[:, None]
    # Token 0 is not padding, and nobody is left without keys.
    padding = PADDING & (torch.arange(50) % 5 != 0)
    for window, causal in (((7, 2), False), ((7, 0), True), ((7, -1), False)):
        ours = RingMultiheadDilatedAttention(64, 4, batch_first=True, window=list(window))
        ours.load_state_dict(theirs.state_dict())
        hidden = (distance < -window[0]) | (distance > (window[1] if window[1] >= 0 else 50))
        expected, weights = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden)
        found, ours_weights = ours(x, x, x, key_padding_mask=padding, is_causal=causal)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours_weights, weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"cu_seqlens": [0, 20, 50]}, {"query_start": 3}, LONGNET])
def test_weights_of_other_patterns_are_returned_if_they_are_asked_for(options: dict) -> None:
    """Their matrix is as large as the sequence is long, squared."""
    module = RingMultiheadDilatedAttention(64, 4, batch_first=True, **options)
    x = torch.randn(2, 50, 64)
    assert module(x, x, x)[1] is None
    weights = module(x, x, x, need_weights=True)[1]
    assert weights.shape == (2, 50, 50)


def test_modules_take_padding_with_each_call_only() -> None:
    """They would not use a mask that they were given when they were made."""
    for make in (RingDilatedAttention, lambda **k: RingMultiheadDilatedAttention(64, 4, **k)):
        with pytest.raises((ConfigError, TypeError), match="key_padding_mask"):
            make(key_padding_mask=PADDING)


def test_windows_are_options_of_every_module() -> None:
    q = torch.randn(1, 40, 4, 16)
    expected = at.ring_attention(q, q, q, is_causal=True, window=(9, 0))
    for kind in (RingDilatedAttention, at.variants.StandardRingAttention):
        module = kind(window=[9, 0], is_causal=True)
        assert torch.equal(module(q, q, q), expected) and "window=(9, 0)" in repr(module)
        assert torch.equal(copy.deepcopy(module)(q, q, q), expected)
    with pytest.raises(ConfigError, match="window"):
        RingDilatedAttention(window=(9, 1))(q, q, q, is_causal=True)
    model = at.LongNetLM(256, 2, 64, 4, window=(9, 0))
    tokens = torch.randint(256, (1, 40))
    changed = tokens.clone()
    changed[:, 0] = 255 - changed[:, 0]
    # A layer looks back by 9 tokens, two by 18.
    assert torch.equal(model(tokens)[:, 19:], model(changed)[:, 19:])
    assert not torch.equal(model(tokens)[:, 18], model(changed)[:, 18])


@pytest.mark.parametrize("keys", [7, 90])
def test_cross_attention_is_pytorchs(keys: int) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    ours = RingMultiheadDilatedAttention(64, 4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    query, memory = torch.randn(3, 50, 64), torch.randn(3, keys, 64)
    padding = torch.arange(keys) >= torch.tensor([[5], [keys], [3]])
    for mask in (None, padding):
        expected, weights = theirs(query, memory, memory, key_padding_mask=mask)
        found, ours_weights = ours(query, memory, memory, key_padding_mask=mask)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours_weights, weights, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="query_start"):
        ours(query, memory, memory, is_causal=True)
    with pytest.raises(ConfigError, match="key has 7|key has 90"):
        ours(query, memory, query)
