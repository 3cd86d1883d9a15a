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
    with pytest.raises(ConfigError, match="24 tokens on 1 ranks, but there are 23 tokens"):
        at.ring_attention(q, k, v, placement=SWAPPED)
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
