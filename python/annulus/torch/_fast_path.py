"""The fast path: no dispatcher and no validation if an identical call was valid before.

PyTorch's work around a registered operator, and the validation of a call, take longer than the attention of a few
thousand tokens on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from annulus import Placement
from annulus.torch._config import DOCUMENTS, MOST_CALLS, Call
from annulus.torch._options import each_number

_PLAIN = {torch.Tensor, torch.nn.Parameter}
# Valid calls by their signatures. Programs make few different calls; if there are many, all are forgotten and validated
# again. Only calls whose arguments are immutable: a tensor that holds another number is still the same object.
_calls: dict[tuple, Call] = {}
_CONSTANTS = (str, int, float, type(None), np.generic, Placement)
_LISTS = (list, tuple)
_END_OF_LISTS = 5 + len(DOCUMENTS)  # in the arguments of a call: from segment_lengths to the documents


def needs_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> bool:
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )


def _function_mode_active() -> bool:
    """Whether there is a mode other than torch.set_default_device's, which concerns new tensors only."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def is_eager(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether there is no compiler, tracer or transform (torch.func), and no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and _PLAIN.issuperset(map(type, tensors))
    )


def only_autograd_active(*tensors: torch.Tensor) -> bool:
    """Whether only autograd takes part in a call: no compiler, tracer, profiler or mode, and no tensor subclass."""
    return (
        is_eager(tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and (torch._C._len_torch_function_stack() == 0 or not _function_mode_active())
        and not torch.autograd._profiler_enabled()
        and not any(map(torch.is_neg, tensors))  # the lazy negation bit: the memory has the other sign
    )


def call_signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    arguments: tuple,
    options: dict[str, object],
) -> tuple | None:
    """Everything on which the validity of an eager call and its Call depend. None: it has to be validated again.

    `arguments` has the fields of Config before the options.
    """
    if forward_ad._current_level >= 0:
        return None
    numbers: tuple = ()
    lists = arguments[2:_END_OF_LISTS]
    for given in lists:  # no generator: a small call makes few Python calls
        if given is None:
            continue
        if any(x is not None and type(x) not in _LISTS for x in lists):
            return None  # an iterator, perhaps, which can be read only once
        tuples = [x if x is None else tuple(x) for x in lists]
        arguments = (*arguments[:2], *tuples, *arguments[_END_OF_LISTS:])
        numbers = tuple(each_number([x for x in tuples if x is not None]))
        break
    if options:
        arguments = (*arguments, *options, *options.values())
    try:
        tensors = (
            *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            *(q.layout, k.layout, v.layout, needs_gradient(q, k, v, sinks)),
        )
        if sinks is not None:
            tensors += (sinks.shape, sinks.dtype, sinks.device, sinks.layout)
    except RuntimeError:  # nested tensors have no shape
        return None
    # With the types, because 1 == True and 6 == 6.0: one is not valid because another is.
    return tensors, arguments, (*map(type, arguments), *map(type, numbers))


def known_call(signature: tuple | None) -> Call | None:
    """The earlier valid call with this signature."""
    try:
        return _calls.get(signature)
    except TypeError:  # an argument that cannot be hashed, which is hardly valid
        return None


def remember(signature: tuple | None, call: Call) -> None:
    """Stores a valid call."""
    if signature is None:
        return
    if not all(isinstance(x, _CONSTANTS) for x in each_number(signature[1])):
        return
    if len(_calls) >= MOST_CALLS:
        forget()
    _calls[signature] = call


def forget() -> None:
    """Drops all stored calls."""
    _calls.clear()
