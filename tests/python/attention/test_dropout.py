"""Dropout of probabilities and softcap, against autograd through a dense formula."""

from __future__ import annotations

import annulus
import annulus.torch as at
import numpy as np
import pytest
import torch
from annulus import ConfigError
from support import dropout
from support.reference import relative_rms
from torch.utils.checkpoint import checkpoint

P = 0.3
HOLES = torch.arange(50).expand(2, -1) % 3 == 1


def tensors(
    tokens: int = 50, dtype: torch.dtype = torch.float32, kv_heads: int = 2, dim: int = 16
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and the gradient of o."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, h, dim) for h in (4, kv_heads, kv_heads, 4)]
    q, k, v, do = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in (q, k, v)], do


def results(function, inputs, do):
    o = function(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def expected(inputs, do, *, p: float = 0.0, seed: int = 0, **options):
    wide = [x.detach().double().requires_grad_() for x in inputs]
    batch, tokens, heads, _ = inputs[0].shape
    factors = dropout.kept(seed, p, batch, heads, tokens, inputs[1].shape[1]) if p else None
    return results(
        lambda *x: dropout.attention(*x, factors=factors, **options), wide, do.double()
    )


def check(found, wanted, limit: float = 2e-6) -> None:
    for name, f, w in zip(("o", "dq", "dk", "dv"), found, wanted):
        assert relative_rms(f, w) < limit, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("p", [0.0, P, 0.9])
def test_equals_autograd_through_the_dense_formula(p: float, softcap: float, causal: bool) -> None:
    inputs, do = tensors()
    options = {"softcap": softcap, "is_causal": causal}
    found = results(
        lambda *x: at.ring_attention(*x, dropout_p=p, dropout_seed=2**40 + 3, **options), inputs, do
    )
    check(found, expected(inputs, do, p=p, seed=2**40 + 3, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype: torch.dtype) -> None:
    inputs, do = tensors(dtype=dtype)
    options = {"softcap": 5.0, "is_causal": True}
    found = results(
        lambda *x: at.ring_attention(*x, dropout_p=P, dropout_seed=4, **options), inputs, do
    )
    check(found, expected(inputs, do, p=P, seed=4, **options), 2e-2)


def test_float64_is_the_reference() -> None:
    inputs, do = tensors(20)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    options = {"softcap": 2.0, "is_causal": True}
    found = results(
        lambda *x: at.ring_attention(*x, dropout_p=P, dropout_seed=4, **options), wide, do.double()
    )
    check(found, expected(wide, do, p=P, seed=4, **options), 1e-12)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("placement", ["contiguous", "striped"])
def test_attention_of_arrays(ranks: int, placement: str) -> None:
    inputs, do = tensors()
    q, k, v = (x.detach().numpy() for x in inputs)
    options = {"softcap": 3.0, "dropout_p": P, "dropout_seed": 9, "is_causal": True}
    ring = {"ranks": ranks, "placement": placement}
    o, lse = annulus.attention(q, k, v, return_lse=True, **options, **ring)
    grads = annulus.attention_backward(q, k, v, o, lse, do.numpy(), **options, **ring)
    wanted = expected(inputs, do, p=P, seed=9, softcap=3.0, is_causal=True)
    check([torch.from_numpy(x) for x in (o, *grads)], wanted)


def test_attention_of_arrays_needs_a_seed() -> None:
    x = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(ConfigError, match="there is no dropout_seed"):
        annulus.attention(x, x, x, dropout_p=0.1)
    assert annulus.attention(x, x, x, dropout_seed=3).shape == x.shape


def test_manual_seed_governs_the_seed() -> None:
    inputs, _ = tensors()

    def run():
        return at.ring_attention(*inputs, dropout_p=P)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    again = run()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    drawn = torch.randint(2**63 - 1, (), dtype=torch.int64)
    assert torch.equal(first, at.ring_attention(*inputs, dropout_p=P, dropout_seed=drawn))
    state = torch.get_rng_state()
    at.ring_attention(*inputs)  # nothing is drawn
    at.ring_attention(*inputs, dropout_p=P, dropout_seed=5)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_mask(reentrant: bool) -> None:
    inputs, do = tensors()

    def attend(q, k, v):
        return at.ring_attention(q, k, v, dropout_p=P)

    torch.manual_seed(2)
    plain = results(attend, inputs, do)
    torch.manual_seed(2)
    again = results(lambda *x: checkpoint(attend, *x, use_reentrant=reentrant), inputs, do) if not reentrant else None
    if reentrant:
        leaves = [x.detach().requires_grad_() for x in inputs]
        o = checkpoint(attend, *leaves, use_reentrant=True)
        o.backward(do)
        again = [o.detach(), *(x.grad for x in leaves)]
    for a, b in zip(plain, again):
        assert torch.equal(a, b)


def test_compiled_calls_draw_anew_and_use_one_mask_in_both_passes() -> None:
    inputs, do = tensors()
    compiled = torch.compile(
        lambda q, k, v, seed: at.ring_attention(q, k, v, dropout_p=P, dropout_seed=seed, softcap=4.0),
        fullgraph=True,
        backend="aot_eager",
    )
    for seed in (1, 2):
        found = results(lambda *x: compiled(*x, torch.tensor(seed)), inputs, do)
        check(found, expected(inputs, do, p=P, seed=seed, softcap=4.0))
    drawing = torch.compile(
        lambda *x: at.ring_attention(*x, dropout_p=P), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(3)
    first = results(drawing, inputs, do)
    second = results(drawing, inputs, do)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    check(first, expected(inputs, do, p=P, seed=int(seed)))


def test_compiled_calls_take_seeds_as_numbers() -> None:
    """Dynamo makes a variable of the second number, and every number needs a graph of its own."""
    inputs, _ = tensors()

    def attend(q, k, v, seed):
        return at.ring_attention(q, k, v, dropout_p=P, dropout_seed=seed)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for seed in (1, 5, 9):
        assert torch.equal(compiled(*inputs, seed), attend(*inputs, seed))
    with pytest.raises(ConfigError, match="dropout_seed is -5"):
        compiled(*inputs, torch.tensor(-5))


def test_seed_forms() -> None:
    inputs, _ = tensors()
    o = at.ring_attention(*inputs, dropout_p=P, dropout_seed=7)
    for seed in (np.int64(7), torch.tensor(7), torch.tensor([7], dtype=torch.int32)):
        assert torch.equal(o, at.ring_attention(*inputs, dropout_p=P, dropout_seed=seed))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropout_p": 1.0}, "dropout_p is 1.0: a number from 0 to less than 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1"),
        ({"dropout_p": float("nan")}, "dropout_p is nan"),
        ({"dropout_p": "0.1"}, "dropout_p is '0.1'"),
        ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed is -1"),
        ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed is 1.5"),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor(1.5)}, "dropout_seed is a tensor"),
        ({"dropout_p": 0.1, "dropout_seed": torch.arange(2)}, "one whole number"),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor(-5)}, "dropout_seed is -5"),
        (
            {"dropout_p": 0.1, "dropout_seed": torch.tensor(2**64 - 1, dtype=torch.uint64)},
            f"dropout_seed is {2**64 - 1}: a whole number from 0 to 2",
        ),
        (
            {"dropout_p": 0.1, "dropout_seed": torch.tensor(-5), "attn_bias": torch.zeros(50, 50)},
            "dropout_seed is -5",
        ),
        ({"dropout_p": torch.tensor([0.1, 0.2])}, "dropout_p is tensor"),
        ({"dropout_p": torch.tensor(0.1, device="meta")}, "dropout_p is tensor"),
        (
            {"softcap": torch.tensor([1.0, 2.0]), "key_padding_mask": torch.zeros(2, 50)},
            "softcap is tensor",
        ),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"softcap": 1e-20}, "softcap is 1e-20"),
        ({"softcap": 2.0, "key_padding_mask": HOLES}, "softcap would also be applied to the columns"),
        (
            {"softcap": 2.0, "key_padding_mask": torch.zeros_like(HOLES), "cu_seqlens": [0, 50]},
            "softcap would also be applied to the columns.*beside cu_seqlens",
        ),
    ],
)
def test_wrong_values(options: dict[str, object], text: str) -> None:
    inputs, _ = tensors()
    with pytest.raises(ConfigError, match=text):
        at.ring_attention(*inputs, **options)


