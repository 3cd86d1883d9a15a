"""Arrays of every framework go in without a copy and come out as what went in."""

from __future__ import annotations

import types
from typing import Any

import annulus
import numpy as np
import pytest
from annulus._core import view_of
from support import make_ring, normal, problem
from support.foreign import CudaArray
from support.reference import relative_rms


def test_numpy_is_used_in_place() -> None:
    whole = normal(2, 5, 3, 16)
    packed = normal(2, 5, 3 * 3, 16)
    for array in (
        whole,
        normal(2, 3, 5, 16).transpose(0, 2, 1, 3),
        packed[:, :, 3:6],
        whole[::-1, ::2],
        np.broadcast_to(whole[:1], whole.shape),
    ):
        view = view_of(array)
        assert view["address"] == array.__array_interface__["data"][0]
        assert view["shape"] == array.shape and view["dtype"] == "float32"
        assert view["strides"] == tuple(s // 4 for s in array.strides)


def test_torch_is_used_in_place(torch: types.ModuleType) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        whole = torch.randn(2, 3, 5, 16).to(dtype)
        for tensor in (
            whole,
            whole.transpose(1, 2),
            whole[:, :, 1:4],
            whole[:1].expand(2, 3, 5, 16),
            torch.nn.Parameter(whole),
        ):
            view = view_of(tensor)
            assert view["address"] == tensor.data_ptr()
            assert view["strides"] == tensor.stride() and view["shape"] == tuple(tensor.shape)
            assert "torch." + view["dtype"] == str(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_transposed_heads_give_the_same_bits(dtype: str) -> None:
    q, k, v, do = problem(dtype=dtype)

    def transposed(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    o, lse = annulus.attention(q, k, v, return_lse=True)
    out = transposed(np.zeros_like(q))
    assert (
        annulus.attention(*map(transposed, (q, k, v)), out=out) is out
        and not out.flags.c_contiguous
    )
    assert np.array_equal(out, o)
    expected = annulus.attention_backward(q, k, v, o, lse, do)
    found = annulus.attention_backward(*map(transposed, (q, k, v, o)), lse, transposed(do))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))


def test_results_are_written_into_what_is_given() -> None:
    q, k, v, do = problem()
    ring = make_ring(70, 4, 16, batch=2, kv_heads=2)
    o, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    found = ring.forward(q, k, v, o, lse)
    assert found[0] is o and found[1] is lse
    # One packed array for three gradients: views that interleave.
    packed = np.full((2, 70, 4 + 2 + 2, 16), np.nan, np.float32)
    dq, dk, dv = packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]
    assert ring.backward(q, k, v, o, lse, do, dq, dk, dv)[1] is dk
    for a, b in zip((dq, dk, dv), ring.backward(q, k, v, o, lse, do)):
        assert np.array_equal(a, b)


def test_torch_in_torch_out(torch: types.ModuleType) -> None:
    q, k, v, do = map(torch.from_numpy, problem())
    o, lse = annulus.attention(q, k, v, return_lse=True)
    assert isinstance(o, torch.Tensor) and o.dtype == torch.float32 and lse.dtype == torch.float32
    assert np.array_equal(o.numpy(), annulus.attention(q.numpy(), k.numpy(), v.numpy()))
    gradients = annulus.attention_backward(q, k, v, o, lse, do)
    assert all(isinstance(g, torch.Tensor) for g in gradients)
    ring = make_ring(70, 4, 16, batch=2, kv_heads=2, dtype=torch.float32)
    assert torch.equal(ring.forward(q, k, v)[0], o)


def test_bfloat16_of_torch(torch: types.ModuleType) -> None:
    q, k, v, do = (torch.from_numpy(x).to(torch.bfloat16) for x in problem())
    o, lse = annulus.attention(q, k, v, return_lse=True)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wide = [x.float() for x in (q, k, v, do)]
    expected, expected_lse = annulus.attention(*wide[:3], return_lse=True)
    assert relative_rms(o.float(), expected.double().numpy()) < 5e-3
    dq, dk, dv = annulus.attention_backward(q, k, v, o, lse, do)
    for found, wanted in zip(
        (dq, dk, dv), annulus.attention_backward(*wide[:3], expected, expected_lse, wide[3])
    ):
        assert (
            found.dtype == torch.bfloat16
            and relative_rms(found.float(), wanted.double().numpy()) < 2e-2
        )
    ring = make_ring(70, 4, 16, batch=2, kv_heads=2, dtype=torch.bfloat16)
    assert torch.equal(ring.forward(q, k, v)[0], o)


def test_tensors_that_require_gradients_are_read_detached(torch: types.ModuleType) -> None:
    q = torch.randn(1, 10, 2, 16, requires_grad=True)
    o = annulus.attention(q, q, q)
    assert not o.requires_grad and torch.equal(
        o, annulus.attention(q.detach(), q.detach(), q.detach())
    )


def test_bfloat16_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    q, k, v, _ = problem()
    o = annulus.attention(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)))
    assert o.dtype == ml_dtypes.bfloat16
    assert (
        relative_rms(o.astype(np.float64), annulus.attention(q, k, v).astype(np.float64)) < 1e-2
    )


class OnlyInterface:
    """An array that speaks nothing but __array_interface__."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class Frozen:
    """Like JAX: read-only, and made from somebody else's memory by its namespace."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return types.SimpleNamespace(from_dlpack=lambda x: Frozen(np.from_dlpack(x)))


