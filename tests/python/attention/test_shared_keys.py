"""shared_k and shared_v in one process: keys that every query attends to, whatever the pattern. Rings of processes are
in ring/test_distributed.py."""

from __future__ import annotations

import annulus.torch as at
import pytest
import torch
from annulus import ConfigError
from support.reference import relative_rms

TOKENS = 50
LONGNET = {"segment_lengths": [8, 16, 32], "dilation_rates": [1, 2, 4]}
PADDING = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [33]])
CALLS = [
    {},
    {"is_causal": True},
    LONGNET,
    {**LONGNET, "is_causal": True, "group_scale": True},
    {"window": (5, 2)},
    {"cu_seqlens": [0, 10, 10, 45]},  # and rows that see no other key
    {"is_causal": True, "key_padding_mask": PADDING},
    {"key_padding_mask": torch.ones(2, TOKENS, dtype=torch.bool)},
]
NAMES = ("q", "k", "v", "shared_k", "shared_v", "sinks")


def tensors(
    shared: int = 3, tokens: int = TOKENS, keys: int = TOKENS
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a call in float64, and the gradient of o."""
    generator = torch.Generator().manual_seed(shared)
    sizes = ((tokens, 4), (keys, 2), (keys, 2), (shared, 2), (shared, 2), (tokens, 4))
    made = [torch.randn(2, n, h, 16, generator=generator, dtype=torch.float64) for n, h in sizes]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    return dict(zip(NAMES, (*made[:5], sinks))), made[5]


def results(inputs, do, dtype, **call):
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    o, lse = at.ring_attention(**leaves, **call, return_lse=True)
    return o.detach(), lse, *torch.autograd.grad(
        o, list(leaves.values()), do.to(dtype), materialize_grads=True
    )


def by_concatenation(inputs, do, **call):
    """The same in plain PyTorch: more keys, which all rows see."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    q, k, v, shared_k, shared_v, sinks = leaves.values()
    shared, heads, tokens = shared_k.shape[1], q.shape[2], q.shape[1]
    k, v = torch.cat([k, shared_k], 1), torch.cat([v, shared_v], 1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(heads // 2, 2)) / 4
    hidden = torch.zeros(2, 1, tokens, k.shape[1]).bool()
    place = torch.arange(tokens)
    distance = torch.arange(k.shape[1] - shared) - place[:, None]
    band = torch.zeros_like(distance).bool()
    if call.get("is_causal"):
        band |= distance > 0
    if "window" in call:
        band |= (distance < -call["window"][0]) | (distance > call["window"][1])
    hidden[..., :-shared] |= band
    if "key_padding_mask" in call:
        hidden[..., :-shared] |= call["key_padding_mask"][:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    column = sinks[:, None, None].expand(2, heads, tokens, 1)
    both = torch.cat([scores, column], -1)
    weights = both.softmax(-1)[..., :-1]
    o = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(heads // 2, 2))
    lse = both.logsumexp(-1).transpose(1, 2)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, list(leaves.values()), do)


@pytest.mark.parametrize("number", [0, 1, 4, 6, 7])
def test_they_are_keys_of_every_row(number: int) -> None:
    inputs, do = tensors()
    found = results(inputs, do, torch.float32, **CALLS[number])
    for f, e in zip(found, by_concatenation(inputs, do, **CALLS[number])):
        assert f.isfinite().all()
        if e.abs().max() == 0:
            assert not f.any()
        else:
            assert relative_rms(f, e) < (2e-6 if e.numel() > 4 else 2e-5)


@pytest.mark.parametrize("shared", [1, 3, 200])
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_float32_is_float64(number: int, shared: int) -> None:
    """Which is other code: float64 is computed with a matrix of biases."""
    inputs, do = tensors(shared)
    call = CALLS[number]
    found, expected = (results(inputs, do, dtype, **call) for dtype in (torch.float32, torch.float64))
    for f, e in zip(found, expected):
        if e.abs().max() == 0:
            assert not f.any()
        else:
            assert relative_rms(f, e) < (2e-6 if e.numel() > 4 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0, 1])
def test_16_bits_lose_at_most_twice_as_much_as_one_call(number: int, dtype: torch.dtype) -> None:
    inputs, do = tensors(20)
    inputs = {name: x.to(dtype).double() for name, x in inputs.items()}
    do = do.to(dtype).double()
    exact = by_concatenation(inputs, do, **CALLS[number])
    found = results(inputs, do, dtype, **CALLS[number])
    # The same keys in one call, which shows all of them to every row: shared keys are in front of the others.
    leaves = [inputs[n].to(dtype).requires_grad_() for n in NAMES]
    q, k, v, shared_k, shared_v, sinks = leaves
    whole = torch.cat([shared_k, k], 1), torch.cat([shared_v, v], 1)
    o = at.ring_attention(q, *whole, sinks=sinks, query_start=20, **CALLS[number])
    one = (o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype)))
    for f, p, e in zip((found[0], *found[2:]), one, (exact[0], *exact[2:])):
        assert f.dtype == p.dtype and relative_rms(f, e) < 2 * relative_rms(p, e)


def test_other_numbers_of_queries_and_keys() -> None:
    for tokens, keys in ((7, 50), (50, 7), (5, 0), (0, 5), (1, 1)):
        inputs, do = tensors(4, tokens, keys)
        if 0 in (tokens, keys):
            found = results(inputs, do, torch.float32)
            expected = results(inputs, do, torch.float64)
        else:
            found, expected = results(inputs, do, torch.float32), by_concatenation(inputs, do)
        for f, e in zip(found, expected):
            torch.testing.assert_close(f.double(), e.double(), rtol=1e-4, atol=1e-5)


def test_compiled_and_autocast_calls_are_the_same() -> None:
    inputs, do = tensors()
    inputs = {name: x.float().requires_grad_() for name, x in inputs.items()}

    def function(*x: torch.Tensor) -> torch.Tensor:
        return at.ring_attention(**dict(zip(NAMES, x)), is_causal=True, **LONGNET)

    leaves = list(inputs.values())
    eager = function(*leaves)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(*(torch.autograd.grad(o, leaves, do.float()) for o in (compiled, eager))):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        half = function(*leaves)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), eager.detach(), rtol=2e-2, atol=2e-2)


