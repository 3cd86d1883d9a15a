"""Calls that need little: nothing of PyTorch's takes part in them but autograd, and they look like one before.

What PyTorch does around a registered operator, and what is looked at in a call to tell what is wrong with it, takes
longer than the attention of a few thousand tokens on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_PLAIN = {torch.Tensor, torch.nn.Parameter}
# Texts of the calls so far that nothing was wrong with, by all that it depends on. They are few; should they not be,
# they are looked at anew. Only of values that cannot change: a tensor is still the same object when it holds another
# number.
_texts: dict[tuple, str] = {}
_MOST_TEXTS = 1000
_CONSTANTS = (str, int, float, type(None), np.generic)
_LISTS = (list, tuple)


def needs_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _a_function_mode_looks() -> bool:
    """Other than that of a default device, which concerns tensors that are made without saying where."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def nobody_looks(*tensors: torch.Tensor) -> bool:
    """Whether nothing but autograd takes part in a call: no compiler, tracer, profiler or mode, no tensors of
    another kind."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and (torch._C._len_torch_function_stack() == 0 or not _a_function_mode_looks())
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not torch.autograd._profiler_enabled()
        and _PLAIN.issuperset(map(type, tensors))
        and not any(map(torch.is_neg, tensors))  # whose memory has the other sign
    )


def looks_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: tuple,
    options: dict[str, object],
) -> tuple | None:
    """All that the text of a call depends on; `call`: its fields of Config before the options. None: it is no plain
    one in this process alone, and has to be looked at."""
    group, pattern, segment_lengths, dilation_rates = call[:4]
    if (
        group is not None
        or not nobody_looks(q, k, v)
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    numbers: tuple = ()
    if segment_lengths is not None or dilation_rates is not None:
        if type(segment_lengths) not in _LISTS or type(dilation_rates) not in _LISTS:
            return None  # what can be gone through only once, perhaps
        call = (pattern, len(segment_lengths), *call[4:])
        numbers = (*segment_lengths, *dilation_rates)
    if options:
        call = (*call, *options, *options.values())
    try:
        tensors = (
            *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            *(q.layout, k.layout, v.layout, needs_gradient(q, k, v)),
        )
    except RuntimeError:  # nested tensors have no shape
        return None
    # With the types, because 1 == True and 6 == 6.0: one is not right because another was.
    return tensors, call, numbers, (*map(type, call), *map(type, numbers))


def text_of(looks: tuple) -> str | None:
    """That of a call before this one that looked the same."""
    try:
        return _texts.get(looks)
    except TypeError:  # something unhashable, which is hardly right
        return None


def remember(looks: tuple, text: str) -> None:
    """Nothing was wrong with a call."""
    _, call, numbers, _ = looks
    if not all(isinstance(x, _CONSTANTS) for x in (*call, *numbers)):
        return
    if len(_texts) >= _MOST_TEXTS:
        _texts.clear()
    _texts[looks] = text
