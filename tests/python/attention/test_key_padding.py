"""key_padding_mask of ring_attention, compared with PyTorch's attention under a dense mask."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402
from annulus import ConfigError, Placement  # noqa: E402
from annulus.torch import _functional  # noqa: E402
from support.dense_masks import check, tensors  # noqa: E402

TOKENS = 75


def padding(tokens: int = TOKENS) -> torch.Tensor:
    """Right padding in one batch entry, left padding and holes in the other; True: ignored."""
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[0, tokens - tokens // 3 :] = True
    mask[1, : tokens // 5] = True
    mask[1, ::7] = True
    return mask


def gradients(inputs, **call):
    q, k, v, do = inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = at.ring_attention(*leaves, **call)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_ignored_keys_are_the_dense_mask(dtype: torch.dtype, causal: bool) -> None:
    inputs = tensors(TOKENS, dtype)
    hidden = padding()[:, None].expand(2, TOKENS, TOKENS).clone()
    if causal:
        hidden |= torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    found = gradients(inputs, key_padding_mask=padding(), is_causal=causal)
    sees = ~hidden
    rows = sees.any(-1)
    assert not found[0][~rows].any() and not found[1][~rows].any(), "rows without keys are zeros"
    # SDPA gives NaN to rows without keys: they get a key, and no gradient.
    sees[~rows] = True
    inputs[3][~rows] = 0
    found = gradients(inputs, key_padding_mask=padding(), is_causal=causal)
    exact = [x.clone() for x in found]
    exact[0][~rows] = 0
    q, k, v, do = inputs
    for entry in range(2):
        part = [x[entry : entry + 1] for x in inputs]
        mine = [x[entry : entry + 1].clone() for x in found]
        seen = rows[entry]
        part[0], part[3] = part[0][:, seen], part[3][:, seen]
        mine[0], mine[1] = mine[0][:, seen], mine[1][:, seen]
        check(mine, part, sees[entry][seen])


def test_a_bias_is_added_to_the_scores() -> None:
    q, k, v, do = tensors(TOKENS, torch.float32, kv_heads=4)
    bias = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    bias[0, 50:] = -torch.inf
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    o = at.ring_attention(*leaves[:3], key_padding_mask=leaves[3], is_causal=True)
    found = torch.autograd.grad(o, leaves, do)
    peers = [x.clone().double().requires_grad_() for x in (q, k, v, bias)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *peers[:2]) * 24**-0.5 + peers[3][:, None, None]
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), peers[2])
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
    for f, e in zip(found, torch.autograd.grad(expected, peers, do.double())):
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-5)


def test_the_log_sum_exp_leaves_ignored_keys_out() -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32, kv_heads=4)
    mask = padding()
    mask[0] = True
    o, lse = at.ring_attention(q, k, v, key_padding_mask=mask, return_lse=True)
    assert not o[0].any() and (lse[0] == -torch.inf).all()
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) * 24**-0.5
    exact = scores.masked_fill(mask[:, None, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse[1].double(), exact[1], rtol=1e-5, atol=1e-5)


def test_an_ignored_key_never_leaks() -> None:
    q, k, v, do = tensors(TOKENS, torch.float32)
    before = gradients((q, k, v, do), key_padding_mask=padding())
    for value in (1e4, 1e38, float("inf"), float("nan")):
        k2, v2 = k.clone(), v.clone()
        k2[padding()] = value
        v2[padding()] = -value
        after = gradients((q, k2, v2, do), key_padding_mask=padding())
        for a, b in zip(before, after):
            assert torch.equal(a, b)


def test_masks_combine() -> None:
    """With windows, documents, sinks and other numbers of keys."""
    q, k, v, do = tensors(20, torch.float32, keys=TOKENS)
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -1.0])
    call = {"window": (30, 0), "cu_seqlens": [0, 8, 20], "cu_seqlens_k": [0, 40, TOKENS]}
    call |= {"query_start": [32, 23], "sinks": sinks}
    mask = padding()
    found = gradients((q, k, v, do), key_padding_mask=mask, **call)
    exact = gradients(
        [x.double() for x in (q, k, v, do)], key_padding_mask=mask, **{**call, "sinks": sinks.double()}
    )
    for f, e in zip(found, exact):
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-5)


def test_compiled_and_autocast_calls_are_the_same() -> None:
    q, k, v, do = inputs = tensors(TOKENS, torch.float32)
    expected = gradients(inputs, key_padding_mask=padding())

    def function(*x: torch.Tensor) -> torch.Tensor:
        return at.ring_attention(*x, key_padding_mask=padding())

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = compiled(*leaves)
    for a, b in zip((o, *torch.autograd.grad(o, leaves, do)), expected):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.float16):
        half = function(q, k, v)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected[0], rtol=1e-2, atol=1e-2)


def one_range(tokens: int = TOKENS) -> torch.Tensor:
    """Padding on either side, or of all keys but one."""
    at = torch.arange(tokens)
    return torch.stack([(at < 4) | (at >= tokens - 9), at != tokens // 2])


@pytest.mark.parametrize("placement", ["hilbert", "explicit"])
@pytest.mark.parametrize("holes", [False, True])
def test_masks_are_of_the_keys_as_they_are_passed(placement: str, holes: bool) -> None:
    """In one process, too, if a placement says that tokens are in another order."""
    if placement == "explicit":
        placement = Placement.explicit(TOKENS, [[range(40, TOKENS), range(0, 40, 2), range(1, 40, 2)]])
    inputs = tensors(TOKENS, torch.float32)
    mask = padding() if holes else one_range()
    expected = gradients([x.double() for x in inputs], key_padding_mask=mask, window=(20, 3))
    moved = [at.shard(x, placement=placement) for x in inputs]
    own = at.shard(mask, placement=placement)
    found = gradients(moved, key_padding_mask=own, window=(20, 3), placement=placement)
    for f, e in zip(found, expected):
        torch.testing.assert_close(at.unshard(f, placement=placement).double(), e, rtol=1e-4, atol=1e-5)


def test_floating_point_masks_of_padding_are_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.TransformerEncoder makes them of boolean masks."""
    inputs = tensors(TOKENS, torch.float32)
    expected = gradients(inputs, key_padding_mask=one_range())
    monkeypatch.setattr(_functional, "widened", None)
    mask = torch.zeros(2, TOKENS).masked_fill(one_range(), -torch.inf)
    for a, b in zip(gradients(inputs, key_padding_mask=mask), expected):
        assert torch.equal(a, b)


