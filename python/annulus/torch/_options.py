"""The options of a call: names and defaults, and checks of single values."""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

import numpy as np

from annulus import ConfigError
from annulus._core import ring_options

F = TypeVar("F", bound=Callable)

NAMES = {
    "pattern": ("dense", "longnet", "head_groups"),
    "offsets": ("blocked", "interleaved", "all"),
}
# Options of an executor that are not arguments of a call, with the source of their values.
NO_ARGUMENTS = {
    "batch": "the tensors",
    "kv_heads": "the tensors",
    "head_dim": "the tensors",
    "dtype": "the tensors",
    "device": "the tensors",
    "max_qkv_elements": "the tensors, which exist already, so that no limit is needed",
    "backward": "autograd",
}
# All other options, as the C++ library lists them: names, defaults and valid values.
OF_EXECUTORS = {o["name"]: o for o in ring_options() if o["name"] not in NO_ARGUMENTS}
# Options that Python implements, because C++ cannot convert tensors.
OF_CALLS = {
    "allow_half": {
        "kind": "flag",
        "default": False,
        "annotation": "bool",
        "shared": "same",
        "help": "Compute float32 in bfloat16 rather than fail for want of memory",
    }
}
OPTIONS = OF_EXECUTORS | OF_CALLS
DEFAULTS = {name: o["default"] for name, o in OPTIONS.items()}
# These may differ between ranks: how long a rank waits, its name of the group, how much memory it has.
OF_ONE_RANK = {"group", "timeout"} | {n for n, o in OPTIONS.items() if o["shared"] == "own"}
# What the ranks say of their key_padding_mask. If it differs, only that is reported, because other differences follow.
PADDING = "key_padding_mask"
NO_MASK = "none"
UNREAD_MASK = "given, but not read"  # it is columns of q and k, as it is with holes
HOLES = "given, with holes"
NEW_MASK = "given, and new"  # what it leaves, is known later: HOLES, or a text for each set of ranges
MOST_HEAD_DIM = next(o["most"] for o in ring_options() if o["name"] == "head_dim")
MOST_NUMBER = 3.4e38  # the range of fp32
_LEAST_SOFTCAP = 1e-6  # scores are divided by it in fp32
_MOST_SECONDS = 1e9  # the range of C++ clocks
_MOST_WHOLE = 2**63 - 1  # the range of int64


def _is_flag(x: object) -> bool:
    """Whether x is a flag of Python, NumPy or PyTorch. For Python, bool is a number, too."""
    return isinstance(x, bool) or str(getattr(x, "dtype", "")) in ("bool", "torch.bool")


# Objects of other libraries may raise any exception when they are converted to a number (a tensor without data raises a
# RuntimeError). Then they are not numbers.


def is_whole(x: object, least: int, most: int = _MOST_WHOLE) -> bool:
    try:
        return not _is_flag(x) and least <= operator.index(x) <= most
    except Exception:
        return False


def _is_finite(x: object) -> bool:
    try:
        return not _is_flag(x) and math.isfinite(x)
    except Exception:
        return False


def plain(x: object) -> bool | int | float:
    """Converts a valid option of another library's type, or a Fraction, to a type that JSON has."""
    if isinstance(x, np.bool_):
        return bool(x)
    try:
        return operator.index(x)
    except TypeError:
        return float(x)


def number_complaint(name: str, value: object, most: float) -> str | None:
    if getattr(value, "requires_grad", False):
        instead = " or multiply q by it" if name == "scale" else ""
        return f"{name} requires a gradient, which is not computed: pass {name}.item(){instead}"
    if _is_finite(value) and 0 < float(value) <= most:
        return None
    return f"{name} is {value!r}: a number above 0 and up to {most:g} was expected"


def dropout_complaint(name: str, value: object) -> str | None:
    if _is_finite(value) and 0 <= float(value) < 1:
        return None
    return f"{name} is {value!r}: a number from 0 to less than 1 was expected"


def whole_complaint(
    name: str, value: object, most: int = _MOST_WHOLE, *, least: int = 0
) -> str | None:
    if is_whole(value, least, most):
        return None
    last = "2**63 - 1" if most == _MOST_WHOLE else most
    return f"{name} is {value!r}: a whole number from {least} to {last} was expected"


def timeout_complaint(value: object) -> str | None:
    return None if value is None else number_complaint("timeout", value, _MOST_SECONDS)


def flag_complaint(name: str, value: object) -> str | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    return f"{name} is {value!r}: True or False was expected"


def window_complaint(window: object, causal: bool) -> str | None:
    """What is wrong with the result of window_pair; None: nothing."""
    if window is None:
        return None
    pair = isinstance(window, tuple) and len(window) == 2
    if not pair or not all(is_whole(x, -1) for x in window):
        return (
            f"window is {window!r}: None or a pair (before, after) of whole numbers from -1 (no limit) to 2**63 - 1 "
            "was expected"
        )
    if causal and window[1] > 0:
        return f"window is {window!r} and is_causal is True: causal attention has after = 0 (or -1)"
    return None


