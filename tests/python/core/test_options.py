"""Every option of an executor, listed once in C++, is a flag of the tool and an argument in Python."""

from __future__ import annotations

import inspect
import subprocess
import types
from typing import Any

import annulus
import numpy as np
import pytest
from annulus import Pattern, Placement
from annulus._core import ring_options
from support import problem

OPTIONS = {option["name"]: option for option in ring_options()}
# Arguments that ring_attention does not have, because its tensors, or autograd, say what they are.
NOT_OF_TORCH = {"batch", "kv_heads", "head_dim", "dtype", "device", "max_qkv_elements", "backward"}


def another(name: str) -> Any:
    """A valid value that is not the default."""
    option = OPTIONS[name]
    if option["kind"] == "flag":
        return not option["default"]
    if option["kind"] == "whole":
        return option["default"] + 1 if name != "head_dim" else 32
    return {"name": option["names"][-1:], "device": ("cpu",)}.get(option["kind"], (0.25,))[0]


def test_the_list_has_what_is_derived_from_it() -> None:
    assert {"batch", "scale", "schedule", "threads", "device"} <= set(OPTIONS)
    for name, option in OPTIONS.items():
        assert option["help"] and option["annotation"], name
        assert option["shared"] in ("same", "choice", "own"), name
        assert (option["kind"] == "name") == bool(option["names"]), name
        assert (option["kind"] == "whole") == ("most" in option), name
    assert OPTIONS["threads"]["most"] == 4096 and OPTIONS["kv_heads"]["most"] == 2**31 - 1


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_a_flag(name: str, tool: str) -> None:
    flag = name.replace("_", "-")
    flag = f"--no-{flag}" if OPTIONS[name]["default"] is True else f"--{flag}"
    text = subprocess.run(
        [tool, "run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert flag in text.split() and OPTIONS[name]["help"] in text


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_an_argument_of_the_executor(name: str) -> None:
    for method in (annulus.RingAttention.__init__, annulus.RingAttentionCache.get):
        assert f", {name}: " in method.__nb_signature__[0][0]
    assert f"{name}:" in annulus.RingAttention.__doc__.replace(",", ":")
    options = {"head_dim": 16, name: another(name)}
    transport = annulus.make_in_process_ring(1)[0]
    annulus.RingAttention(
        Pattern.dense(4), Placement.contiguous(9, 1), transport=transport, **options
    )
    if name != "dtype":  # which takes whatever has a name
        with pytest.raises((TypeError, annulus.ConfigError), match=name):
            annulus.RingAttention(
                Pattern.dense(4),
                Placement.contiguous(9, 1),
                transport=transport,
                **options | {name: [None]},
            )


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - NOT_OF_TORCH))
def test_every_option_is_an_argument_of_the_torch_function(
    name: str, torch: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import annulus.torch as at

    made: list[dict] = []

    def executor(*args: Any, **options: Any) -> annulus.RingAttention:
        made.append(options)
        return annulus.RingAttention(*args, **options)

    monkeypatch.setattr(at.ring._executors, "RingAttention", executor)
    q = torch.randn(1, 12, 2, 16)
    expected = at.ring_attention(q, q, q, scale=0.25)
    for call in (at.ring_attention, at.RingDilatedAttention, at.RingMultiheadDilatedAttention):
        parameter = inspect.signature(call).parameters[name]
        assert parameter.default == OPTIONS[name]["default"]
        assert f"{name}:" in at.ring_attention.__doc__.replace(",", ":")
    at.clear_cache()
    value = another(name)
    given = {"scale": 0.25, name: value}
    keeps_the_result = name not in ("softcap", "dropout_p")  # the others leave at most rounding
    o = at.ring_attention(q, q, q, **given)
    assert torch.allclose(o, expected, rtol=1.3e-6, atol=1e-5) == keeps_the_result
    assert made[-1][name] == value
    at.clear_cache()
    module = at.RingDilatedAttention(**given)
    assert getattr(module, name) == value
    o = module(q, q, q)
    assert torch.allclose(o, expected, rtol=1.3e-6, atol=1e-5) == keeps_the_result
    assert made[-1][name] == value
    with pytest.raises(annulus.ConfigError, match=f"{name} is"):
        at.ring_attention(q, q, q, **{name: [None]})


def test_what_the_torch_function_leaves_out_has_a_reason(torch: types.ModuleType) -> None:
    import annulus.torch as at

    assert set(at._options.NO_ARGUMENTS) == NOT_OF_TORCH
    assert all(at._options.NO_ARGUMENTS.values())
    q = torch.randn(1, 12, 2, 16)
    for name in (*NOT_OF_TORCH, "segment_length"):
        calls = [lambda: at.ring_attention(q, q, q, **{name: 1})]
        if name not in ("device", "dtype"):  # which published code passes to modules
            calls.append(lambda: at.RingDilatedAttention(**{name: 1}))
        for call in calls:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                call()


def test_flags_may_be_numpys() -> None:
    yes, no = np.bool_(True), np.bool_(False)
    q, k, v, _ = problem()
    o, _ = annulus.attention(q, k, v, is_causal=yes, reproducible=no, return_lse=yes)
    assert np.array_equal(o, annulus.attention(q, k, v, is_causal=True))
    assert Pattern.dense(2, causal=yes).causal is True
    assert Pattern.longnet(2, [4], [1], causal=yes, group_scale=no) == Pattern.longnet(
        2, [4], [1], causal=True
    )
    assert Pattern.head_groups(2, [4], [1], causal=no).causal is False
    transport = annulus.make_in_process_ring(1)[0]
    annulus.RingAttention(
        Pattern.dense(2),
        Placement.contiguous(9, 1),
        transport=transport,
        head_dim=16,
        backward=no,
        reproducible=yes,
    )
    for wrong in (1, "yes", None, np.int64(1), np.array([True, False])):
        with pytest.raises(TypeError):
            Pattern.dense(2, causal=wrong)


def test_flags_of_torch_may_be_numpys(torch: types.ModuleType) -> None:
    import annulus.torch as at

    q = torch.randn(1, 12, 2, 16)
    expected = at.ring_attention(q, q, q, is_causal=True, reproducible=True)
    yes = np.bool_(True)
    assert torch.equal(at.ring_attention(q, q, q, is_causal=yes, reproducible=yes), expected)
    module = at.RingDilatedAttention(is_causal=yes, reproducible=yes)
    assert torch.equal(module(q, q, q), expected)
    with pytest.raises(annulus.ConfigError, match="is_causal is np.int64"):
        at.ring_attention(q, q, q, is_causal=np.int64(1))
