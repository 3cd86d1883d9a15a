"""Placements without a name as the argument `placement`, in one process."""

from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402
from annulus import ConfigError, Placement  # noqa: E402
from annulus.torch import _fast_path  # noqa: E402
from annulus.torch._config import config_of  # noqa: E402

SWAPPED = Placement.explicit(24, [[range(12, 24), range(12)]])


def test_tokens_in_an_order_of_your_own() -> None:
    q, k, v = torch.randn(3, 1, 24, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    options = {"is_causal": True, "segment_lengths": [8, 24], "dilation_rates": [1, 2]}
    expected = at.ring_attention(q, k, v, **options)
    shards = [at.shard(x, placement=SWAPPED) for x in (q, k, v)]
    assert at.positions(24, placement=SWAPPED).tolist() == [*range(12, 24), *range(12)]
    o = at.ring_attention(*shards, placement=SWAPPED, **options)
    assert torch.equal(at.unshard(o, placement=SWAPPED), expected)
    compiled = torch.compile(at.ring_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*shards, placement=SWAPPED, **options), o)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window": (5, 2), "sinks": torch.tensor([0.5, -1.0])},
        {"segment_lengths": [8, 24], "dilation_rates": [1, 2], "is_causal": True},
        {"cu_seqlens": [0, 9, 20], "is_causal": True},
        {"cu_seqlens": [[0, 9, 20], [0, 24, 24]]},
        {"leftpad_k": [0, 5], "seqused_k": [24, 20]},
        {"is_causal": True, "dropout_p": 0.4, "dropout_seed": 5},
    ],
    ids=lambda o: "+".join(o),
)
def test_however_attention_is_computed(options: dict) -> None:
    """By kernels, with a matrix, by the reference, and with shared keys: the results of the sequence in its order."""
    q, k, v, do = torch.randn(4, 2, 24, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    kinds = [{}, {"attn_bias": torch.zeros(1, 1)}]
    if "dropout_p" not in options:
        kinds.append({"shared_k": k[:, :3], "shared_v": v[:, :3]})

    def results(placement: object, dtype: torch.dtype, more: dict) -> list[torch.Tensor]:
        leaves = [at.shard(x.to(dtype), placement=placement).requires_grad_() for x in (q, k, v)]
        more = {name: x.to(dtype) for name, x in more.items()}
        o, lse = at.ring_attention(*leaves, placement=placement, return_lse=True, **options, **more)
        found = (o, lse, *torch.autograd.grad(o, leaves, at.shard(do.to(dtype), placement=placement)))
        return [at.unshard(x, placement=placement) for x in found]

    for dtype in (torch.float32, torch.float64):
        for more in kinds:
            for found, expected in zip(results(SWAPPED, dtype, more), results("striped", dtype, more)):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_and_columns_of_matrices() -> None:
    """Those of attn_bias and of weights are q's and k's, and those of attn_mask the whole sequence's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 24, 2, 8, generator=generator).unbind()
    bias = torch.randn(2, 24, 24, generator=generator)
    order = at.positions(24, placement=SWAPPED)
    moved = [at.shard(x, placement=SWAPPED) for x in (q, k, v)]
    o = at.ring_attention(*moved, placement=SWAPPED, attn_bias=bias[:, order][..., order], is_causal=True)
    expected = at.ring_attention(q, k, v, attn_bias=bias, is_causal=True)
    torch.testing.assert_close(at.unshard(o, placement=SWAPPED), expected, rtol=1e-5, atol=1e-6)

    module = at.RingMultiheadDilatedAttention(16, 2, batch_first=True, placement=SWAPPED)
    named = at.RingMultiheadDilatedAttention(16, 2, batch_first=True)
    named.load_state_dict(module.state_dict())
    x = torch.randn(1, 24, 16, generator=generator)
    y = at.shard(x, placement=SWAPPED)
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)
    for mask in (later, bias, bias[0].masked_fill(later, -torch.inf)):
        o, weights = module(y, y, y, attn_mask=mask)
        expected, of_sequence = named(x, x, x, attn_mask=mask)
        torch.testing.assert_close(at.unshard(o, placement=SWAPPED), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, of_sequence[:, order][..., order], rtol=1e-5, atol=1e-6)
    nested = torch.nested.as_nested_tensor([x[0, :5], x[0, 5:]], layout=torch.jagged)
    with pytest.raises(ConfigError, match="nested tensors cannot be used with a Placement"):
        module(nested, nested, nested)


def test_calls_with_different_placements_are_told_apart() -> None:
    q, k, v = torch.randn(3, 1, 24, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    striped = Placement.explicit(24, [[range(0, 24, 2), range(1, 24, 2)]])
    results = [at.ring_attention(q, k, v, is_causal=True, placement=p) for p in (SWAPPED, striped) * 2]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def test_modules_take_a_placement() -> None:
    module = at.RingMultiheadDilatedAttention(16, 2, batch_first=True, is_causal=True, placement=SWAPPED)
    named = at.RingMultiheadDilatedAttention(16, 2, batch_first=True, is_causal=True)
    named.load_state_dict(module.state_dict())
    x = torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(0))
    moved = at.shard(x, placement=SWAPPED)
    o, _ = pickle.loads(pickle.dumps(module))(moved, moved, moved)
    expected, _ = named(x, x, x)
    torch.testing.assert_close(at.unshard(o, placement=SWAPPED), expected, rtol=1e-5, atol=1e-6)


def test_placements_of_other_tokens_are_refused() -> None:
    q, k, v = torch.randn(3, 1, 23, 2, 8).unbind()
    for dtype, more in ((torch.float32, {}), (torch.float32, {"attn_bias": torch.zeros(1, 1)}), (torch.float64, {})):
        with pytest.raises(ConfigError, match="24 tokens on 1 ranks, but there are 23 tokens"):
            at.ring_attention(*(x.to(dtype) for x in (q, k, v)), placement=SWAPPED, **more)
    with pytest.raises(ConfigError, match="positions: placement is of 24 tokens"):
        at.shard(q, placement=SWAPPED)
    with pytest.raises(ConfigError, match="on 2 ranks, but"):
        at.ring_attention(q, k, v, placement=Placement.striped(23, 2))
    with pytest.raises(ConfigError, match="or a Placement, was expected"):
        at.ring_attention(q, k, v, placement=24)


def test_texts_of_configurations_hold_the_placement() -> None:
    """Compiled graphs hold them, and other processes may load these."""
    q, k, v = torch.randn(3, 1, 24, 2, 8).unbind()
    at.ring_attention(q, k, v, placement=SWAPPED, scale=0.03125)
    configs = [call.config for call in _fast_path._calls.values()]
    (config,) = [c for c in configs if c.placement == SWAPPED and c.scale == 0.03125]
    assert config_of(config.text) == config