# In MB: a byte, and more than the memory of any device. DeepSpeed allocates buckets, and DDP counts bytes in 64 bits.
_LEAST_BUCKET, _MOST_BUCKET = 2.0**-20, 2.0**20


def bucket_complaint(value: object) -> str | None:
    if _is_finite(value) and _LEAST_BUCKET <= float(value) <= _MOST_BUCKET:
        return None
    return f"bucket_size is {value!r}: a number of MB above 0 (a byte, 2**-20, at least) and up to 2**20 was expected"


def name_complaint(name: str, value: object, names: tuple[str, ...]) -> str | None:
    if isinstance(value, str) and value in names:
        return None
    return f"{name} is {value!r}: one of {', '.join(map(repr, names))} was expected"


def option_complaint(name: str, value: object) -> str | None:
    """What is wrong with the value of an option; None: nothing."""
    kind = OPTIONS[name]["kind"]
    if kind == "name":
        return name_complaint(name, value, OPTIONS[name]["names"])
    if kind == "flag":
        return flag_complaint(name, value)
    if kind == "whole":
        return whole_complaint(name, value, OPTIONS[name]["most"])
    if kind == "number or none" and value is None:
        return None
    if name == "dropout_p":
        return dropout_complaint(name, value)
    if name == "softcap" and _is_finite(value) and not float(value) >= _LEAST_SOFTCAP:
        if float(value) == 0:  # none
            return None
        return f"{name} is {value!r}: 0 (none) or a number from {_LEAST_SOFTCAP:g} on was expected"
    return number_complaint(name, value, MOST_NUMBER)


def refuse_unknown(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises the TypeError that Python raises for a function without **options."""
    for name in given:
        if name not in known:
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")


def with_parameters(function: F, parameters: Iterable[inspect.Parameter]) -> F:
    """Replaces **options in the signature of a function by these parameters, except those that it has already."""
    signature = inspect.signature(function)
    own = {n: p for n, p in signature.parameters.items() if p.kind != p.VAR_KEYWORD}
    added = (p for p in parameters if p.name not in own)
    function.__signature__ = signature.replace(parameters=[*own.values(), *added])
    return function


def with_options(function: F) -> F:
    """Adds the options to the signature of a function with **options, and to its docstring those that it leaves out."""
    with_parameters(
        function,
        (
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=o["default"],
                annotation=o["annotation"].replace("typing.", ""),
            )
            for name, o in OPTIONS.items()
        ),
    )
    head, arguments, rest = re.fullmatch(
        r"(.*\n    Args:\n)?(.*?)(\n\n    [A-Z].*)?", function.__doc__ or "", re.DOTALL
    ).groups()
    if head is not None:
        for name, o in OPTIONS.items():
            if re.search(rf"^ {{8}}(\w+, )*{name}\b[\w, ]*:", arguments, re.MULTILINE) is None:
                arguments += f"\n        {name}: {o['help'][0].lower()}{o['help'][1:]}."
        function.__doc__ = head + arguments + (rest or "")
    return function


def window_pair(window: object) -> object:
    """A window that is a list as a tuple. What it is, is checked later."""
    return tuple(window) if isinstance(window, list) else window


def whole_numbers(name: str, values: object, *, one: bool = False) -> object:
    """A tuple of whole numbers for a sequence, array or tensor of them, or for a single one if `one`; or a tuple of
    such tuples, one for each batch entry. None stays None.

    Numbers are checked later.
    """
    if values is None:
        return None
    if one and is_whole(values, -(2**63)):
        return (operator.index(values),)
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)):
        wanted = "a whole number, or a sequence of them," if one else "a sequence of whole numbers"
        raise ConfigError(f"ring_attention: {name} is {values!r}: {wanted} was expected")
    # Numbers first: dynamo does not look up attributes of its variables.
    if any(not isinstance(x, int) and (isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) > 0) for x in listed):
        return tuple(whole_numbers(f"{name}[{i}]", x) for i, x in enumerate(listed))
    return tuple(listed)


def each_number(values: Iterable) -> Iterator:
    """The numbers of a tuple from whole_numbers, or the values of any tuple of tuples."""
    for x in values:
        if isinstance(x, tuple):
            yield from each_number(x)
        else:
            yield x


def branch_numbers(name: str, values: object) -> tuple:
    """segment_lengths or dilation_rates as a tuple; its elements are checked later."""
    if values is None:
        return ()
    try:
        # Sets have no order, but the order pairs lengths with rates.
        if not isinstance(values, (set, frozenset, dict)):
            return tuple(values)
    except TypeError:
        pass
    raise ConfigError(
        f"ring_attention: {name} is {values!r}: a sequence of whole numbers was expected"
    )
