"""The fast path: no dispatcher and no validation if an identical call succeeded before.

PyTorch's work around a registered operator, and the validation of a call, take longer than the attention of a few
thousand tokens on a GPU. A call without a group takes the fast path if only autograd takes part in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_PLAIN = {torch.Tensor, torch.nn.Parameter}
# The configuration texts of valid calls, by call signature. Programs make few different calls; if there are many, all are
# forgotten and validated again. Only calls whose arguments are immutable: a tensor that holds another number is still
# the same object.
_texts: dict[tuple, str] = {}
_MOST_TEXTS = 1000
_CONSTANTS = (str, int, float, type(None), np.generic)
_LISTS = (list, tuple)


def needs_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _function_mode_active() -> bool:
    """Whether there is a mode other than torch.set_default_device's, which concerns new tensors only."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def only_autograd_active(*tensors: torch.Tensor) -> bool:
    """Whether only autograd takes part in a call: no compiler, tracer, profiler or mode, and no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and (torch._C._len_torch_function_stack() == 0 or not _function_mode_active())
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not torch.autograd._profiler_enabled()
        and _PLAIN.issuperset(map(type, tensors))
        and not any(map(torch.is_neg, tensors))  # the lazy negation bit: the memory has the other sign
    )


def call_signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: tuple,
    options: dict[str, object],
) -> tuple | None:
    """Everything that the validity and the text of a call depend on. None: the call cannot take the fast path.

    `call` has its fields of Config before the options.
    """
    group, pattern, segment_lengths, dilation_rates = call[:4]
    if (
        group is not None
        or not only_autograd_active(q, k, v)
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    numbers: tuple = ()
    if segment_lengths is not None or dilation_rates is not None:
        if type(segment_lengths) not in _LISTS or type(dilation_rates) not in _LISTS:
            return None  # an iterator, perhaps, which can be read only once
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
    # With the types, because 1 == True and 6 == 6.0: one is not valid because another is.
    return tensors, call, numbers, (*map(type, call), *map(type, numbers))


def text_of(signature: tuple) -> str | None:
    """The text of an earlier valid call with this signature."""
    try:
        return _texts.get(signature)
    except TypeError:  # an argument that cannot be hashed, which is hardly valid
        return None


def remember(signature: tuple, text: str) -> None:
    """Stores the text of a valid call."""
    _, call, numbers, _ = signature
    if not all(isinstance(x, _CONSTANTS) for x in (*call, *numbers)):
        return
    if len(_texts) >= _MOST_TEXTS:
        _texts.clear()
    _texts[signature] = text
