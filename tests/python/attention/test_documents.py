"""Packed documents, and queries and keys that differ in number, compared with PyTorch under a dense boolean mask."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
import numpy as np  # noqa: E402
from annulus import ConfigError, Pattern, Placement  # noqa: E402
from support import executors_missed, on_ranks  # noqa: E402
from support.dense_masks import check, tensors  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

TOKENS = 131
# One, several, empty ones, single tokens, and padding behind the last.
BOUNDARIES = [
    [0, TOKENS],
    [0, 1, 2, 60, TOKENS],
    [0, 0, 40, 40, 99, TOKENS, TOKENS],
    [0, 33, 66, 100],
]
MASKS = [
    {},
    {"is_causal": True},
    {"window": (9, 4)},
    {"is_causal": True, "window": (20, 0)},
    {"segment_lengths": [16, 64], "dilation_rates": [1, 4], "is_causal": True, "offsets": "interleaved"},
]


def allowed(pattern: Pattern, tokens: int, keys: int) -> torch.Tensor:
    """By Pattern.allows, for the single branch of a pattern without dilation."""
    pairs = itertools.product(range(tokens), range(keys))
    return torch.tensor([pattern.allows(0, 0, q, k) for q, k in pairs]).reshape(tokens, keys)


def block_diagonal(boundaries: list[int], tokens: int, mask: dict) -> torch.Tensor:
    """The dense mask: [query, key], True: the query attends to the key."""
    out = torch.zeros(tokens, tokens, dtype=torch.bool)
    for begin, end in zip(boundaries, boundaries[1:]):
        out[begin:end, begin:end] = True
    distance = torch.arange(tokens) - torch.arange(tokens)[:, None]
    before, after = mask.get("window", (-1, -1))
    if before >= 0:
        out &= distance >= -before
    if after >= 0:
        out &= distance <= after
    return out & (distance <= 0) if mask.get("is_causal") else out


def gradients(function, q, k, v, do):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = function(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS[:4])
@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_documents_are_the_block_diagonal_mask(boundaries, mask: dict, dtype: torch.dtype) -> None:
    inputs = tensors(TOKENS, dtype)
    found = gradients(lambda *x: at.ring_attention(*x, cu_seqlens=boundaries, **mask), *inputs)
    end = boundaries[-1]
    for x in found:
        assert not x[:, end:].any(), "tokens behind the last document give zeros"
    dense = block_diagonal(boundaries, TOKENS, mask)[:end, :end]
    check([x[:, :end] for x in found], [x[:, :end] for x in inputs], dense)


@pytest.mark.parametrize("mask", MASKS)
def test_each_document_is_as_if_it_were_alone(mask: dict) -> None:
    q, k, v, do = tensors(TOKENS, torch.float32)
    boundaries = BOUNDARIES[1]
    packed = gradients(
        lambda *x: at.ring_attention(*x, cu_seqlens=boundaries, **mask), q, k, v, do
    )
    for begin, end in zip(boundaries, boundaries[1:]):
        part = [x[:, begin:end] for x in (q, k, v, do)]
        alone = gradients(lambda *x: at.ring_attention(*x, **mask), *part)
        for a, b in zip(packed, alone):
            torch.testing.assert_close(a[:, begin:end], b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
def test_documents_are_the_same_on_every_ring(ranks: int, placement: str) -> None:
    q, k, v, do = tensors(TOKENS, torch.float32)
    for boundaries, mask in itertools.product(BOUNDARIES, MASKS):
        results = []
        for ring in ({}, {"ranks": ranks, "placement": placement, "schedule": "ring"}):
            call = {"cu_seqlens": boundaries, **mask, **ring}
            o, lse = annulus.attention(q, k, v, return_lse=True, **call)
            results.append((o, lse, *annulus.attention_backward(q, k, v, o, lse, do, **call)))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_other_documents_change_no_bit() -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    for mask in MASKS:
        call = {"cu_seqlens": [0, 50, TOKENS], "ranks": 2, **mask}
        before = annulus.attention(q, k, v, **call)
        k2, v2 = k.clone(), v.clone()
        k2[:, :50] = float("nan")
        v2[:, :50] = 3e38
        after = annulus.attention(q, k2, v2, **call)
        assert torch.equal(before[:, 50:], after[:, 50:])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
def test_cross_attention(ranks: int, placement: str) -> None:
    for tokens, keys in ((50, 131), (131, 50), (1, 77), (2, 1)):
        q, k, v, do = inputs = tensors(tokens, torch.float32, keys=keys)
        call = {"ranks": ranks, "placement": placement}
        o, lse = annulus.attention(q, k, v, return_lse=True, **call)
        found = (o, *annulus.attention_backward(q, k, v, o, lse, do, **call))
        check(found, inputs, torch.ones(tokens, keys, dtype=torch.bool))


@pytest.mark.parametrize("mask", [MASKS[1], MASKS[3]])  # causal: a chunk has no keys behind its queries
def test_chunks_of_a_prompt_are_the_whole(mask: dict) -> None:
    """Prefill in chunks: each chunk of queries behind the keys so far."""
    q, k, v, _ = tensors(TOKENS, torch.float32)
    whole = at.ring_attention(q, k, v, **mask)
    for begin, end in ((0, 40), (40, 41), (41, 100), (100, TOKENS)):
        chunk = q[:, begin:end], k[:, :end], v[:, :end]
        for call in (at.ring_attention, annulus.attention):
            o = call(*chunk, query_start=begin, **mask)
            torch.testing.assert_close(o, whole[:, begin:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("start", [0, 10])
def test_ranks_whose_own_keys_are_all_hidden(start: int, schedule: str, dtype: torch.dtype) -> None:
    """Their first keys come from other ranks, and what lay in the memory of o and lse does not matter."""
    inputs = tensors(12, dtype, keys=64)
    pattern = Pattern.dense(4, causal=True).with_documents([0, 12], [0, 64], start)
    queries, keys = Placement.contiguous(12, 3), Placement.contiguous(64, 3)

    def body(transport: annulus.Transport) -> list[torch.Tensor]:
        options = {"batch": 2, "kv_heads": 2, "head_dim": 24, "dtype": dtype, "schedule": schedule}
        ring = annulus.RingAttention(
            pattern, queries, key_placement=keys, transport=transport, **options
        )
        mine, theirs = queries.positions(transport.rank()), keys.positions(transport.rank())
        q, k, v, do = (x[:, rows] for x, rows in zip(inputs, (mine, theirs, theirs, mine)))
        o, lse = torch.full_like(q, 5.0), torch.full(q.shape[:3], 5.0)
        ring.forward(q, k, v, o, lse)
        return [o, *ring.backward(q, k, v, o, lse, do)]

    shards = on_ranks(annulus.make_in_process_ring(3), body)
    check([torch.cat(x, dim=1) for x in zip(*shards)], inputs, allowed(pattern, 12, 64))


def test_queries_behind_caches_of_packed_sequences() -> None:
    """Two sequences with caches of different lengths, as in a serving engine."""
    q, k, v, do = inputs = tensors(12, torch.float32, keys=70)
    documents = {"cu_seqlens": [0, 5, 12], "cu_seqlens_k": [0, 30, 70], "query_start": [25, 33]}
    pattern = Pattern.dense(4, causal=True).with_documents(*documents.values())
    found = gradients(lambda *x: at.ring_attention(*x, is_causal=True, **documents), q, k, v, do)
    check(found, inputs, allowed(pattern, 12, 70))


def test_no_queries_give_zero_gradients_of_keys() -> None:
    q, k, v, do = tensors(0, torch.float32, keys=20)
    o, dq, dk, dv = gradients(at.ring_attention, q, k, v, do)
    assert o.shape == dq.shape == (2, 0, 4, 24)
    assert not dk.any() and not dv.any()
    o, _, dk, dv = gradients(at.ring_attention, *(tensors(9, torch.float32, keys=0)))
    assert o.shape == (2, 9, 4, 24) and not o.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_without_keys_have_their_sink_as_log_sum_exp(dtype: torch.dtype) -> None:
    q, k, v, do = tensors(9, dtype, keys=0)
    sinks = torch.tensor([0.5, -torch.inf, torch.nan, torch.inf], dtype=dtype, requires_grad=True)
    o, lse = at.ring_attention(q, k, v, sinks=sinks, return_lse=True)
    nan = torch.full_like(lse[..., 2:], torch.nan)
    torch.testing.assert_close(lse[..., :2], sinks.detach()[:2].to(lse.dtype).expand_as(lse[..., :2]))
    torch.testing.assert_close(lse[..., 2:], nan, equal_nan=True)
    assert not o[:, :, :2].any() and o[:, :, 2:].isnan().all()
    (gradient,) = torch.autograd.grad(o, sinks, do)
    assert not gradient[:2].any()


def test_documents_in_float64_and_with_detached_mixing() -> None:
    inputs = tensors(40, torch.float64)
    call = {"segment_lengths": [8, 32], "dilation_rates": [1, 2], "mix_gradient": "detached"}
    call |= {"cu_seqlens": [0, 7, 40], "is_causal": True}
    exact = gradients(lambda *x: at.ring_attention(*x, **call), *inputs)
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        found = gradients(
            wrap(lambda *x: at.ring_attention(*x, **call)), *(x.float() for x in inputs)
        )
        for a, b in zip(found, exact):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cu_seqlens", ([0, 50, TOKENS], [0, 60, TOKENS], [0, 60, 70, TOKENS])),
        ("query_start", (3, 4, 5)),
        ("window", ((3, 4), (5, 6), (7, 8))),
        ("segment_lengths", ([16], [32], [64])),
    ],
)
def test_masks_of_a_compiled_graph_may_change(name: str, values: tuple) -> None:
    """Numbers that were others in an earlier call are variables to dynamo, unless told that they are constants."""
    q, k, v, _ = tensors(TOKENS, torch.float32)
    rates = {"dilation_rates": [2]} if name == "segment_lengths" else {}

    def attend(q, k, v, value):
        return at.ring_attention(q, k, v, **{name: value}, **rates)

    torch._dynamo.reset()  # the limit of compilations holds for the code of `attend` in all cases
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for value in values:
        assert torch.equal(compiled(q, k, v, value), attend(q, k, v, value))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_boundaries_are_any_sequence_of_whole_numbers(kind) -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    call = {"cu_seqlens": [0, 50, TOKENS], "query_start": [3, 0], "is_causal": True}
    expected = at.ring_attention(q, k, v, **call)
    call |= {"cu_seqlens": kind([0, 50, TOKENS]), "query_start": kind([3, 0])}
    for function in (at.ring_attention, annulus.attention):
        assert torch.equal(function(q, k, v, **call), expected)
    starts = kind([3, 0])
    pattern = Pattern.dense(4, causal=True).with_documents(kind([0, 50, TOKENS]), query_start=starts)
    assert torch.equal(annulus.attention(q, k, v, pattern=pattern), expected)


WRONG = [
    ({"cu_seqlens": [0, 50, 40, TOKENS]}, ["boundary 2 is 40", "at least the one before, 50"]),
    ({"cu_seqlens": [1, TOKENS]}, ["begin with 1", "expected 0"]),
    ({"cu_seqlens": []}, ["begin with nothing"]),
    ({"cu_seqlens": [0, TOKENS + 1]}, ["ends at query token 132", "131"]),
    ({"cu_seqlens": [0, 50], "cu_seqlens_k": [0, 20, 50]}, ["1 documents of queries, 2 documents of keys"]),
    ({"cu_seqlens": [0, 50], "query_start": [1, 2]}, ["2 positions of first queries"]),
    ({"cu_seqlens_k": [0, TOKENS]}, ["cu_seqlens_k is given without cu_seqlens"]),
    ({"cu_seqlens": [[0, 5]] * 3}, ["documents are of 3 batch entries, batch is 2"]),
    ({"cu_seqlens": [[0, 5], [0, 9, 7]]}, ["boundary 2 is 7"]),
    ({"cu_seqlens": [[0, 5], [0, 132]]}, ["of batch entry 1", "ends at query token 132"]),
    ({"cu_seqlens": [[0, 5]] * 2, "query_start": [1, 2, 3]}, ["cu_seqlens is of 2 batch entries, query_start of 3"]),
    ({"seqused_k": [5, TOKENS + 1]}, ["keys [0, 132) are used", "in batch entry 1"]),
    ({"seqused_k": 3, "leftpad_k": 5}, ["keys [5, 3) are used"]),
    ({"seqused_k": 3, "cu_seqlens": [0, 5]}, ["seqused_k and cu_seqlens are given"]),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_wrong_documents_are_config_errors(call: dict, words: list[str]) -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    for function in (at.ring_attention, annulus.attention):
        with pytest.raises(ConfigError) as error:
            function(q, k, v, **call)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        {"cu_seqlens": [0, 5.5]},
        {"cu_seqlens": [0, True]},
        {"cu_seqlens": "0, 5"},
        {"cu_seqlens": 5},
        {"cu_seqlens": torch.tensor(5)},
        {"cu_seqlens": torch.tensor([[[0, 5]]])},
        {"cu_seqlens": [[0, 5], 7]},
        {"cu_seqlens": [[0, 5], [0, None]]},
        {"seqused_k": [[5], [5]]},
        {"leftpad_k": "5"},
        {"cu_seqlens": {0: 5}},
        {"query_start": -1},
        {"query_start": 1.5},
        {"query_start": [0, None]},
        {"query_start": True},
    ],
)
def test_documents_of_another_kind_are_config_errors(call: dict) -> None:
    q, k, v, _ = tensors(TOKENS, torch.float32)
    for function in (at.ring_attention, annulus.attention):
        with pytest.raises(ConfigError, match=next(iter(call))):
            function(q, k, v, **call)


def test_masks_with_other_lengths_need_the_position_of_the_first_query() -> None:
    q, k, v, _ = tensors(9, torch.float32, keys=20)
    for function in (at.ring_attention, annulus.attention):
        for mask in MASKS[1:]:
            with pytest.raises(ConfigError, match="query_start"):
                function(q, k, v, **mask)


def test_patterns_with_documents_are_values() -> None:
    import pickle

    pattern = Pattern.dense(2, causal=True).with_documents([0, 3, 10], query_start=2)
    assert pattern.documents == [(0, 3, 0, 3, 2, 0, -1), (3, 10, 3, 10, 2, 0, -1)]
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert hash(pickle.loads(pickle.dumps(pattern))) == hash(pattern)
    assert pattern != Pattern.dense(2, causal=True)
    assert "2 documents" in repr(pattern)
    assert Pattern.dense(1).with_documents([0, 3, 10]).allowed_pairs(10) == 9 + 49
    with pytest.raises(ConfigError, match="has documents|with documents"):
        q = torch.zeros(1, 10, 2, 8)
        annulus.attention(q, q, q, pattern=pattern, cu_seqlens=[0, 10])


# ---- documents of single batch entries

ENTRIES = [[0, 33, 66, 100], [0, TOKENS], [0, 0, 40, 99, TOKENS], [0, 0], [0, TOKENS]]


def batch(size: int, heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, TOKENS, heads, 16, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("mask", MASKS)
def test_every_batch_entry_has_its_own_documents(mask: dict) -> None:
    inputs = batch(len(ENTRIES))
    found = gradients(lambda *x: at.ring_attention(*x, cu_seqlens=ENTRIES, **mask), *inputs)
    widest = max(map(len, ENTRIES))
    padded = torch.tensor([x + x[-1:] * (widest - len(x)) for x in ENTRIES])
    assert torch.equal(found[0], at.ring_attention(*inputs[:3], cu_seqlens=padded, **mask))
    for entry, boundaries in enumerate(ENTRIES):
        one = [x[entry : entry + 1] for x in inputs]
        alone = gradients(lambda *x: at.ring_attention(*x, cu_seqlens=boundaries, **mask), *one)
        for a, b in zip(found, alone):
            torch.testing.assert_close(a[entry : entry + 1], b, rtol=1e-5, atol=1e-6)
    ring = {"ranks": 3, "placement": "zigzag", "cu_seqlens": ENTRIES, **mask}
    o = annulus.attention(*inputs[:3], **ring)
    torch.testing.assert_close(o, found[0], rtol=1e-4, atol=1e-5)


def test_entries_have_their_own_keys_and_positions() -> None:
    q, k, v, _ = batch(3)
    q = q[:, :20]
    used, left, starts = [100, TOKENS, 57], [0, 13, 57], [80, 111, 40]
    call = {"query_start": starts, "seqused_k": used, "leftpad_k": left, "is_causal": True}
    found = at.ring_attention(q, k, v, **call)
    position = torch.arange(TOKENS)
    for entry in range(2):
        seen = (position >= left[entry]) & (position < used[entry])
        seen = seen & (position <= starts[entry] + torch.arange(20)[:, None])
        one = [x[entry : entry + 1].transpose(1, 2) for x in (q, k, v)]
        expected = scaled_dot_product_attention(*one, attn_mask=seen).transpose(1, 2)
        torch.testing.assert_close(found[entry : entry + 1], expected, rtol=1e-4, atol=1e-5)
    assert not found[2].any(), "it has no key"
    # What is padding may be anything.
    for entry in range(3):
        for x in (k, v):
            x[entry, used[entry] :] = torch.nan
            x[entry, : left[entry]] = torch.nan
    assert torch.equal(at.ring_attention(q, k, v, **call), found)
    assert torch.equal(annulus.attention(q, k, v, **call), found)
    nested = {"cu_seqlens": [[0, 5, 20]] * 3, "cu_seqlens_k": [[0, 50, 120]] * 3}
    flat = at.ring_attention(q, k, v.nan_to_num(), **nested, query_start=[3, 4, 5])
    lists = at.ring_attention(q, k, v.nan_to_num(), **nested, query_start=[[3, 3], [4, 4], [5, 5]])
    torch.testing.assert_close(flat, lists, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("group", [None, "world"])
def test_masks_of_padding_are_lengths(one_rank, group: str | None) -> None:
    q, k, v, do = batch(3)
    mask = torch.zeros(3, TOKENS, dtype=torch.bool)
    mask[0, 100:] = True
    mask[1, :13] = True
    mask[2] = True
    lengths = {"seqused_k": [100, TOKENS, 0], "leftpad_k": [0, 13, 0]}
    ring = {} if group is None else {"group": torch.distributed.group.WORLD}
    expected = gradients(lambda *x: at.ring_attention(*x, **lengths), q, k, v, do)
    found = gradients(lambda *x: at.ring_attention(*x, key_padding_mask=mask, **ring), q, k, v, do)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)
    mask[0, 50] = True  # a hole
    holes = at.ring_attention(q, k, v, key_padding_mask=mask, **ring)
    one = [x[:1].transpose(1, 2) for x in (q, k, v)]
    exact = scaled_dot_product_attention(*one, attn_mask=~mask[0].expand(TOKENS, TOKENS))
    torch.testing.assert_close(holes[:1], exact.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_calls_with_other_documents_share_an_executor() -> None:
    """Also if gradients are computed after other forwards. A pool of many executors would hold many workspaces."""
    q, k, v, do = batch(2)
    at.clear_cache()
    annulus.clear_cache()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lists = [[[0, cut, TOKENS], [0, TOKENS]] for cut in range(1, 30)]
    lists += [[0, 7, TOKENS], None]
    outputs = [at.ring_attention(*leaves, is_causal=True, cu_seqlens=x) for x in lists]
    assert len(at.ring._registry.executors()) == 1
    for boundaries, o in list(zip(lists, outputs))[::6]:
        grads = torch.autograd.grad(o, leaves, do)
        at.clear_cache()
        fresh = gradients(lambda *x: at.ring_attention(*x, is_causal=True, cu_seqlens=boundaries), q, k, v, do)
        for a, b in zip((o, *grads), fresh):
            assert torch.equal(a, b)

    def attend_all() -> None:
        for boundaries in lists:
            annulus.attention(q, k, v, is_causal=True, ranks=2, cu_seqlens=boundaries)

    assert executors_missed(attend_all) == 1
    for boundaries, o in list(zip(lists, outputs))[::6]:
        found = annulus.attention(q, k, v, is_causal=True, ranks=2, cu_seqlens=boundaries)
        torch.testing.assert_close(found, o.detach(), rtol=1e-4, atol=1e-5)


def test_executors_take_other_documents() -> None:
    pattern = Pattern.dense(4, causal=True)
    q, k, v, _ = (np.ascontiguousarray(x.numpy()) for x in batch(2))
    ring = annulus.RingAttention(
        pattern,
        Placement.contiguous(TOKENS, 1),
        transport=annulus.make_in_process_ring(1)[0],
        **{"batch": 2, "kv_heads": 4, "head_dim": 16},
    )
    expected = annulus.attention(q, k, v, is_causal=True, cu_seqlens=ENTRIES[:2])
    for _ in range(2):
        ring.set_documents(pattern.with_documents(ENTRIES[:2]))
        assert np.array_equal(ring.forward(q, k, v)[0], expected)
        ring.set_documents(pattern.with_documents([0, 200]))
        with pytest.raises(ConfigError, match="ends at query token 200"):
            ring.forward(q, k, v)
        for number in ("predicted_forward_bytes", "predicted_backward_bytes"):
            with pytest.raises(ConfigError, match="ends at query token 200"):
                getattr(ring, number)
        assert "no plan" in repr(ring)


def test_plans_outlive_the_documents_that_they_are_for() -> None:
    pattern = Pattern.dense(4, causal=True)
    ring = annulus.RingAttention(
        pattern,
        Placement.contiguous(TOKENS, 1),
        transport=annulus.make_in_process_ring(1)[0],
        kv_heads=4,
        head_dim=16,
    )
    ring.set_documents(pattern.with_documents([0, 1, TOKENS]))
    plan = ring.plan
    digest = plan.digest
    for cut in range(2, 9):
        ring.set_documents(pattern.with_documents([0, cut, TOKENS]))
    assert plan.digest == digest != ring.plan.digest