def test_there_is_no_second_derivative() -> None:
    inputs, _ = tensors()
    leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
    o = at.ring_attention(**leaves)
    (dq,) = torch.autograd.grad(o.square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared_v": None}, "both or none"),
        ({"shared_k": None}, "both or none"),
        ({"shared_k": [1.0]}, "shared_k is a list"),
        ({"shared_k": torch.zeros(2, 3, 4, 16)}, r"shared_k is \[2, 3, 4, 16\]: \[2, shared tokens, 2, 16\]"),
        ({"shared_k": torch.zeros(1, 3, 2, 16)}, r"\[1, 3, 2, 16\]"),
        ({"shared_v": torch.zeros(2, 4, 2, 16)}, "shared_k has 3 tokens, shared_v 4"),
        ({"shared_v": torch.zeros(2, 3, 2, 16).half()}, "float16"),
        ({"shared_k": torch.zeros(2, 0, 2, 16), "shared_v": torch.zeros(2, 0, 2, 16)}, "no tokens"),
        ({"shared_gradient": "some"}, "shared_gradient is 'some'"),
        ({"mix_gradient": "detached", **LONGNET}, "detached"),
        ({"dropout_p": 0.1}, "shared_k cannot be used with dropout_p"),
    ],
)
def test_wrong_calls_are_config_errors(change: dict, words: str) -> None:
    inputs, _ = tensors()
    call = {name: x.float() for name, x in inputs.items()} | change
    for mask in (None, PADDING):
        with pytest.raises(ConfigError, match=words):
            at.ring_attention(**call, key_padding_mask=mask)
