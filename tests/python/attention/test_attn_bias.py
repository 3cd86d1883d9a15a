"""attn_bias: any bias of pairs, in one process, together with every pattern and mask."""

from __future__ import annotations

import functools

import annulus.torch as at
import pytest
import torch
from annulus import ConfigError, Pattern
from support.dense_masks import check, tensors
from support.reference import relative_rms

TOKENS = 45
LONGNET = {"segment_lengths": [8, 16, 32], "dilation_rates": [1, 2, 4]}
DILATED = {"segment_lengths": [20], "dilation_rates": [3], "offsets": "all", "window": (9, 6)}
GROUPS = {**LONGNET, "pattern": "head_groups", "group_scale": True}
PATTERNS = [
    ({}, lambda p: p.dense(4)),
    ({"is_causal": True}, lambda p: p.dense(4, causal=True)),
    ({"window": (7, 2)}, lambda p: p.dense(4, window=(7, 2))),
    (LONGNET, lambda p: p.longnet(4, [8, 16, 32], [1, 2, 4])),
    (
        {**LONGNET, "is_causal": True, "offsets": "interleaved", "cu_seqlens": [0, 10, 10, 41]},
        lambda p: p.longnet(
            4, [8, 16, 32], [1, 2, 4], causal=True, offsets="interleaved"
        ).with_documents([0, 10, 10, 41]),
    ),
    (DILATED, lambda p: p.longnet(4, [20], [3], offsets="all", window=(9, 6))),
    (GROUPS, lambda p: p.head_groups(4, [8, 16, 32], [1, 2, 4], group_scale=True)),
]


@functools.lru_cache
def counts(pattern: Pattern, tokens: int, keys: int) -> torch.Tensor:
    """How many branches allow a pair, by the definition: [heads, tokens, keys]."""
    found = torch.zeros(pattern.heads, tokens, keys, dtype=torch.float64)
    for branch in range(len(pattern.branches)):
        for head in range(pattern.heads):
            for query in range(tokens):
                for key in range(keys):
                    found[head, query, key] += pattern.allows(branch, head, query, key)
    return found


def exact(inputs, times, bias, sinks=None, output_scale=1.0):
    """o and lse in float64; a row without keys gives 0 and -inf."""
    q, k, v = inputs[:3]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5 + times.log()
    scores = scores if bias is None else scores + bias
    top = scores.detach().amax(-1)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, None].detach())
    top = top.clamp(min=-1e300)[..., None]
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    weights = weights / total.masked_fill(total == 0, 1)
    lse = (total.log() + top)[..., 0].masked_fill(total[..., 0] == 0, -torch.inf)
    return output_scale * torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(1, 2)


