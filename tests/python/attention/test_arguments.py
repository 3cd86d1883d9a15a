"""The arguments of ring_attention: wrong ones are ConfigErrors that say what is wrong, numbers of any library are valid."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402
from annulus import ConfigError  # noqa: E402

LONGNET = {"segment_lengths": [16, 32, 64], "dilation_rates": [1, 2, 4]}


def tensors(tokens: int = 70, dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, tokens, heads, dim, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dim", [0, 513])
def test_head_dims_out_of_range_are_errors(dim: int) -> None:
    q, k, v = tensors(tokens=8, dim=dim)
    with pytest.raises(ConfigError, match=rf"head_dim is {dim}, expected 1 to 512"):
        at.ring_attention(q, k, v)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(q=c["q"][0]), ["q", "3 axes"]),
        (lambda c: c.update(k=c["k"].double()), ["k", "float64", "float32"]),
        (lambda c: c.update(v=c["v"][:, :5]), ["v", "[2, 5, 2, 16]", "[2, 70, 2, 16]"]),
        (lambda c: c.update(k=c["k"].to("meta")), ["k", "meta"]),
        (lambda c: c.update(q=c["q"].int(), k=c["k"].int(), v=c["v"].int()), ["q", "int32"]),
        (lambda c: c.update(q=np.zeros((2, 70, 4, 16))), ["q", "ndarray", "torch.Tensor"]),
        (lambda c: c.update(segment_lengths=[16]), ["segment_lengths", "dilation_rates"]),
        (lambda c: c.update(pattern="lognet"), ["lognet", "longnet"]),
        (lambda c: c.update(pattern="longnet"), ["segment_lengths"]),
        (lambda c: c.update(group_scale=True), ["dense", "group_scale"]),
        (lambda c: c.update(placement="zig"), ["zig", "zigzag"]),
        (lambda c: c.update(schedule="rign"), ["rign"]),
        (lambda c: c.update(n_global=71), ["71", "70"]),
        (lambda c: c.update(segment_lengths=[16, 32], dilation_rates=[1]), ["segment", "dilation"]),
        (lambda c: c.update(scale=float("nan")), ["scale"]),
        (lambda c: c.update(scale="1"), ["scale"]),
        (lambda c: c.update(scale=0.0), ["scale is 0.0", "above 0"]),
        (lambda c: c.update(scale=-0.1), ["scale is -0.1", "above 0"]),
        (lambda c: c.update(scale=[0.1]), ["scale is [0.1]"]),
        (lambda c: c.update(scale=10**400), ["scale"]),
        (lambda c: c.update(placement=["zigzag"]), ["placement is ['zigzag']"]),
        (lambda c: c.update(schedule={}), ["schedule is {}"]),
        (lambda c: c.update(q=c["q"].to_sparse()), ["q", "sparse_coo", "to_dense"]),
        (lambda c: c.update(offsets="interleaved"), ["offsets", "longnet"]),
        (lambda c: c.update(mix_gradient="half"), ["half", "detached"]),
        (lambda c: c.update(is_causal=None), ["is_causal"]),
        (lambda c: c.update(n_global=-3), ["n_global"]),
        (lambda c: c.update(n_global=2.5), ["n_global"]),
        (lambda c: c.update(timeout=-1), ["timeout"]),
        (lambda c: c.update(n_global=2**64), ["n_global", str(2**64)]),
        (lambda c: c.update(max_communication_bytes=2**64), ["max_communication_bytes"]),
        (lambda c: c.update(segment_lengths=[16.5], dilation_rates=[1]), ["segment_lengths"]),
        (lambda c: c.update(segment_lengths=[2**64], dilation_rates=[1]), ["segment_lengths"]),
        (lambda c: c.update(segment_lengths=[[16]], dilation_rates=[1]), ["segment_lengths"]),
        (lambda c: c.update(segment_lengths=16, dilation_rates=1), ["segment_lengths is 16"]),
        (lambda c: c.update(segment_lengths={16, 8}, dilation_rates=[1, 2]), ["segment_lengths is {", "sequence"]),
        (lambda c: c.update(threads=2**40), ["threads is 1099511627776", "from 0 to 4096"]),
        (lambda c: c.update({n: c[n].to("meta") for n in "qkv"}), ["q is on meta"]),
        (lambda c: c.update(group=0), ["group", "ProcessGroup"]),
        (lambda c: c.update(v=c["v"][:, :50]), ["v is [2, 50, 2, 16]"]),
    ],
)
def test_wrong_arguments_are_config_errors(change, words: list[str]) -> None:
    q, k, v = tensors()
    call = {"q": q, "k": k, "v": v}
    change(call)
    with pytest.raises(ConfigError) as caught:
        at.ring_attention(**call)
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_call_is_refused_whatever_calls_came_before() -> None:
    """6 == 6.0 and True == 1, but one is a segment length and the other is not."""
    q, k, v = tensors()
    right = {"segment_lengths": [6], "dilation_rates": [1], "is_causal": True, "window": (3, 0)}
    at.ring_attention(q, k, v, **right)
    for wrong in (
        {"segment_lengths": [6.0]},
        {"dilation_rates": [True]},
        {"dilation_rates": [1.0]},
        {"is_causal": 1},
        {"window": (3, False)},
        {"window": (3.0, 0)},
        {"window": (3, 0, 0)},
    ):
        call = {**right, **wrong}
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            at.ring_attention(q, k, v, **call)


def test_options_that_change_in_place_are_read_anew() -> None:
    """A tensor that holds another number is the same object, so that its call must not be cached."""
    q, k, v = tensors()
    scale, length = torch.tensor(0.1), torch.tensor(8)
    for new_scale, new_length in ((0.1, 8), (2.0, 20)):
        scale.fill_(new_scale)
        length.fill_(new_length)
        found = at.ring_attention(
            q, k, v, scale=scale, segment_lengths=[length], dilation_rates=[1]
        )
        expected = at.ring_attention(
            q, k, v, scale=scale.item(), segment_lengths=[new_length], dilation_rates=[1]
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": torch.tensor(0.5, requires_grad=True)},  # a gradient that would be lost
        {"scale": torch.tensor(0.5, device="meta")},
        {"scale": torch.tensor(1j)},
        {"scale": True},
        {"window": 3},
        {"window": (3,)},
        {"window": (-2, 0)},
        {"window": (2**63, 0)},
        {"window": ("3", 0)},
        {"window": torch.tensor([3, 0])},
        {"window": {3, 0}},
        {"window": (3, 1), "is_causal": True},
        {"timeout": torch.tensor(True)},
        {"n_global": torch.tensor(40, device="meta")},
        {"n_global": torch.tensor(True)},
        {"return_lse": "no"},
        {"return_lse": 1},
    ],
    ids=str,
)
def test_objects_that_are_not_numbers_are_config_errors(wrong: dict[str, object]) -> None:
    q, k, v = tensors()
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        at.ring_attention(q, k, v, **wrong)


def test_numpy_numbers_are_valid() -> None:
    q, k, v = tensors()
    plain = at.ring_attention(q, k, v, scale=0.25, **LONGNET)
    lengths = np.array(LONGNET["segment_lengths"])
    rates = tuple(np.int32(r) for r in LONGNET["dilation_rates"])
    found = at.ring_attention(
        q, k, v, scale=np.float32(0.25), segment_lengths=lengths, dilation_rates=rates
    )
    assert torch.equal(found, plain)
    for quarter in (Fraction(1, 4), Decimal("0.25"), torch.tensor(0.25, dtype=torch.bfloat16)):
        assert torch.equal(at.ring_attention(q, k, v, scale=quarter, **LONGNET), plain)
