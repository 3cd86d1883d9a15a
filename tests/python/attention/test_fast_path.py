"""Calls on the fast path: modes still see them, and wrong or different calls are not mistaken for earlier ones."""

from __future__ import annotations

import contextlib

import pytest
from support import executors_missed, python_calls

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402
from annulus import ConfigError  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


def tensors(
    grad: bool = False, tokens: int = 70, heads: int = 4, batch: int = 2
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, batch, tokens, heads, 16, generator=generator).unbind()
    return [x.requires_grad_(grad) for x in (q, k, v)] + [do]


class _Seen:
    """Records the names of the functions that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def _see(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class SeenFunctions(_Seen, TorchFunctionMode):
    __torch_function__ = _Seen._see


class SeenOperators(_Seen, TorchDispatchMode):
    __torch_dispatch__ = _Seen._see


@pytest.mark.parametrize("mode", [SeenFunctions, SeenOperators])
@pytest.mark.parametrize("grad", [False, True])
def test_modes_see_a_call_and_its_gradient(mode: type, grad: bool) -> None:
    """Also if the same call was made before without a mode."""
    q, k, v, do = tensors(grad)
    plain = [at.ring_attention(q, k, v) for _ in range(2)][1]
    with mode() as seen:
        o = at.ring_attention(q, k, v)
        if grad:
            o.backward(do)
    assert torch.equal(o, plain)
    # Functions of modes see what is called, Tensor.backward, and not what that calls.
    calls = 2 if grad and mode is SeenOperators else 1
    assert sum(name.startswith("annulus.attend") for name in seen.names) == calls, seen.names
    before = len(seen.names)
    at.ring_attention(q, k, v)
    assert len(seen.names) == before


def test_modes_may_do_something_else() -> None:
    class Zeros(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if "annulus" not in str(function):
                return found
            return (torch.zeros_like(found[0]), *found[1:])

    q, k, v, _ = tensors()
    assert at.ring_attention(q, k, v).any()
    with Zeros():
        assert not at.ring_attention(q, k, v).any()
    assert at.ring_attention(q, k, v).any()


def test_a_default_device_does_not_leave_the_fast_path() -> None:
    """torch.set_default_device is a mode, too, but it does not concern a call."""
    q, k, v, _ = tensors()
    with torch.device("cpu"):
        assert at._fast_path.only_autograd_active(q, k, v)
        with SeenFunctions():
            assert not at._fast_path.only_autograd_active(q, k, v)
    with torch.device("meta"):  # results are where the tensors are
        assert at.ring_attention(q, k, v).device.type == "cpu"


def test_a_wrong_call_is_refused_after_a_similar_valid_one() -> None:
    q, k, v, _ = tensors()
    right = dict(segment_lengths=[16, 32], dilation_rates=[1, 2], is_causal=True, scale=1)
    for _ in range(2):
        at.ring_attention(q, k, v, **right)
    for wrong in (
        dict(is_causal=1),
        dict(segment_lengths=[16.0, 32]),
        dict(segment_lengths=[16, 32, 64]),
        dict(dilation_rates=[True, 2]),
        dict(scale=True),
        dict(n_global=7),
        dict(schedule=["ring"]),
    ):
        for _ in range(2):
            with pytest.raises(ConfigError):
                at.ring_attention(q, k, v, **right | wrong)
    for x in (v.double(), v[:, :-1], v[:, :, :, :8], v.to_sparse()):
        with pytest.raises(ConfigError):
            at.ring_attention(q, k, x, **right)


def test_similar_calls_are_different_calls() -> None:
    q, k, v, _ = tensors()
    scale = torch.tensor(1.0)
    first = at.ring_attention(q, k, v, scale=scale)
    scale.fill_(0.25)  # the same object still
    assert torch.equal(at.ring_attention(q, k, v, scale=scale), at.ring_attention(q, k, v, scale=0.25))
    assert not torch.equal(at.ring_attention(q, k, v, scale=scale), first)
    for _ in range(2):
        assert at.ring_attention(q, k, v).grad_fn is None
        assert at.ring_attention(q.requires_grad_(), k, v).grad_fn is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert at.ring_attention(q, k, v).dtype == torch.bfloat16
        q.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert at.ring_attention(q, k, v).dtype == torch.bfloat16


def test_lists_are_told_apart_by_where_their_elements_are() -> None:
    """Documents of single batch entries on one side or on the other, with the same numbers."""
    q = tensors(tokens=10)[0]
    k, v = tensors(tokens=12)[1:3]
    calls = [
        {"cu_seqlens": [0, 10], "cu_seqlens_k": [[0, 10], [0, 12]]},
        {"cu_seqlens": [[0, 10], [0, 10]], "cu_seqlens_k": [0, 12]},
    ]
    alone = []
    for call in calls:
        at._fast_path._calls.clear()
        alone.append(at.ring_attention(q, k, v, **call))
    for call, expected in zip(calls, alone):
        assert torch.equal(at.ring_attention(q, k, v, **call), expected)
    # The same numbers, but too deep in lists.
    at.ring_attention(q, q, q, cu_seqlens=[[0, 10], [0, 10]])
    with pytest.raises(ConfigError):
        at.ring_attention(q, q, q, cu_seqlens=[[[0], [10]], [[0], [10]]])


@pytest.mark.parametrize("mode", [contextlib.nullcontext, SeenOperators, SeenFunctions])
def test_equal_calls_are_validated_once(
    mode: type, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = []
    validate = at._functional.tensor_complaint
    monkeypatch.setattr(at._fast_path, "_calls", {})
    monkeypatch.setattr(
        at._functional, "tensor_complaint", lambda *x: validated.append(x[0].dtype) or validate(*x)
    )
    q, k, v, _ = tensors()
    for group in (None, torch.distributed.group.WORLD):
        for _ in range(3):
            with mode():
                at.ring_attention(q, k, v, group=group)
                with torch.autocast("cpu", torch.bfloat16):
                    at.ring_attention(q, k, v, group=group)
    assert validated == [torch.float32, torch.bfloat16] * 2


def test_small_calls_do_little() -> None:
    """'make perf' measures their time. Other versions of PyTorch make more or fewer calls of their own."""
    q, k, v, do = tensors(True, tokens=8, heads=1, batch=1)

    def forward() -> None:
        with torch.no_grad():
            at.ring_attention(q, k, v)

    def both() -> None:
        at.ring_attention(q, k, v).backward(do)

    for call, most in ((forward, 75), (both, 205)):  # 61 and 171; without the fast path 98 and 233
        call()
        assert executors_missed(call) == 0
        called = python_calls(call)
        assert len(called) <= most, (len(called), called)


def test_tensors_with_the_lazy_negation_bit() -> None:
    """For example the imaginary part of a conjugate, which is a view."""
    x, grad = torch.randn(2, 1, 32, 2, 16).unbind()
    q, k, v = x.requires_grad_(), torch.randn(1, 32, 2, 16), torch.randn(1, 32, 2, 16)
    assert torch.equal(at.ring_attention(torch._neg_view(q), k, v), at.ring_attention(-q, k, v))
    assert torch.equal(at.ring_attention(q, k, torch._neg_view(v)), at.ring_attention(q, k, -v))
    o = at.ring_attention(q, k, v)
    found, expected = (
        torch.autograd.grad(o, q, g, retain_graph=True)[0] for g in (torch._neg_view(grad), -grad)
    )
    assert torch.equal(found, expected)
