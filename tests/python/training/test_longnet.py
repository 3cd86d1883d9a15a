"""LongNet models and the mean over tokens, in one process. On rings: test_training.py."""

from __future__ import annotations

import copy
import math
import types

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from annulus import ConfigError  # noqa: E402

BRANCHES = {"segment_lengths": [8, 32], "dilation_rates": [1, 2]}


def small(**options: object) -> at.LongNetLM:
    torch.manual_seed(0)
    return at.LongNetLM(50, 2, 32, 2, **{**BRANCHES, **options})


def some_tokens(tokens: int = 45) -> torch.Tensor:
    return torch.randint(50, (2, tokens), generator=torch.Generator().manual_seed(1))


def test_base_is_the_published_model() -> None:
    model = at.LongNetLM.base(device="meta")
    blocks = model.longnet.blocks
    assert len(blocks) == 12
    for block in blocks:
        assert (block.attention.embed_dim, block.attention.num_heads) == (768, 12)
        assert block.attention.attention.segment_lengths == (2048, 4096, 8192, 16384, 32768)
        assert block.attention.attention.dilation_rates == (1, 2, 4, 6, 12)
        assert block.attention.attention.is_causal
    assert not at.LongNet.base(device="meta").blocks[0].attention.attention.is_causal
    # 12 x (attention 4 w^2 + 4 w, MLP 8 w^2 + 5 w, two norms 4 w), the last norm, and embeddings.
    w = 768
    assert (
        sum(p.numel() for p in model.parameters()) == 12 * (12 * w * w + 13 * w) + 2 * w + 256 * w
    )
    assert len(at.LongNetLM.base(1000, layers=3, device="meta").longnet.blocks) == 3


def test_no_token_sees_later_ones() -> None:
    model, tokens = small(), some_tokens()
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 50
    difference = (model(changed) - logits).abs().amax((0, 2))
    assert (difference[:20] == 0).all()
    assert difference[20] > 0 and difference[21:].max() > 0