def random_bias(shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    """A third of the pairs is hidden, one row sees nothing, and one key is seen by nobody."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    bias[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
    bias[..., 4, :] = -torch.inf
    bias[..., 3] = -torch.inf
    return bias


def agree(found, expected) -> None:
    assert all(f.isfinite().all() for f in found)
    for f, e in zip(found, expected):
        # The gradient of a sink is the small sum of many terms.
        assert relative_rms(f, e) <= (2e-6 if e.numel() > 4 else 2e-5)


@pytest.mark.parametrize("number", range(len(PATTERNS)))
@pytest.mark.parametrize(
    "shape", [(TOKENS, TOKENS), (4, TOKENS, TOKENS), (2, 1, TOKENS, TOKENS), (2, 4, TOKENS, TOKENS)]
)
def test_a_bias_is_added_to_the_scores_of_every_pattern(number: int, shape: tuple) -> None:
    """With grouped queries, sinks, padded keys, gradients of all of them, and log-sum-exps."""
    options, make = PATTERNS[number]
    pattern = make(Pattern)
    bias = random_bias(shape)
    *qkv, do = tensors(TOKENS, torch.float64)
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -1.0], dtype=torch.float64)
    padding = torch.zeros(2, TOKENS, dtype=torch.float64)
    padding[0, 40:], padding[1, ::5] = -torch.inf, 0.5
    times = counts(pattern, TOKENS, TOKENS)
    for extra, some in (({}, [None, None]), ({"sinks": 1, "key_padding_mask": 1}, [sinks, padding])):
        leaves = [x.clone().requires_grad_() for x in (*qkv, bias, *some[: len(extra)])]
        whole = leaves[3] if not extra else leaves[3] + leaves[5][:, None, None]
        o, lse = exact(leaves, times, whole, leaves[4] if extra else None, pattern.output_scale)
        expected = (o, *torch.autograd.grad(o, leaves, do))
        for dtype in (torch.float32, torch.float64):
            mine = [x.detach().to(dtype).requires_grad_() for x in leaves]
            call = dict(zip(extra, mine[4:]))
            found, found_lse = at.ring_attention(
                *mine[:3], attn_bias=mine[3], return_lse=True, **call, **options
            )
            agree((found, *torch.autograd.grad(found, mine, do.to(dtype))), expected)
            assert torch.equal(found_lse == -torch.inf, lse == -torch.inf)
            seen = lse > -torch.inf
            torch.testing.assert_close(found_lse[seen].double(), lse[seen], rtol=1e-6, atol=1e-6)
            assert not found[~seen].any() and found_lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [TOKENS, 20, 80])
def test_it_is_pytorchs_attention_with_a_mask(dtype: torch.dtype, keys: int) -> None:
    q, k, v, do = inputs = tensors(TOKENS, dtype, keys=keys)
    hidden = torch.rand(TOKENS, keys, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[:, 7] = False
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    bias = torch.zeros(TOKENS, keys, dtype=dtype).masked_fill(hidden, -torch.inf)
    o = at.ring_attention(*leaves, attn_bias=bias)
    assert o.dtype == dtype
    check((o.detach(), *torch.autograd.grad(o, leaves, do)), inputs, ~hidden)


def test_gradients_of_a_small_16_bit_bias_are_rounded_once() -> None:
    """Terms of both signs are added before."""
    *qkv, do = tensors(TOKENS, torch.float32)
    sinks = torch.zeros(4)  # without them a bias of all keys has no effect
    bias = torch.zeros(4, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    exact = bias.detach().double().requires_grad_()
    o = at.ring_attention(*qkv, attn_bias=bias, sinks=sinks)
    expected = at.ring_attention(*(x.double() for x in qkv), attn_bias=exact, sinks=sinks)
    (found,) = torch.autograd.grad(o, bias, do)
    (expected,) = torch.autograd.grad(expected, exact, do.double())
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)


def test_positions_of_documents_and_chunks_count() -> None:
    """Also where queries and keys differ in number."""
    cases = [
        (20, 45, {"query_start": 25, "is_causal": True}),
        (20, 45, {"query_start": 25, **LONGNET, "window": (11, 3)}),
        (30, 45, {"cu_seqlens": [0, 12, 26], "cu_seqlens_k": [0, 5, 45], "query_start": [2, 11]}),
        (30, 45, {"cu_seqlens": [0, 12, 30], "cu_seqlens_k": [0, 25, 45], "is_causal": True}),
    ]
    for tokens, keys, options in cases:
        if "segment_lengths" in options:
            pattern = Pattern.longnet(4, [8, 16, 32], [1, 2, 4], window=(11, 3))
        else:
            pattern = Pattern.dense(4, causal=options.get("is_causal", False))
        boundaries = options.get("cu_seqlens", [0, tokens]), options.get("cu_seqlens_k", [0, keys])
        pattern = pattern.with_documents(*boundaries, options.get("query_start"))
        q, k, v, do = tensors(tokens, torch.float64, keys=keys)
        expected, lse = exact((q, k, v), counts(pattern, tokens, keys), None)
        found, found_lse = at.ring_attention(
            *(x.float() for x in (q, k, v)), attn_bias=torch.zeros(1, 1), return_lse=True, **options
        )
        agree([found], [expected])
        torch.testing.assert_close(found_lse, lse.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pattern", [{}, LONGNET], ids=["dense", "longnet"])
@pytest.mark.parametrize(
    "documents",
    [
        {"cu_seqlens": [[0, 12, 45], [0, 3, 3, 30]]},
        {"seqused_k": [45, 31], "is_causal": True},
        {"leftpad_k": [0, 9], "seqused_k": [45, 40]},
        {"leftpad_k": [0, 9], "is_causal": True, "window": (8, 0)},
    ],
    ids="+".join,
)
def test_batch_entries_may_have_documents_of_their_own(documents: dict, pattern: dict) -> None:
    """The results of the kernels, which are tested elsewhere."""
    *qkv, do = tensors(TOKENS, torch.float32)
    results = []
    for more in ({}, {"attn_bias": torch.zeros(1, 1)}):
        leaves = [x.clone().requires_grad_() for x in qkv]
        o, lse = at.ring_attention(*leaves, return_lse=True, **documents, **pattern, **more)
        results.append((o, *torch.autograd.grad(o, leaves, do), lse))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [{"is_causal": True}, LONGNET], ids=["dense", "longnet"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf, 2.0, -1.0])], ids=["", "sinks"])
def test_softcap_and_the_dropout_of_the_kernels(pattern: dict, sinks: torch.Tensor | None) -> None:
    """The same pairs are dropped for the same seed."""
    *qkv, do = tensors(TOKENS, torch.float32)
    for call in ({"softcap": 2.0}, {"dropout_p": 0.3, "dropout_seed": 2**63 - 5}, {"dropout_p": 0.75, "softcap": 1.5}):
        call = {"dropout_seed": 11, "sinks": sinks, **call, **pattern}
        results = []
        for more in ({}, {"attn_bias": torch.zeros(1, 1)}):
            leaves = [x.clone().requires_grad_() for x in qkv]
            o, lse = at.ring_attention(*leaves, return_lse=True, **call, **more)
            results.append((o, *torch.autograd.grad(o, leaves, do), lse))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_hidden_keys_change_nothing() -> None:
    q, k, v, do = tensors(TOKENS, torch.float32)
    bias = random_bias((TOKENS, TOKENS)).float()
    hidden_from_late = bias.clone()
    hidden_from_late[30:, :10] = -torch.inf

    def results(k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = at.ring_attention(*leaves, attn_bias=bias, return_lse=False)
        return o, *torch.autograd.grad(o, leaves, do)

    before = results(k, v, hidden_from_late)
    other = [x.clone() for x in (k, v)]
    for x in other:
        x[:, :10] += 100
    after = results(*other, hidden_from_late)
    assert torch.equal(before[0][:, 30:], after[0][:, 30:])
    assert torch.equal(before[1][:, 30:], after[1][:, 30:])
    # What nobody sees may be anything.
    for value in (torch.nan, torch.inf, 1e38):
        for x in other:
            x.copy_(k if x is other[0] else v)
            x[:, 3] = value
        assert all(torch.equal(a, b) for a, b in zip(results(*other, hidden_from_late), before))


def test_queries_that_see_nothing_may_hold_anything() -> None:
    """As with the kernels. Also in single heads only."""
    *qkv, do = tensors(20, torch.float32)
    packed = {"cu_seqlens": [0, 9, 15]}
    of_head = torch.zeros(4, 20, 20)
    of_head[1, 4] = -torch.inf
    for call, rows in (
        ({"attn_bias": torch.zeros(1, 1), **packed}, (slice(None), slice(15, None))),
        ({"attn_bias": torch.zeros(1, 1), **packed, "softcap": 3.0}, (slice(None), slice(15, None))),
        ({"attn_bias": of_head}, (slice(None), 4, 1)),
    ):
        results = []
        for value in (0.0, torch.nan):
            leaves = [x.clone() for x in qkv]
            leaves[0][rows] = value
            leaves = [x.requires_grad_() for x in leaves]
            o, lse = at.ring_attention(*leaves, return_lse=True, **call)
            assert not o[rows].any() and (lse[rows] == -torch.inf).all()
            results.append((o, lse, *torch.autograd.grad(o, leaves, do)))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_rows_without_keys_and_nothing_at_all() -> None:
    q, k, v, do = tensors(9, torch.float32)
    nothing = torch.full((9, 9), -torch.inf)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = at.ring_attention(*leaves, attn_bias=nothing, return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    assert not any(g.any() for g in torch.autograd.grad(o, leaves, do))
    sinks = torch.tensor([1.0, -torch.inf, torch.nan, torch.inf])
    o, lse = at.ring_attention(q, k, v, attn_bias=nothing, sinks=sinks, return_lse=True)
    hidden = torch.ones(2, 9, dtype=torch.bool)
    plain, plain_lse = at.ring_attention(
        q, k, v, key_padding_mask=hidden, sinks=sinks, return_lse=True
    )
    torch.testing.assert_close(o, plain, equal_nan=True)
    torch.testing.assert_close(lse, plain_lse, equal_nan=True)
    for tokens, keys in ((0, 9), (9, 0), (0, 0)):
        few = [x[:, :n].clone().requires_grad_() for x, n in ((q, tokens), (k, keys), (v, keys))]
        o = at.ring_attention(*few, attn_bias=torch.zeros(tokens, keys))
        assert o.shape[1] == tokens and not o.any()
        o.sum().backward()
        assert not any(x.grad is not None and x.grad.any() for x in few)


def test_compiled_and_autocast() -> None:
    q, k, v, do = tensors(TOKENS, torch.float32)
    bias = random_bias((4, TOKENS, TOKENS)).float()

    def function(*x: torch.Tensor) -> torch.Tensor:
        return at.ring_attention(*x, attn_bias=bias, is_causal=True, **LONGNET)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = function(*leaves)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, expected)
    for a, b in zip(*(torch.autograd.grad(o, leaves, do) for o in (compiled, expected))):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        half = function(q, k, v)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected.detach(), rtol=2e-2, atol=2e-2)


def test_log_sum_exps_under_autocast_are_those_of_kernels() -> None:
    q, k, v = (4 * x for x in tensors(64, torch.float32, dim=64)[:3])
    with torch.autocast("cpu", torch.bfloat16):
        lse, dense = (
            at.ring_attention(q, k, v, return_lse=True, **more)[1] for more in ({}, {"attn_bias": torch.zeros(1, 1)})
        )
    torch.testing.assert_close(dense, lse, rtol=1e-5, atol=2e-5)


def test_autocast_takes_tensors_of_different_dtypes() -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    half = q.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for more in (
            {},
            {"attn_bias": torch.zeros(1, 1)},
            {"shared_k": k[:, :2], "shared_v": v[:, :2].bfloat16()},
            {"shared_k": k[:, :2], "shared_v": v[:, :2].bfloat16(), "attn_bias": torch.zeros(1, 1)},
        ):
            o = at.ring_attention(half, k, v, **more)
            more = {name: x.bfloat16() if name != "attn_bias" else x for name, x in more.items()}
            assert torch.equal(o, at.ring_attention(half, k.bfloat16(), v.bfloat16(), **more))


@pytest.mark.parametrize("more", [{}, {"attn_bias": torch.zeros(1, 1)}], ids=["kernels", "matrix"])
def test_both_ways_have_the_same_limits(more: dict) -> None:
    for shape, kv_heads, call, words in (
        ((2, 9, 4, 8), 3, {}, "k has 3 heads, expected a divisor of q's 4"),
        ((2, 9, 4, 8), 0, {}, "k has 0 heads"),
        ((2, 9, 4, 600), 4, {}, "head_dim is 600, expected 1 to 512"),
        ((2, 9, 4, 0), 4, {}, "head_dim is 0"),
        ((2, 9, 4, 8), 4, {"softcap": 1e-20}, "softcap is 1e-20"),
    ):
        q = torch.randn(shape)
        k = torch.randn(*shape[:2], kv_heads, shape[3])
        with pytest.raises(ConfigError, match=words):
            at.ring_attention(q, k, k, **call, **more)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"attn_bias": [[0.0]]}, "attn_bias is a list"),
        ({"attn_bias": torch.zeros(45, 45, dtype=torch.bool)}, "masked_fill"),
        ({"attn_bias": torch.zeros(45, 45).to(torch.float8_e4m3fn)}, "attn_bias is torch.float8"),
        ({"attn_bias": torch.zeros(45, 44)}, r"\[45, 44\].*\[2, 4, 45, 45\]"),
        ({"attn_bias": torch.zeros(45)}, r"\[45\]: \[queries, keys\]"),
        ({"attn_bias": torch.zeros(3, 45, 45)}, r"\[3, 45, 45\]"),
        ({"attn_bias": torch.zeros(45, 45), "mix_gradient": "detached", **LONGNET}, "detached"),
        ({"attn_bias": torch.zeros(45, 45), "n_global": 46}, "n_global is 46"),
        ({"attn_bias": torch.zeros(45, 45), "cu_seqlens": [0, 50]}, "50"),
        ({"attn_bias": torch.zeros(45, 45), "scale": 0.0}, "scale"),
        ({"attn_bias": torch.zeros(1, 1, device="meta")}, "one device"),
    ],
)
def test_wrong_calls_are_config_errors(call: dict, words: str) -> None:
    q, k, v, _ = tensors(45, torch.float32)
    with pytest.raises(ConfigError, match=words):
        at.ring_attention(q, k, v, **call)