def test_softcap_with_a_key_padding_mask() -> None:
    """A mask that leaves one range of keys is lengths, to which no softcap is applied."""
    inputs, _ = tensors()
    padded = (torch.arange(50) >= 30) | (torch.arange(50) < 4)
    for mask in (padded, torch.zeros(50).masked_fill(padded, -torch.inf)):
        o = at.ring_attention(*inputs, key_padding_mask=mask[None].expand(2, -1), softcap=2.0)
        q, k, v = inputs
        short = at.ring_attention(q, k[:, 4:30], v[:, 4:30], softcap=2.0)
        torch.testing.assert_close(o, short, rtol=1e-4, atol=1e-5)


def test_dropout_with_a_key_padding_mask() -> None:
    inputs, _ = tensors()
    padded = torch.arange(50) >= 30
    o = at.ring_attention(
        *inputs, key_padding_mask=padded[None].expand(2, -1), dropout_p=P, dropout_seed=6
    )
    q, k, v = inputs
    short = at.ring_attention(q, k[:, :30], v[:, :30], dropout_p=P, dropout_seed=6)
    torch.testing.assert_close(o, short, rtol=1e-4, atol=1e-5)


class TestModules:
    def test_drop_in_training_only(self) -> None:
        inputs, _ = tensors()
        module = at.RingDilatedAttention(dropout_p=P)
        dropped = module(*inputs, dropout_seed=8)
        assert torch.equal(dropped, at.ring_attention(*inputs, dropout_p=P, dropout_seed=8))
        assert torch.equal(module.eval()(*inputs), at.ring_attention(*inputs))

    def test_multihead_drops_like_the_dense_formula(self) -> None:
        torch.manual_seed(0)
        module = at.RingMultiheadDilatedAttention(64, 4, dropout=P, batch_first=True)
        x = torch.randn(2, 40, 64)
        out, _ = module(x, x, x, need_weights=False, dropout_seed=11)
        q, k, v = module._project(x, x, x)
        factors = dropout.kept(11, P, 2, 4, 40, 40)
        heads = dropout.attention(q, k, v, factors=factors)
        torch.testing.assert_close(out, module.out_proj(heads.flatten(-2)), rtol=1e-4, atol=1e-5)
        plain = torch.nn.MultiheadAttention(64, 4, dropout=P, batch_first=True)
        plain.load_state_dict(module.state_dict())
        module.eval(), plain.eval()
        torch.testing.assert_close(module(x, x, x)[0], plain(x, x, x)[0], rtol=1e-4, atol=1e-5)
        assert repr(module.dropout) == repr(plain.dropout)

    def test_weights_are_capped(self) -> None:
        torch.manual_seed(0)
        module = at.RingMultiheadDilatedAttention(64, 4, softcap=0.5, batch_first=True)
        x = torch.randn(2, 20, 64)
        out, weights = module(x, x, x, need_weights=True, average_attn_weights=False)
        _, _, v = module._project(x, x, x)
        heads = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        torch.testing.assert_close(out, module.out_proj(heads.flatten(-2)), rtol=1e-4, atol=1e-5)

    def test_advanced_module_repeats_the_mask_under_checkpointing(self) -> None:
        x = torch.randn(2, 30, 64)
        grads = []
        for again in (False, True):
            torch.manual_seed(5)
            module = at.RingAdvancedDistributedDilatedAttention(
                64, 4, dropout=P, use_gradient_checkpointing=again
            )
            torch.manual_seed(6)
            leaf = x.clone().requires_grad_()
            module(leaf, leaf, leaf, need_weights=False)[0].square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)

    @pytest.mark.parametrize("wrong", [1.0, -0.5, "a"])
    def test_refuse_wrong_shares(self, wrong: object) -> None:
        with pytest.raises(ConfigError, match="dropout is"):
            at.RingMultiheadDilatedAttention(64, 4, dropout=wrong)
        with pytest.raises(ConfigError, match="another name of dropout"):
            at.RingMultiheadDilatedAttention(64, 4, dropout_p=0.1)