def test_first_loss_is_that_of_guessing() -> None:
    tokens = some_tokens(200)
    loss = F.cross_entropy(small()(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=0.1)


def test_rotary_scores_depend_on_distances_alone() -> None:
    q, k = torch.randn(
        2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )

    def score(at_q: int, at_k: int) -> float:
        turned = (
            at._rotary.rotate(x, at.rotary_table(torch.tensor([where]), 16))
            for x, where in ((q, at_q), (k, at_k))
        )
        a, b = turned
        return (a * b).sum().item()

    # Angles near a million are computed in float64; only their cosines are rounded to float32.
    assert score(1_000_007, 1_000_000) == pytest.approx(score(7, 0), abs=1e-5)
    assert abs(score(9, 0) - score(7, 0)) > 1e-3


def test_rotary_attention_is_that_of_turned_queries_and_keys() -> None:
    torch.manual_seed(3)
    module = at.RingMultiheadDilatedAttention(32, 2, batch_first=True)
    x = torch.randn(2, 21, 32)
    where = torch.randperm(100)[:21]
    found, weights = module(x, x, x, rotary=at.rotary_table(where, 16))
    q, k, v = (
        F.linear(x, module.in_proj_weight, module.in_proj_bias).view(2, 21, 3, 2, 16).unbind(2)
    )
    angles = where[:, None].double() * 10000.0 ** (-torch.arange(8).double() / 8)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(x: torch.Tensor) -> torch.Tensor:
        as_complex = torch.complex(*x.double().chunk(2, -1)) * turn[:, None]
        return torch.cat([as_complex.real, as_complex.imag], -1).float()

    q, k, v = (x.transpose(1, 2) for x in (turned(q), turned(k), v))
    o = F.scaled_dot_product_attention(q, k, v)
    expected = module.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    expected = (q @ k.mT / 4).softmax(-1).mean(1)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_encoder_knows_the_order_of_its_tokens() -> None:
    torch.manual_seed(4)
    encoder = at.LongNet(2, 32, 2)  # dense: tokens differ only by position
    x = torch.randn(1, 30, 32)
    order = torch.randperm(30)
    assert (encoder(x[:, order]) - encoder(x)[:, order]).abs().max() > 0.01


def test_padded_tokens_do_not_matter() -> None:
    torch.manual_seed(5)
    encoder = at.LongNet(2, 32, 2, **BRANCHES)
    x = torch.randn(1, 40, 32)
    padding = torch.arange(40)[None] >= 27
    found = encoder(x, key_padding_mask=padding)[:, :27]
    torch.testing.assert_close(found, encoder(x[:, :27]), rtol=1e-4, atol=1e-5)


def test_embeddings_are_tied_if_wanted() -> None:
    tied, apart = small(), small(tie_embeddings=False)
    assert tied.head.weight is tied.tokens.weight
    sizes = [sum(p.numel() for p in model.parameters()) for model in (tied, apart)]
    assert sizes[1] - sizes[0] == 50 * 32


@pytest.mark.parametrize("how", ["checkpointed", "compiled", "copied", "stored"])
def test_gradients_are_the_same(how: str, tmp_path) -> None:
    model, tokens = small(), some_tokens()
    other: object = copy.deepcopy(model)
    if how == "checkpointed":
        other = small(use_gradient_checkpointing=True)
    elif how == "compiled":
        other.compile(backend="aot_eager")
    elif how == "stored":
        torch.save(model, tmp_path / "model")
        other = torch.load(tmp_path / "model", weights_only=False)
    assert other.head.weight is other.tokens.weight
    for each in (model, other):
        each(tokens).square().mean().backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_checkpointing_computes_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = at.RingMultiheadDilatedAttention.forward
    counted = lambda *a, **k: (calls.append(1), forward(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(at.RingMultiheadDilatedAttention, "forward", counted)
    small(use_gradient_checkpointing=True)(some_tokens()).sum().backward()
    assert len(calls) == 4
    small()(some_tokens()).sum().backward()
    assert len(calls) == 6


def test_bf16_is_close_to_fp32() -> None:
    tokens = some_tokens()
    expected = small()(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = small()(tokens)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: at.LongNet(0, 32, 2), "layers is 0"),
        (lambda: at.LongNetLM(0, 1, 32, 2), "vocabulary is 0"),
        (lambda: at.LongNet(1, 30, 2), "width / heads is 15: an even number"),
        (lambda: at.LongNet(1, 2048, 2), "at most 512"),
        (lambda: at.LongNet(True, 32, 2), "layers is True"),
        (lambda: at.LongNet(2.5, 32, 2), "layers is 2.5"),
        (lambda: at.LongNet(1, "32", 2), "width is '32'"),
        (lambda: at.LongNet(1, 32, 2, mlp_width=0), "mlp_width is 0"),
        (lambda: at.LongNet(1, 32, 2, rotary_base=math.nan), "rotary_base is nan"),
        (lambda: at.LongNet(1, 32, 2, use_gradient_checkpointing=1), "checkpointing is 1"),
        (lambda: at.LongNetLM(2**60, 1, 32, 2), "vocabulary is 1152921504606846976"),
        (lambda: at.LongNetLM(9, 1, None, 2), "width is None"),
        (lambda: at.LongNetLM(9, 1, 32, 2, tie_embeddings="no"), "tie_embeddings is 'no'"),
        (lambda: at.LongNet(1, 32, 2)(torch.zeros(5, 32)), "2 axes"),
        (lambda: at.LongNet(1, 32, 2)(torch.zeros(1, 5, 32), n_global=7), "7"),
        (lambda: at.rotary_table(torch.zeros(3, 2), 16), "where"),
        (lambda: at.rotary_table(torch.arange(3), 15), "15"),
        (lambda: at.rotary_table(torch.arange(3), 16, base=0.0), "base"),
        (lambda: at.token_mean(torch.zeros(3), weights=torch.ones(2)), "weights"),
        (lambda: at.token_mean([1.0, 2.0]), "losses is a list"),
        (lambda: at.token_mean(torch.tensor([1, 2])), "losses is torch.int64"),
        (lambda: at.token_mean(torch.ones(2), weights=[1, 1]), "weights is a list"),
        (
            lambda: at.token_mean(torch.ones(2), weights=torch.ones(2, requires_grad=True)),
            "weights requires a gradient",
        ),
        (lambda: at.data_parallel(torch.nn.Linear(1, 1), bucket_size=0), "bucket_size is 0"),
        (lambda: at.data_parallel(torch.nn.Linear(1, 1), bucket_size=True), "bucket_size is True"),
        (lambda: at.data_parallel(torch.nn.Linear(1, 1), group="all"), "ProcessGroup"),
    ],
)
def test_invalid_arguments_are_refused(call: types.FunctionType, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_rotary_table_of_another_shard_is_refused() -> None:
    module = at.RingMultiheadDilatedAttention(32, 2, batch_first=True)
    x = torch.randn(1, 10, 32)
    for table in (at.rotary_table(torch.arange(9), 16), at.rotary_table(torch.arange(10), 32)):
        with pytest.raises(ConfigError, match="rotary_table"):
            module(x, x, x, need_weights=False, rotary=table)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="dilatoin_rates"):
        at.LongNet(1, 32, 2, dilatoin_rates=[1])


def test_token_mean_is_the_mean_of_what_counts() -> None:
    losses = torch.tensor([[1.0, 2.0], [torch.inf, 6.0]], requires_grad=True)
    mean = at.token_mean(losses, weights=torch.tensor([[True, True], [False, True]]))
    assert mean.item() == 3.0
    mean.backward()
    torch.testing.assert_close(losses.grad, torch.tensor([[1.0, 1.0], [0.0, 1.0]]) / 3)
    assert at.token_mean(torch.tensor([1.0, 4.0])).item() == 2.5
    assert at.token_mean(torch.zeros(0)).isnan()
    assert at.token_mean(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_token_mean_of_16_bits_is_summed_in_float32(dtype: torch.dtype) -> None:
    """100,000 losses of 1.5 are 150,000, which overflows float16 and is 149,504 in bfloat16."""
    losses = torch.full((100_000,), 1.5, dtype=dtype, requires_grad=True)
    for weights in (None, torch.ones(100_000, dtype=dtype), torch.ones(100_000) > 0):
        mean = at.token_mean(losses, weights=weights)
        assert mean.dtype == torch.float32 and mean.item() == 1.5
        (grad,) = torch.autograd.grad(mean, losses)
        assert torch.equal(grad, torch.full_like(losses, 1e-5))


def test_one_process_needs_no_wrapper() -> None:
    model = small()
    assert at.data_parallel(model) is model