def test_other_frameworks() -> None:
    q, k, v, _ = problem()
    expected = annulus.attention(q, k, v)
    interface = annulus.attention(*map(OnlyInterface, (q, k, v)))
    assert isinstance(interface, np.ndarray) and np.array_equal(interface, expected)
    o, lse = annulus.attention(*map(Frozen, (q, k, v)), return_lse=True)
    assert isinstance(o, Frozen) and np.array_equal(o.array, expected)
    assert isinstance(lse, Frozen) and lse.array.shape == q.shape[:3]
    readonly = q.copy()
    readonly.flags.writeable = False
    assert np.array_equal(annulus.attention(readonly, k, v), expected)


def test_array_api_strict() -> None:
    xp = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    q, k, v, _ = problem()
    o = annulus.attention(*map(xp.asarray, (q, k, v)))
    assert type(o) is type(xp.asarray(q)) and np.array_equal(
        np.from_dlpack(o), annulus.attention(q, k, v)
    )


X = normal(1, 12, 2, 16)
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
WRONG = {
    "None": (None, "NoneType"),
    "list": ([[1.0]], "is a list"),
    "number": (3.5, "is a float"),
    "float64": (X.astype(np.float64), "float64"),
    "int32": (X.astype(np.int32), "int32"),
    "complex": (X.astype(np.complex64), "complex64"),
    "bool": (X.astype(bool), "bool"),
    "text": (np.array(["a"]), "cannot be used"),
    "big_endian": (X.astype(">f4"), "cannot be used"),
    "three_axes": (X[0], "is [12, 2, 16]"),
    "five_axes": (X[None], "is [1, 1, 12, 2, 16]"),
    "last_axis": (X[..., ::2], "last axis"),
    "cuda": (CudaArray(), "is on cuda:0, expected cpu like the executor"),
}


NAMES = ["q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"]


# None asks for a new array where results go.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in WRONG
        for name in NAMES
        if kind != "None" or name not in ("dq", "dk", "dv")
    ],
)
def test_wrong_arrays_are_config_errors_that_name_them(kind: str, name: str) -> None:
    array, message = WRONG[kind]
    dim = 8 if kind == "last_axis" else 16
    if name == "lse" and kind in ("three_axes", "last_axis", "five_axes", "cuda"):
        array, message = X, "is [1, 12, 2, 16]"
    ring = make_ring(12, 2, dim)
    usual = np.ascontiguousarray(X[..., :dim])
    arrays: dict[str, Any] = {n: usual for n in ("q", "k", "v", "o", "do")} | {
        "lse": normal(1, 12, 2)
    }
    arrays |= {n: usual.copy() for n in ("dq", "dk", "dv")}
    with pytest.raises(annulus.ConfigError) as caught:
        ring.backward(**{**arrays, name: array})
    assert f" {name} " in str(caught.value) and message in str(caught.value)
    ring.backward(**arrays)  # nothing is broken by it


def test_masked_arrays_are_refused() -> None:
    masked = np.ma.masked_array(X, np.zeros_like(X, bool))
    with pytest.raises(annulus.ConfigError, match="k is a masked array, expected a plain one"):
        annulus.attention(X, masked, X)
    annulus.attention(X, masked.filled(0), X)


def test_tensors_whose_memory_has_the_other_sign_are_refused(torch: types.ModuleType) -> None:
    x = torch.from_numpy(X)
    negative = torch._neg_view(x)
    ring = make_ring(12, 2, 16)
    with pytest.raises(annulus.ConfigError, match="v has its lazy negation bit set"):
        annulus.attention(x, x, negative)
    with pytest.raises(annulus.ConfigError, match="o has its lazy negation bit set"):
        ring.forward(x, x, x, torch._neg_view(torch.empty_like(x)))
    expected = annulus.attention(x, x, -x)
    assert torch.equal(annulus.attention(x, x, negative.resolve_neg()), expected)


def test_results_need_memory_of_their_own() -> None:
    ring = make_ring(12, 2, 16)
    out = np.empty_like(X)
    for o, message in [
        (READ_ONLY, "o is read-only"),
        (X, "o shares memory with q"),
        (np.broadcast_to(X[:, :1], X.shape), "o is read-only"),
        (np.lib.stride_tricks.as_strided(out, X.shape, (0, 0, 64, 4)), "o has stride 0 on axis 1"),
    ]:
        with pytest.raises(annulus.ConfigError) as caught:
            ring.forward(X, X, X, o)
        assert message in str(caught.value)
    packed = normal(1, 12, 6, 16)  # q, k and v of one projection interleave, and so may results
    q, k, v = packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]
    expected = annulus.attention(q, k, v)
    room = np.empty((1, 12, 4, 16), np.float32)
    room[:, :, :2] = q
    assert np.array_equal(annulus.attention(room[:, :, :2], k, v, out=room[:, :, 2:]), expected)
    assert np.array_equal(room[:, :, :2], q)
    for shifted in (packed[:, 1:], packed[:, ::-1], packed[:, :, 1:], packed[..., 4:]):
        size = [min(a, b) for a, b in zip(shifted.shape, (1, 11, 2, 8))]
        part = tuple(slice(n) for n in size)
        a, b = packed[part], shifted[part]
        with pytest.raises(annulus.ConfigError, match="out shares memory with q"):
            annulus.attention(a, a.copy(), a.copy(), out=b)
    with pytest.raises(annulus.ConfigError, match="dv shares memory with dk"):
        ring.backward(X, X, X, X, normal(1, 12, 2), X, None, out, out)