def test_a_learned_mask_that_begins_as_zeros_gets_its_gradient() -> None:
    q, k, v, do = tensors(TOKENS, torch.float32)
    bias = torch.zeros(2, TOKENS).masked_fill(one_range(), -torch.inf).requires_grad_()
    at.ring_attention(q, k, v, key_padding_mask=bias).backward(do)
    assert bias.grad.abs().max() > 0
    with torch.no_grad():
        o = at.ring_attention(q, k, v, key_padding_mask=bias)
    torch.testing.assert_close(o, at.ring_attention(q, k, v, key_padding_mask=one_range()), rtol=0, atol=0)


def test_masks_are_read_again() -> None:
    """Also if their memory was changed without the tensor's knowledge."""
    q, k, v, _ = tensors(TOKENS, torch.float32)
    mask = torch.zeros(2, TOKENS, dtype=torch.bool)
    for change in (mask.data.copy_, lambda x: mask.numpy().__setitem__(..., x.numpy()), mask.copy_):
        for values in (one_range(), padding(), torch.zeros_like(mask)):
            change(values)
            o = at.ring_attention(q, k, v, key_padding_mask=mask)
            assert torch.equal(o, at.ring_attention(q, k, v, key_padding_mask=values.clone()))


def test_autocast_casts_before_tensors_are_compared() -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    shared = torch.randn(2, 3, 2, 24)
    for more in ({}, {"shared_k": shared, "shared_v": shared.bfloat16()}):
        for mask in (one_range(), padding()):
            with torch.autocast("cpu", torch.bfloat16):
                o = at.ring_attention(q.bfloat16(), k, v, key_padding_mask=mask, **more)
            assert o.dtype == torch.bfloat16
            exact = at.ring_attention(q, k, v, key_padding_mask=mask, **{n: x.float() for n, x in more.items()})
            torch.testing.assert_close(o.float(), exact, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([True] * TOKENS, "a list: a torch.Tensor"),
        (torch.zeros(2, TOKENS + 1, dtype=torch.bool), r"is \[2, 76\]: \[2, 75\]"),
        (torch.zeros(TOKENS, dtype=torch.bool), r"is \[75\]: \[2, 75\]"),
        (torch.ones(2, TOKENS, dtype=torch.int64), "attention_mask == 0"),
    ],
)
def test_wrong_masks_are_config_errors(mask: object, words: str) -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    with pytest.raises(ConfigError, match=words):
        at.ring_attention(q, k, v, key_padding_mask=mask)
    with pytest.raises(ConfigError, match="scale"):
        at.ring_attention(q, k, v, key_padding_mask=padding(), scale=-1.0)
