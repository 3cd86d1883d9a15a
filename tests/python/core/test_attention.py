"""attention() on whole arrays: the definition, the tool's bits, and every way to call it."""

from __future__ import annotations

import json
import pathlib
import subprocess
import threading
from typing import Any

import annulus
import numpy as np
import pytest
from annulus import Pattern, Placement
from support import normal, problem
from support.reference import attention as reference
from support.reference import relative_rms

LONGNET = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]}
PATTERNS: dict[str, tuple[dict[str, Any], Pattern]] = {
    "dense": ({}, Pattern.dense(4)),
    "causal": ({"is_causal": True}, Pattern.dense(4, causal=True)),
    "longnet": (LONGNET, Pattern.longnet(4, [16, 64], [1, 2])),
    "longnet_causal": (
        {**LONGNET, "is_causal": True},
        Pattern.longnet(4, [16, 64], [1, 2], causal=True),
    ),
    "interleaved": (
        {**LONGNET, "pattern": "longnet", "offsets": "interleaved", "group_scale": True},
        Pattern.longnet(4, [16, 64], [1, 2], offsets="interleaved", group_scale=True),
    ),
    "window": ({"window": (9, 4)}, Pattern.dense(4, window=(9, 4))),
    "window_longnet_causal": (
        {**LONGNET, "is_causal": True, "window": [12, 0]},
        Pattern.longnet(4, [16, 64], [1, 2], causal=True, window=(12, 0)),
    ),
    # Heads of the second group attend to nothing at most positions.
    "head_groups": (
        {
            "pattern": "head_groups",
            "segment_lengths": [16, 32],
            "dilation_rates": [1, 4],
            "group_scale": True,
        },
        Pattern.head_groups(4, [16, 32], [1, 4], group_scale=True),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_matches_the_definition(name: str, kv_heads: int) -> None:
    options, pattern = PATTERNS[name]
    q, k, v, do = problem(kv_heads=kv_heads)
    expected = reference(pattern, q, k, v, do)
    o, lse = annulus.attention(q, k, v, return_lse=True, **options)
    assert relative_rms(o, expected.o) < 2e-6
    attends = np.isfinite(expected.lse)
    assert np.array_equal(np.isfinite(lse), attends) and (lse[~attends] == -np.inf).all()
    assert np.abs(lse[attends] - expected.lse[attends]).max() < 5e-6
    assert (o[~attends] == 0).all()
    for found, wanted in zip(
        annulus.attention_backward(q, k, v, o, lse, do, **options),
        (expected.dq, expected.dk, expected.dv),
    ):
        assert relative_rms(found, wanted) < 2e-6
    assert np.array_equal(annulus.attention(q, k, v, pattern=pattern), o)


def test_the_librarys_oracle_agrees_with_this_one() -> None:
    for _, pattern in PATTERNS.values():
        arrays = [x.astype(np.float64) for x in problem(tokens=40)]
        expected = reference(pattern, *arrays)
        o, lse = annulus.reference_forward(*arrays[:3], pattern)
        assert np.allclose(o, expected.o, atol=1e-12) and np.allclose(lse, expected.lse, atol=1e-12)
        for found, wanted in zip(
            annulus.reference_backward(*arrays, pattern), (expected.dq, expected.dk, expected.dv)
        ):
            assert np.allclose(found, wanted, atol=1e-12)


def test_scale_is_honoured() -> None:
    q, k, v, do = problem(tokens=30)
    expected = reference(Pattern.dense(4), q, k, v, do, scale=0.7)
    assert relative_rms(annulus.attention(q, k, v, scale=0.7), expected.o) < 2e-6


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["dense", "longnet_causal", "window"])
def test_gives_the_bits_of_the_tool(
    tool: str, tmp_path: pathlib.Path, dtype: str, ranks: int, name: str
) -> None:
    options, _ = PATTERNS[name]
    q, k, v, do = problem(dtype=dtype)
    for file, array in {"q": q, "k": k, "v": v, "do": do}.items():
        np.save(tmp_path / f"{file}.npy", array)
    command = [
        tool,
        "run",
        "--input",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
        "--json",
        "--ranks",
        str(ranks),
    ]
    command += {
        "dense": ["--pattern", "dense"],
        "longnet_causal": ["--segments", "16,64", "--dilations", "1,2", "--causal"],
        "window": ["--pattern", "dense", "--window", "9,4"],
    }[name]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert report["kernels"] == annulus.isa()

    o, lse = annulus.attention(q, k, v, ranks=ranks, return_lse=True, **options)
    dq, dk, dv = annulus.attention_backward(q, k, v, o, lse, do, ranks=ranks, **options)
    for file, array in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        saved = np.load(tmp_path / "out" / f"{file}.npy")
        assert saved.dtype == array.dtype and saved.tobytes() == array.tobytes(), file


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped", "hilbert"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_ring_changes_nothing(placement: str, ranks: int) -> None:
    q, k, v, do = problem()
    options = {**LONGNET, "is_causal": True, "reproducible": True}
    o, lse = annulus.attention(q, k, v, return_lse=True, **options)
    gradients = annulus.attention_backward(q, k, v, o, lse, do, **options)
    ring = {"ranks": ranks, "placement": placement, **options}
    o_ring, lse_ring = annulus.attention(q, k, v, return_lse=True, **ring)
    assert np.array_equal(o, o_ring) and np.array_equal(lse, lse_ring)
    assert np.array_equal(o, annulus.attention(q, k, v, **ring))  # without the log-sum-exp, too
    for a, b in zip(gradients, annulus.attention_backward(q, k, v, o_ring, lse_ring, do, **ring)):
        assert np.array_equal(a, b)


def test_placement_objects_fewer_tokens_than_ranks_and_schedules() -> None:
    q, k, v, _ = problem(tokens=7)
    expected = annulus.attention(q, k, v)
    backwards = Placement.explicit(7, [[range(4, 7), range(0, 2)], [], [range(2, 4)]])
    for options in [
        {"placement": backwards},
        {"placement": backwards, "ranks": 3},
        {"ranks": 9},
        {"ranks": 9, "placement": "hilbert"},
        {"ranks": 3, "schedule": "ring"},
        {"ranks": 3, "schedule": "gather"},
    ]:
        assert relative_rms(annulus.attention(q, k, v, **options), expected) < 1e-6


def test_out_is_filled_and_returned() -> None:
    q, k, v, _ = problem()
    out = np.full_like(q, np.nan)
    assert annulus.attention(q, k, v, out=out) is out
    assert np.array_equal(out, annulus.attention(q, k, v))


def test_threads_may_call_at_once() -> None:
    q, k, v, _ = problem(tokens=300)
    expected = annulus.attention(q, k, v)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(30):
            if not np.array_equal(annulus.attention(q, k, v), expected):
                wrong.append("different bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_big_arrays_need_no_options() -> None:
    # More elements than the limit of one rank of a ring, 100 million; narrow segments keep it quick.
    q = np.zeros((1, 140_000, 4, 64), np.float32)
    assert 3 * q.size > 100_000_000
    o = annulus.attention(q, q, q, segment_lengths=[64], dilation_rates=[16])
    assert o.shape == q.shape
    annulus.clear_cache()


def test_cache_is_bounded_and_cleared() -> None:
    annulus.clear_cache()
    assert annulus.cache_info() == {"size": 0, "bytes": 0}
    for tokens in range(1, 31):
        q = normal(1, tokens, 1, 8)
        annulus.attention(q, q, q)
    assert annulus.cache_info()["size"] == 20 and annulus.cache_info()["bytes"] > 0
    annulus.clear_cache()
    annulus.clear_cache()
    assert annulus.cache_info()["size"] == 0


Q = normal(1, 12, 4, 16)
K = normal(1, 12, 2, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: annulus.attention(Q, K[:, :5], K), "v is [1, 12, 2, 16], expected [1, 5, 2, 16]"),
        (lambda: annulus.attention(Q, K[:0], K), "k is [0, 12, 2, 16], expected [1, tokens, key heads"),
        (lambda: annulus.attention(Q, K[:, :0], K[:, :0]), "q has 12 tokens and k 0"),
        (lambda: annulus.attention(Q, K, K[:, :, :1]), "v is [1, 12, 1, 16]"),
        (lambda: annulus.attention(Q, Q[:, :, :3], Q[:, :, :3]), "kv_heads is 3"),
        (
            lambda: annulus.attention(Q, K, K.astype(np.float16)),
            "v is float16, expected float32 like k",
        ),
        (lambda: annulus.attention(Q, K, K, out=Q[:, :5].copy()), "out is [1, 5, 4, 16]"),
        (lambda: annulus.attention(Q, K, K, pattern="spiral"), "pattern is 'spiral'"),
        (lambda: annulus.attention(Q, K, K, pattern=3), "pattern is a int"),
        (
            lambda: annulus.attention(Q, K, K, pattern="longnet"),
            "needs segment_lengths and dilation_rates",
        ),
        (
            lambda: annulus.attention(Q, K, K, segment_lengths=[4]),
            "needs segment_lengths and dilation_rates",
        ),
        (lambda: annulus.attention(Q, K, K, pattern="dense", **LONGNET), "leave them out"),
        (
            lambda: annulus.attention(Q, K, K, pattern=Pattern.dense(4), is_causal=True),
            "leave these arguments out",
        ),
        (
            lambda: annulus.attention(Q, K, K, pattern=Pattern.dense(3)),
            "q has 4 heads, the pattern is for 3",
        ),
        (lambda: annulus.attention(Q, K, K, ranks=0), "ranks is 0"),
        (lambda: annulus.attention(Q, K, K, placement="spiral"), "'spiral'"),
        (lambda: annulus.attention(Q, K, K, placement=7), "placement is neither"),
        (lambda: annulus.attention(Q, K, K, placement=Placement.zigzag(11, 2)), "11 tokens"),
        (
            lambda: annulus.attention(Q, K, K, placement=Placement.zigzag(12, 2), ranks=3),
            "on 2 ranks",
        ),
        (lambda: annulus.attention(Q, K, K, schedule="fast"), "schedule is 'fast'"),
        (lambda: annulus.attention(Q, K, K, scale=-1.0), "scale is -1"),
        (
            lambda: annulus.attention(np.tile(Q, 33), *[np.tile(K, 33)] * 2),
            "head_dim is 528, expected 1 to 512",
        ),
        (lambda: annulus.attention_backward(Q, K, K, Q, normal(1, 12, 3), Q), "lse is [1, 12, 3]"),
        (lambda: annulus.attention_backward(Q, K, K, Q, Q, Q), "lse is [1, 12, 4, 16]"),
        (
            lambda: annulus.attention_backward(Q, K, K, Q, normal(1, 12, 4), K),
            "do is [1, 12, 2, 16]",
        ),
    ],
)
def test_wrong_arguments_are_config_errors_that_name_them(call, message: str) -> None:
    with pytest.raises(annulus.ConfigError) as caught:
        call()
    assert message in str(caught.value)
    # Nothing is broken by it.
    assert annulus.attention(Q, K, K).shape == Q.shape


@pytest.mark.parametrize("shape", [(2, 0, 4, 16), (0, 5, 4, 16)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_gives_nothing(shape: tuple[int, ...], ranks: int) -> None:
    q = np.empty(shape, np.float32)
    options = {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "ranks": ranks}
    o, lse = annulus.attention(q, q, q, return_lse=True, **options)
    assert o.shape == shape and lse.shape == shape[:3]
    gradients = annulus.attention_backward(q, q, q, o, lse, o, **options)
    assert [g.shape for g in gradients] == [shape] * 3
    with pytest.raises(annulus.ConfigError, match="zig-zag"):
        annulus.attention(q, q, q, placement="zig-zag", ranks=ranks)
    with pytest.raises(annulus.ConfigError, match="ranks"):
        annulus.attention(q, q, q, ranks=0)
